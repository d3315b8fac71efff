"""Bundles of trees, of stacked trees, and of the order of one feature.

Shapes: N documents.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle import boosters, views
from ltrscale.bundle.contents import BundleKind, FeatureOrder, TreesArchitecture
from ltrscale.bundle.opened import Bundle, Scorer, fitting
from ltrscale.models.layers import EncoderSettings


@dataclass(frozen=True, kw_only=True)
class TreesBundle(Bundle):
    """One model of trees, or several whose scores are averaged."""

    kind: ClassVar[BundleKind] = "trees"
    holds: ClassVar = "trees"
    trees: TreesArchitecture
    projection: bytes | None = None
    """Projection from raw features to principal components, for trees that see these."""

    @property
    def forest(self) -> TreesArchitecture:
        """How the trees are put together."""
        return self.trees

    def scoring(self, *, device: torch.device | str, threads: int) -> Scorer:
        """The function that scores a batch of this bundle's features."""
        with fitting(self.url):
            view = self.view(device=device, threads=threads)
        models = {storage.join(self.url, name): content for name, content in self.contents.items()}
        return boosters.scorer(self.trees.library, models, view, threads=threads)

    def view(self, *, device: torch.device | str, threads: int) -> views.View:  # noqa: ARG002
        """The view of a batch that the trees see."""
        trees = self.trees
        view = views.raw(self.features) if trees.sees is None else views.chosen(self.features, trees.sees)
        if trees.per_query:
            view = views.per_query(view)
        if self.projection is not None:
            view = views.projected(view, views.Projection.from_bytes(self.projection, len(self.features)))
        return view


@dataclass(frozen=True, kw_only=True)
class StackBundle(TreesBundle):
    """Trees that see the scores of the bundles inside."""

    members: Mapping[str, Bundle]
    """The bundles, by name."""

    @property
    def reads_positions(self) -> bool:
        """Whether a member does."""
        return any(member.reads_positions for member in self.members.values())

    @property
    def encoders(self) -> tuple[EncoderSettings, ...]:
        """Those of the members."""
        return tuple(encoder for member in self.members.values() for encoder in member.encoders)

    def view(self, *, device: torch.device | str, threads: int) -> views.View:
        """The view of a batch that the trees see."""
        scorers = {
            name: member.scorer(features=self.features, device=device, threads=threads)
            for name, member in self.members.items()
        }
        view = super().view(device=device, threads=threads)
        return views.scored(view, scorers, standardise=self.trees.standardise)


@dataclass(frozen=True, kw_only=True)
class OrderBundle(Bundle):
    """The order of documents by one feature; it holds no model."""

    kind: ClassVar[BundleKind] = "feature"
    holds: ClassVar = "the order of a feature"
    order: FeatureOrder

    def scoring(self, *, device: torch.device | str, threads: int) -> Scorer:  # noqa: ARG002
        """The function that scores a batch of this bundle's features."""
        return order_scorer(self.order)


def order_scorer(order: FeatureOrder) -> Scorer:
    """The function that scores a batch of one feature [N, 1]: by its value, or the negative of it.

    A document without a value has the lowest float32 number, whatever else is in its list.

    Example:
        >>> price = QueryGroups(torch.tensor([[3.0], [torch.nan], [2.0]]), torch.tensor([0, 3]))
        >>> order_scorer(FeatureOrder(feature="price", ascending=True))(price).tolist()
        [-3.0, -3.4028234663852886e+38, -2.0]
    """

    def score(groups: QueryGroups) -> Tensor:
        (values_N,) = groups.features_NF.cpu().double().T
        scores_N = -values_N if order.ascending else values_N
        ordered_N: Tensor = scores_N.where(~values_N.isnan(), torch.finfo(torch.float32).min)
        return ordered_N

    return score
