"""Bundles that blend others.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, P pairs, F features.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ltrscale.batch import QueryGroups, group_index, standardise_by_group, sum_by_group
from ltrscale.bundle.contents import Blend, BundleKind
from ltrscale.bundle.opened import Bundle, Computing, Explainer, Scorer
from ltrscale.models.contributions import Contributions


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
