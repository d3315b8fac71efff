"""Bundles without a network: trees, blends of other bundles, and the order of one feature.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, P pairs, F features.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ltrscale import storage
from ltrscale.batch import QueryGroups, group_index, standardise_by_group, sum_by_group
from ltrscale.bundle import boosters, views
from ltrscale.bundle.contents import PROJECTION, Blend, BundleKind, FeatureOrder, TreesArchitecture
from ltrscale.bundle.opened import Bundle, Computing, Explainer, Scorer, fitting
from ltrscale.errors import InputError
from ltrscale.models.contributions import Contributions


@dataclass(frozen=True, kw_only=True)
class TreesBundle(Bundle):
    """One model of trees, or several whose scores are averaged; trees may see the scores of the bundles inside."""

    kind: ClassVar[BundleKind] = "trees"
    holds: ClassVar = "trees"
    wanted: ClassVar = "a bundle that jobs.train_gbdt made"
    held: TreesArchitecture

    @property
    def forest(self) -> TreesArchitecture:
        """How the trees are put together."""
        return self.held

    def scoring(self, computing: Computing) -> Scorer:
        """The function that scores a batch of this bundle's features."""
        return boosters.scorer(self.held.library, self.models(), self._view(computing), threads=computing.threads)

    def explaining(self, computing: Computing) -> Explainer:
        """The library's exact contributions if trees see only features, otherwise those of `by_swaps`."""
        view = self._view(computing)
        columns = {feature: place for place, feature in enumerate(self.features)}
        if not columns.keys() >= {*view.features}:
            return super().explaining(computing)
        explain = boosters.explainer(self.held.library, self.models(), view, threads=computing.threads)
        seen = [columns[feature] for feature in view.features]

        def explained(groups: QueryGroups, pairs_P2: Tensor) -> Contributions:
            parts_PF = torch.zeros(len(pairs_P2), len(columns), dtype=torch.float64)
            parts_PF[:, seen] = explain(groups, pairs_P2)
            return Contributions(parts_PF, torch.zeros(len(pairs_P2), dtype=torch.float64))

        return explained

    def importances(self) -> dict[str, float]:
        """The importance of each column that its trees see, the highest first; see `boosters.importances`."""
        trees = self.held
        features_seen = [feature.name for feature in self.features] if trees.sees is None else trees.sees
        names = [*features_seen, *(f"component {i}" for i in range(trees.projection)), *trees.members]
        shares = boosters.importances(trees.library, self.models(), len(names))
        return dict(sorted(zip(names, shares.tolist(), strict=True), key=lambda pair: -pair[1]))

    def leans_on(self) -> Mapping[str, float | None]:
        """The features that it splits by, or all that it reads if it sees more than features."""
        if self.held.projection or self.held.members:
            return super().leans_on()
        return {name: share for name, share in self.importances().items() if share > 0}

    def models(self) -> dict[str, bytes]:
        """The files of the trees, by the names that errors use."""
        return {storage.join(self.url, name): self.contents[name] for name in self.held.files()}

    def _view(self, computing: Computing) -> views.View:
        """The view of a batch that the trees see."""
        trees = self.held
        with fitting(self.url):
            view = views.raw(self.features, trees.sees, per_query=trees.per_query)
            if trees.projection:
                projection = views.Projection.from_bytes(self.contents[PROJECTION], len(self.features))
                view = views.projected(view, projection)
            if not trees.members:
                return view
            return views.scored(view, self.member_scorers(computing), standardise=trees.standardise)


@dataclass(frozen=True, kw_only=True)
class BlendBundle(Bundle):
    """The weighted mean of the scores of the bundles inside; it learns nothing itself."""

    kind: ClassVar[BundleKind] = "blend"
    holds: ClassVar = "a blend of rankers"
    held: Blend

    @property
    def blended(self) -> Mapping[str, float]:
        """Weight of each member's score."""
        return self.held.weights

    def scoring(self, computing: Computing) -> Scorer:
        """The function that scores a batch of this bundle's features."""
        members = self.member_scorers(computing)

        def score(groups: QueryGroups) -> Tensor:
            offsets_Q1 = groups.offsets_Q1.cpu()
            parts = (
                weight * standardise_by_group(members[name](groups).double(), offsets_Q1)
                for name, weight in self.blended.items()
            )
            return sum(parts, torch.zeros(groups.n_documents, dtype=torch.float64))

        return score

    def explaining(self, computing: Computing) -> Explainer:
        """The weighted sum of the members' contributions, each divided by the deviation of its scores in the list."""
        members = {
            name: (scorer, self.members[name].explainer(computing, self.features))
            for name, scorer in self.member_scorers(computing).items()
        }

        def explained(groups: QueryGroups, pairs_P2: Tensor) -> Contributions:
            offsets_Q1 = groups.offsets_Q1.cpu()
            group_N = group_index(offsets_Q1)
            features_PF = torch.zeros(len(pairs_P2), groups.n_features, dtype=torch.float64)
            beside_P = torch.zeros(len(pairs_P2), dtype=torch.float64)
            for name, weight in self.blended.items():
                scorer, explain = members[name]
                scores_N = scorer(groups).double()
                scaled_N = standardise_by_group(scores_N, offsets_Q1)
                # scaled scores are linear in the scores of a list, with this slope
                slope_Q = sum_by_group(scores_N * scaled_N, offsets_Q1)
                slope_Q = sum_by_group(scaled_N.square(), offsets_Q1) / slope_Q.where(slope_Q > 0, torch.inf)
                factor_P = weight * slope_Q[group_N[pairs_P2[:, 0].cpu()]]
                parts = explain(groups, pairs_P2)
                features_PF += factor_P[:, None] * parts.features_PF
                beside_P += factor_P * parts.beside_P
            return Contributions(features_PF, beside_P)

        return explained


@dataclass(frozen=True, kw_only=True)
class OrderBundle(Bundle):
    """The order of documents by one feature; it holds no model."""

    kind: ClassVar[BundleKind] = "feature"
    holds: ClassVar = "the order of a feature"
    held: FeatureOrder

    def scoring(self, computing: Computing) -> Scorer:  # noqa: ARG002
        """The function that scores a batch of this bundle's features."""
        if [feature.name for feature in self.features] != [self.held.feature]:
            raise InputError(f"{self.url}: its features are not the one that orders, {self.held.feature!r}")
        return order_scorer(self.held)


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
