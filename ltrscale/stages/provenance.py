"""Which data a bundle has seen, as origins say: it is evaluated on others, which its teachers have not seen either."""

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Strict, validate
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.scores import read_periods
from ltrscale.data.dataset.split import Split, Splits, SplitsWithTest, with_periods_named
from ltrscale.errors import InputError
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


def check_unseen(url: str, test: Split, *, chosen_on: bool = False) -> None:
    """Check that a bundle, the bundles it was made from and its teacher have seen no period of the test split.

    A bundle has seen the periods that it was trained or selected on; with `chosen_on` only those that it was trained
    on. The check covers bundles that a job made, while their inputs are still at the recorded URLs.

    Raises:
        InputError: one of them has; the message names the period.
    """
    if _is_there(test):  # periods by name, as bundles record theirs: folds of the same periods complete each other
        test = with_periods_named(test)
    waiting, checked = [url], set()
    while waiting:
        if (bundle := waiting.pop()) not in checked:
            checked.add(bundle)
            waiting += _check_unseen_by(bundle, test, chosen_on)


def check_member(name: str, url: str, split: Split, fault: str, *, chosen_on: bool = False) -> None:
    """Like `check_unseen`, for one of several bundles; `fault` says what it has seen, the effect and the remedy."""
    try:
        check_unseen(url, split, chosen_on=chosen_on)
    except InputError as error:
        raise InputError(f"bundles.{name}: {url} {fault} ({error})") from error


def _check_unseen_by(url: str, test: Split, chosen_on: bool) -> list[str]:
    """Check the splits of one bundle; returns the URLs of its inputs and teachers."""
    made_by = (storage.read_manifest(url) or {}).get("made_by", {})
    origin = validate(Provenance, made_by, url)
    splits = origin.config.splits
    made_from = list(origin.inputs) if splits else []
    if len(splits) != 2 or not all(map(_is_there, splits)):  # pretraining records one split: it reads no labels
        return made_from
    train, validation = (split.replace(periods=_still_there(split) or None) for split in splits)
    learns_from_both = made_by.get("stage") == "refit"
    try:
        if not chosen_on:
            check_disjoint(SplitsWithTest(train=train, validation=validation, test=test))
        else:
            for learnt in (train, validation) if learns_from_both else (train,):
                check_disjoint(Splits(train=learnt, validation=test))
    except InputError as error:
        raise InputError(f"{url} was made from other splits than it is evaluated on: {error}") from error
    return made_from + [teacher for split in (train, validation) if split.scores for teacher in scored_by(split)]


def _is_there(split: Split) -> bool:
    """True if the data sets still exist, with at least one of the periods that were read."""
    exist = all(storage.exists(storage.join(data, storage.MANIFEST)) for data in split.data)
    return exist and bool(_still_there(split) or split.periods is None)


def _still_there(split: Split) -> list[str]:
    """The periods and ranges that a split names, without periods that its data sets no longer have."""
    existing = {period for url in split.data for period in open_dataset(url).manifest.periods}
    return [item for item in split.periods or () if item in existing or ".." in item]


def scored_by(split: Split) -> list[str]:
    """The bundles behind the scores that serve as labels of a split."""
    assert split.scores is not None
    scored = list(read_periods(split.scores, with_periods_named(split).periods or ()))
    try:
        bundles = [scores.made_by["config"]["bundle"] for scores in scored if scores]
        return sorted({str(url) for bundle in bundles for url in ([bundle] if isinstance(bundle, str) else bundle)})
    except (LookupError, TypeError) as error:
        raise InputError(f"{split.scores}: does not record which bundle made the scores; score again") from error
