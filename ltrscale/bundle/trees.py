"""Bundles of trees.

Shapes: P pairs, F features.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle import boosters, views
from ltrscale.bundle.contents import PROJECTION, BundleKind, TreesArchitecture
from ltrscale.bundle.opened import Bundle, Computing, Explainer, Scorer, fitting
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
            view = views.raw(self.features) if trees.sees is None else views.chosen(self.features, trees.sees)
            if trees.per_query:
                view = views.per_query(view)
            if trees.projection:
                projection = views.Projection.from_bytes(self.contents[PROJECTION], len(self.features))
                view = views.projected(view, projection)
            if not trees.members:
                return view
            return views.scored(view, self.member_scorers(computing), standardise=trees.standardise)
