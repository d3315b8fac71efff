"""The stage that makes the order of one feature a bundle, which everything takes like a trained one."""

from typing import ClassVar

import torch

from ltrscale.bundle import FeatureOrder, order_scorer, save_order
from ltrscale.bundle.reference import reference_of
from ltrscale.data.stream.batches import iterate
from ltrscale.progress import Report, log
from ltrscale.ranking.choices import metric_named
from ltrscale.stages.stage import LabelledStage, Origin
from ltrscale.training.validation import LabelledData

_VALIDATED = ("ndcg@5", "ndcg@10")


class FeatureJob(LabelledStage):
    """Make the order of one feature a bundle; it learns nothing, and only the labels of validation are read."""

    stage: ClassVar = "feature"
    order: FeatureOrder

    def own_settings(self) -> FeatureOrder:
        """The feature and the direction."""
        return self.order

    def work(self, origin: Origin, report: Report) -> None:
        """Measure the order on the validation groups, as every trainer does, and commit the bundle."""
        data = LabelledData.of(self.splits.train, self.splits.validation, without=())
        data = data.serving([self.order.among(data.train.features)], whose=self.out)
        metrics = _validated(self.order, data)
        report(metrics)
        save_order(
            self.out,
            self.order,
            config=self.order.model_dump(mode="json"),
            features=data.train.features,
            dataset_hash=data.train.hash,
            read_as=data.train.read_as,
            reference=reference_of(data.train),
            metrics=metrics,
            made_by=origin,
        )
        log.info("committed %s", self.out)


def _validated(order: FeatureOrder, data: LabelledData) -> dict[str, float]:
    """The mean of each metric over the validation groups that define it."""
    assert data.judged is not None
    score, values = order_scorer(order), []
    for groups in iterate(data.judged):
        assert groups.labels_N is not None
        scores_N = score(groups)
        values.append(
            torch.stack(
                [metric_named(metric).of(scores_N, groups.labels_N, groups.offsets_Q1) for metric in _VALIDATED]
            )
        )
    means_M = torch.cat(values, dim=1).double().nanmean(dim=1).tolist()
    return {f"validation_{metric}": mean for metric, mean in zip(_VALIDATED, means_M, strict=True)}
