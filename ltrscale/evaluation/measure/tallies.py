"""The sums of an evaluation, added up as the measured groups arrive; all its figures follow from them.

Shapes: Q groups, B blocks of groups, T trials of all methods, M metrics.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ltrscale.evaluation.measure.corrected import WeightCounts
from ltrscale.evaluation.measure.measuring import GroupValues
from ltrscale.evaluation.measure.slices import ALL, check_few
from ltrscale.evaluation.statistics.blocks import Tally, block_numbers
from ltrscale.ranking.metrics import Calibration, calibration


@dataclass
class Tallies:
    """The sums of each slice, and counts of all groups."""

    slices: dict[str, Tally]
    clicks: dict[int, Tensor] = field(default_factory=dict)
    """Tallies of scores against clicks, by trial."""
    documents: int = 0
    unshown: int = 0
    """Documents without a position."""
    weights: WeightCounts = field(default_factory=WeightCounts)
    """Relevant documents, and the sums of their weights, of the metrics corrected for positions."""
    corrected: Tally | None = None
    """Sums of these metrics; None if they are not measured."""

    def add(self, values: GroupValues, *, groups: int, slice_by: Sequence[str]) -> None:
        """Add groups, of `groups` in all; InputError if a column of `slice_by` has too many values."""
        blocks_Q = block_numbers(values.gids_Q, first=self.slices[ALL].groups, groups=groups)
        self.slices[ALL].add(blocks_Q, values.values_TMQ)
        for name, member_Q in values.slices.items():
            tally = self.slices.setdefault(name, Tally(*values.values_TMQ.shape[:2]))
            tally.add(blocks_Q[member_Q], values.values_TMQ[..., member_Q])
        check_few(list(self.slices), slice_by)
        for t, tally_CB in values.clicks.items():
            self.clicks[t] = self.clicks.get(t, 0) + tally_CB
        self.documents += int(values.documents_Q.sum())
        self.unshown += values.unshown
        if (sums := values.corrected) is not None:
            self.corrected = self.corrected or Tally(*sums.blocks.sums_BTM.shape[1:])
            self.corrected.add_sums(blocks_Q, sums.blocks)
            self.weights = self.weights.plus(sums.counts)

    def calibration(self, t: int) -> Calibration | None:
        """The calibration of a trial; None if its scores are not logits, or if some labels are not clicks."""
        if (tally_CB := self.clicks.get(t)) is None:
            return None
        calibrated = calibration(tally_CB)
        return calibrated if calibrated.documents == self.documents else None
