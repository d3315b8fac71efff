"""Masking in the views: hide values that would let an encoder recognise a document instead of understanding it.

Shapes: N documents, F features.
"""

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field

from ltrscale.config import Config
from ltrscale.errors import InputError, nearest
from ltrscale.models.features import FeatureKind

Rate = Annotated[float, Field(ge=0, le=1)]


class MaskConfig(Config):
    """Rates at which values of a view are masked, after the augmentation, each entry independently.

    A masked category becomes the unknown one, a masked number the centre of its feature, 0. A feature has the rate of
    its name in `columns`, otherwise the highest of the patterns there that it matches, otherwise that of its kind:
    `numbers` or `categories`, and for a category that identifies a document the higher one of `categories` and
    `identifying`.
    """

    numbers: Rate = 0.0
    """Rate for all numeric features; 0 masks none, because augmentations change numbers already."""

    categories: Rate = 0.0
    """Rate for all categorical features; 0 masks none, because many categories carry relevance (the papers mask
    categories no more than numbers)."""
    columns: dict[str, Rate] = Field(default_factory=dict)
    """Rates by the name of a feature, numeric or categorical, or by a pattern such as `c_*`; where several patterns
    match, the highest rate."""
    identifying: Rate = 0.8
    """Rate for categorical features that identify a document within its group: at least half of the documents have a
    value that no other document of their group has. With .8, both views show the value in 4% of the cases, so that the
    encoder sees it but cannot rely on it; the papers have no such features."""

    def rates(
        self, kinds: Sequence[FeatureKind], names: Sequence[str], identifying: Collection[str] = ()
    ) -> list[float]:
        """The rate of each feature.

        Args:
            kinds: kind of each feature for the network.
            names: of the features.
            identifying: names of the categorical features that identify a document.

        Raises:
            InputError: `columns` names a feature or pattern that does not occur; names the nearest feature.

        Example:
            >>> config = MaskConfig(numbers=0.2, columns={"f_p*": 0.1, "f_age": 0.5})
            >>> kinds = ["numeric", "numeric", "numeric", "categorical", "categorical"]
            >>> config.rates(kinds, ["f_age", "f_pop", "f_size", "c_os", "c_id"], {"c_id"})
            [0.5, 0.1, 0.2, 0.0, 0.8]
        """
        matches = {key: [name for name in names if fnmatchcase(name, key)] for key in self.columns if key not in names}
        for key, found in matches.items():
            if not found:
                near = nearest(key, names)
                raise InputError(f"pretrain.mask.columns: no feature is or matches {key!r}; the nearest is {near!r}")
        rates = []
        for kind, name in zip(kinds, names, strict=True):
            patterns = [self.columns[key] for key, found in matches.items() if name in found]
            of_kind = self.numbers if kind == "numeric" else self.categories
            if kind == "categorical" and name in identifying:
                of_kind = max(of_kind, self.identifying)
            rates.append(self.columns.get(name, max(patterns, default=of_kind)))
        return rates
