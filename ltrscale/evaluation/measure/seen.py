"""The values that training has of each feature, and the groups that have others: what a ranker never learnt from.

Shapes: N documents, Q groups, F features.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ltrscale.batch import QueryGroups, sum_by_group
from ltrscale.data.dataset.manifest import Feature
from ltrscale.models.fitting import ValueCounts


@dataclass(frozen=True, eq=False)
class Seen:
    """The range of each number and the codes of each categorical feature in some groups."""

    low_F: NDArray[np.float32]
    """The lowest finite value; of codes -inf."""
    high_F: NDArray[np.float32]
    """The highest finite value; of codes inf."""
    codes: Mapping[int, NDArray[np.float32]]
    """Sorted codes by the number of the feature."""

    @classmethod
    def of(cls, parts: Iterable[QueryGroups], features: Sequence[Feature]) -> Self:
        """Look at groups in one pass; their order does not matter.

        A number without a finite value there has the range from inf to -inf, outside which every value is.
        """
        vocabularies = {i: ValueCounts() for i, feature in enumerate(features) if feature.kind == "categorical"}
        low_F, high_F = (np.full(len(features), end, np.float32) for end in (np.inf, -np.inf))
        for groups in parts:
            x_NF = groups.features_NF.numpy()
            finite_NF = np.isfinite(x_NF)
            low_F = np.minimum(low_F, x_NF.min(axis=0, initial=np.inf, where=finite_NF))
            high_F = np.maximum(high_F, x_NF.max(axis=0, initial=-np.inf, where=finite_NF))
            for i, vocabulary in vocabularies.items():
                vocabulary.add(x_NF[:, i])
        low_F[list(vocabularies)], high_F[list(vocabularies)] = -np.inf, np.inf
        return cls(low_F, high_F, {i: vocabulary.counts()[0] for i, vocabulary in vocabularies.items()})

    def lacks(self, groups: QueryGroups) -> Tensor:
        """True for each group with a number outside its range or a code that was not seen, shape [Q].

        A missing value is neither.

        Example:
            >>> train = QueryGroups(torch.tensor([[1.0, 7.0], [3.0, 8.0]]), torch.tensor([0, 2]))
            >>> seen = Seen.of([train], [Feature(name="price"), Feature(name="shop", kind="categorical")])
            >>> later = QueryGroups(torch.tensor([[2.0, 8.0], [4.0, 8.0], [2.0, 9.0]]), torch.tensor([0, 1, 2, 3]))
            >>> seen.lacks(later)
            tensor([False,  True,  True])
        """
        x_NF = groups.features_NF.numpy()
        new_N = ((x_NF < self.low_F) | (x_NF > self.high_F)).any(axis=1)
        for i, codes_V in self.codes.items():
            new_N |= ~np.isin(x_NF[:, i], codes_V) & ~np.isnan(x_NF[:, i])
        return sum_by_group(torch.from_numpy(new_N).long(), groups.offsets_Q1) > 0
