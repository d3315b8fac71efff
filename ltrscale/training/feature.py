"""The order of one feature as a ranker, which learns nothing.

Shapes: M metrics.
"""

from typing import ClassVar

import torch

from ltrscale.bundle import FeatureOrder, Scorer, facts, order_scorer, save_order
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.batches import iterate
from ltrscale.progress import Report, log
from ltrscale.ranking.choices import metric_named
from ltrscale.stages.stage import LabelledStage, Origin
from ltrscale.training.ranking import LabelledData

_VALIDATED = ("ndcg@5", "ndcg@10")


class FeatureJob(LabelledStage):
    """Make the order of one feature a bundle; it learns nothing, and only the labels of validation are read."""

    stage: ClassVar = "feature"
    order: FeatureOrder

    def work(self, origin: Origin, report: Report) -> None:
        """Evaluate the order on the validation groups and commit the bundle."""
        data = LabelledData.from_splits(self.splits.train, self.splits.validation, without=())
        data = data.serving([self.order.among(data.train.features)], whose=self.out, on_purpose=True)
        assert data.judged is not None
        metrics = validated(data.judged, order_scorer(self.order))
        report(metrics)
        save_order(self.out, self.order, facts(data.train, self.order, metrics=metrics, made_by=origin))
        log.info("committed %s", self.out)


def validated(judged: Selection, score: Scorer) -> dict[str, float]:
    """NDCG@5 and NDCG@10 of an untrained ranker over the judged groups."""
    values = []
    for groups in iterate(judged):
        assert groups.labels_N is not None
        scored = score(groups), groups.labels_N, groups.offsets_Q1
        values.append(torch.stack([metric_named(metric).values(*scored) for metric in _VALIDATED]))
    means_M = torch.cat(values, dim=1).double().nanmean(dim=1).tolist()
    return {f"validation_{metric}": mean for metric, mean in zip(_VALIDATED, means_M, strict=True)}
