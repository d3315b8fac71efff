"""The data and the labels that a bundle was made from, as the job that made it recorded them."""

from pydantic import Field

from ltrscale.config import Config, digest
from ltrscale.data.dataset.split import Split


class RecordedSplits(Config, extra="ignore"):
    """The part of a stage's config that lists the splits for training and selection."""

    splits: tuple[Split, ...] = ()


class Provenance(Config, extra="ignore"):
    """The part of a manifest's `made_by` from which the data that a bundle has seen follow."""

    config: RecordedSplits = RecordedSplits()
    inputs: dict[str, str] = Field(default_factory=dict)
    """Content hash of each input, by its URL."""

    def labels(self) -> str | None:
        """Identity of the labels for training and selection: bundles of equal labels share a draw.

        It covers the content of the periods, the label column and the sample, not the scores of another model. None if
        no job that learns from labels is recorded; pretraining reads one split and no labels.
        """
        if len(self.config.splits) != 2:
            return None
        return digest([self._labels_of(split) for split in self.config.splits])

    def _labels_of(self, split: Split) -> list[object]:
        where = [self.inputs.get(url, url) for url in split.data]
        return [where, split.periods, split.labels, split.sample]
