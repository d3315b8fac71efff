"""Which data a bundle has seen, as the origin in its manifest says."""

from pydantic import Field

from ltrscale.config import Strict
from ltrscale.data.dataset.split import Split
from ltrscale.origin import digest


class RecordedSplits(Strict, extra="ignore"):
    """The part of a stage's config that lists the splits for training and selection."""

    splits: tuple[Split, ...] = ()


class Provenance(Strict, extra="ignore"):
    """The part of a manifest's `made_by` that states which data a bundle has seen."""

    config: RecordedSplits = RecordedSplits()
    inputs: dict[str, str] = Field(default_factory=dict)
    """Content hash of each input, by its URL."""

    def labels(self) -> str | None:
        """Identity of the labels for training and selection: bundles of equal labels share a draw.

        It covers the content of the periods, the label column, the sample and the fold, not the scores of another
        model. None if no job that learns from labels is recorded; pretraining reads one split and no labels.
        """
        if len(self.config.splits) != 2:
            return None
        return digest([self._labels_of(split) for split in self.config.splits])

    def _labels_of(self, split: Split) -> list[object]:
        data = [self.inputs.get(url, url) for url in split.data]
        fold = None if split.fold is None else split.fold.model_dump(mode="json")
        of = "relevance" if split.labels == "relevance" else "labels"  # goals are labels of the same groups
        return [data, split.periods, of, split.sample, fold]
