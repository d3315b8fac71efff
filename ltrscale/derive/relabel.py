"""Relabelling: from a data set directory to one with simulated or cleaned labels, or with more features, in steps.

The steps run one after the other on blocks of groups that stream from the old directory to the new one, in bounded
memory. A step that first needs a statistic of the whole data set, such as the number of labelled groups, makes an extra
pass through the steps before it. If labels change, the column `relevance` keeps each document's original label.

Shapes: Q groups, N documents.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.config import Config, Operational
from ltrscale.data.dataset.manifest import Accounting, Dataset, open_dataset
from ltrscale.data.dataset.writer import per_document
from ltrscale.derive.cleaning import ClickOrder, ClickRatioWeights, RandomNegatives, Refine, ShownOnly
from ltrscale.derive.feedback import (
    BinaryFeedback,
    Clicks,
    ImplicitFeedback,
    LabelledFraction,
    MinDocs,
    RelevantOnly,
)
from ltrscale.derive.match import Appending, Match
from ltrscale.derive.rewrite import GroupBlock, GroupWriter, columns_in, read_groups
from ltrscale.derive.step import NO_LABELS, Changes, StepStart, Transform, labelled
from ltrscale.draws import mix
from ltrscale.errors import InputError
from ltrscale.progress import Report, log, progress
from ltrscale.stages.inputs import DataUrl
from ltrscale.stages.stage import Origin, Stage

RelabelStepConfig = Annotated[
    LabelledFraction
    | RelevantOnly
    | MinDocs
    | BinaryFeedback
    | ImplicitFeedback
    | Clicks
    | ClickRatioWeights
    | Refine
    | ShownOnly
    | ClickOrder
    | RandomNegatives
    | Match,
    Field(discriminator="kind"),
]


class RelabelConfig(Config):
    """The changes to a data set."""

    fixed: ClassVar = {"compression": "zstd", "row_group_mb": 8, "file_mb": 256}

    steps: tuple[RelabelStepConfig, ...] = Field(min_length=1)
    """The steps, in order; each acts on the output of the one before."""
    seed: int = 0
    """Seed of all random draws."""

    @model_validator(mode="after")
    def _steps_suit_each_other(self) -> Self:
        for number, step in enumerate(self.steps):
            try:
                step.check_after(self.steps[:number])
            except ValueError as error:
                raise ValueError(f"steps: {error}") from None
        return self


class RelabelJob(Stage):
    """Simulate or clean the labels of a data set, or append features of exact match."""

    stage: ClassVar = "relabel"
    makes_data: ClassVar = True
    out: Operational[str]
    """Directory of the new data set."""
    data: DataUrl
    """Data set directory to start from; it is not changed."""
    relabel: RelabelConfig

    def check(self) -> None:
        """Refuse to replace the data set itself."""
        if storage.place(self.out) == storage.place(self.data):
            raise InputError(f"{self.out}: out is the data set itself; choose another directory")

    def inputs(self) -> dict[str, str]:
        """Content of the data set, and of what the steps read besides."""
        inputs = super().inputs()
        for step in self.relabel.steps:
            inputs |= step.further_inputs()
        return inputs

    def work(self, origin: Origin, report: Report) -> None:
        """Make the new data set; `report` receives the counts of each step.

        Raises:
            InputError: a step names an unknown period or feature, needs positions or grades that the data set does not
                have, reads no labelled group, or leaves no labelled group; or as `Match.transform`.
        """
        config, dataset = self.relabel, open_dataset(self.data)
        names = _columns(config, dataset)
        ready, extended = _ready(config, dataset, names)
        tallies: list[Counter[str]] = [Counter() for _ in ready]
        with storage.Commit(self.out) as commit:
            first = ready[0].transform  # `Match.check_after` lets no step stand before it
            statistics = first.statistics.put(commit) if isinstance(first, Appending) else None
            renumber = any(step.renumbers or step.lists > 1 for step in config.steps)
            writer = GroupWriter(commit, extended, statistics=statistics, renumber=renumber)
            everywhere = frozenset(dataset.manifest.periods)
            for block in _chain(ready, _read(dataset, everywhere, names, "relabel"), tallies):
                writer.add(_with_relevance(block) if names else block)
            for config_step, step, tally in zip(config.steps, ready, tallies, strict=True):
                if config_step.acts_on_labels:
                    _check(step, tally)
            writer.finish(_account(dataset, ready, tallies), origin)
        for step, tally in zip(ready, tallies, strict=True):
            summary = ", ".join(f"{tally[key]:,} {_words(key)}" for key in _COUNTS if tally[key])
            log.info("relabel: %s: %s", step.name, summary)
            report({"stage": "relabel", "step": step.name, **{key: tally[key] for key in _COUNTS}})


@dataclass(frozen=True)
class _ReadyStep:
    """A step that is ready to run, and the periods that it changes."""

    name: str
    periods: frozenset[str]
    transform: Transform


_COUNTS = ("groups_read", "documents_read", *Changes._fields)


def _words(key: str) -> str:
    return key.replace("_", " ")


def _columns(config: RelabelConfig, dataset: Dataset) -> tuple[str, ...]:
    """The columns of the new data set that hold one number per document; empty if the old ones stay as they are."""
    if not any(step.acts_on_labels for step in config.steps):
        return ()
    present = set(columns_in(dataset))
    if "labels" not in present:
        raise InputError(f"{dataset.url}: there are no labels to act on; prepare it with labels")
    written = {"labels", "relevance"}.union(*(step.fills for step in config.steps))
    return tuple(sorted(written | {*per_document(present)}))


def _read(dataset: Dataset, periods: frozenset[str], names: tuple[str, ...], label: str) -> Iterator[GroupBlock]:
    """The original groups, with all columns of the new data set."""
    with progress(label, dataset.manifest.files.in_periods(periods).counts().documents) as advance:
        for block in read_groups(dataset, periods=periods):
            missing_N = np.full(block.n_documents, np.nan, np.float32)
            first = {"relevance": block.columns_N["labels"]}
            yield block.with_columns(**{n: block.columns_N.get(n, first.get(n, missing_N)) for n in names})
            advance(block.n_documents)


def _with_relevance(block: GroupBlock) -> GroupBlock:
    """The original labels of the groups that have labels now."""
    relevance_N = np.where(block.on_documents(labelled(block)), block.columns_N["relevance"], np.float32(np.nan))
    return block.with_columns(relevance=relevance_N)


def _chain(
    ready: Iterable[_ReadyStep], blocks: Iterator[GroupBlock], tallies: Iterable[Counter[str]]
) -> Iterator[GroupBlock]:
    """The blocks after all steps, each of which adds its counts to its tally."""
    for step, tally in zip(ready, tallies, strict=True):
        blocks = _run(step, blocks, tally)
    return blocks


def _run(step: _ReadyStep, blocks: Iterator[GroupBlock], tally: Counter[str]) -> Iterator[GroupBlock]:
    for block in blocks:
        if block.period not in step.periods:
            yield block
            continue
        labels = int(labelled(block).sum())
        tally.update(groups_read=len(block), documents_read=block.n_documents, labelled_read=labels)
        with _named(step.name):
            for after, changes in step.transform(block):
                tally.update(changes._asdict())
                if len(after):
                    tally["labelled_left"] += int(labelled(after).sum())
                    yield after


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Put the name of the step before an error's message."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def _ready(config: RelabelConfig, dataset: Dataset, names: tuple[str, ...]) -> tuple[list[_ReadyStep], Dataset]:
    """Prepare the steps, one after the other; also the data set with the features that they append."""
    periods_by_step = [step.changed_periods(dataset) for step in config.steps]
    ready: list[_ReadyStep] = []
    extended = dataset
    span, draws = dataset.manifest.counts().groups, 0
    for number, (step, periods) in enumerate(zip(config.steps, periods_by_step, strict=True)):
        name = f"steps.{number} ({step.kind})"
        blocks = partial(_survey, dataset, tuple(ready), periods, names, name)
        seed = mix("relabel", config.seed, draws)
        with _named(name):
            transform = step.transform(StepStart(extended, seed, blocks, span))
        ready.append(_ReadyStep(name, periods, transform))
        extended = step.extended(extended)
        span *= step.lists
        draws += step.acts_on_labels  # features that another step appends leave the drawn labels as they are
    return ready, extended


def _survey(
    dataset: Dataset, earlier: Sequence[_ReadyStep], periods: frozenset[str], names: tuple[str, ...], name: str
) -> Iterator[GroupBlock]:
    """The input groups of a step, after the steps before it."""
    blocks = _read(dataset, periods, names, f"relabel: {name}, counting")
    return _chain(earlier, blocks, [Counter() for _ in earlier])


def _check(step: _ReadyStep, tally: Counter[str]) -> None:
    """Check that a step read labels and left some."""
    if not tally["labelled_read"]:
        raise InputError(f"{step.name}: {NO_LABELS}")
    if not tally["labelled_left"]:
        read = f"{tally['labelled_read']:,} labelled groups"
        raise InputError(f"{step.name}: none of {read} has labels afterwards; choose settings that keep some")


def _account(dataset: Dataset, ready: list[_ReadyStep], tallies: list[Counter[str]]) -> Accounting:
    """The groups and documents that came in (read or added by a step) and were kept, with the counts of each step."""
    counts = dataset.manifest.counts()
    total = sum(tallies, Counter())
    groups_in = counts.groups + total["groups_added"]
    rows_in = counts.documents + total["documents_added"]
    return Accounting(
        rows_in=rows_in,
        rows_kept=rows_in - total["documents_dropped"],
        rows_rejected=total["documents_dropped"],
        groups_in=groups_in,
        groups_kept=groups_in - total["groups_dropped"],
        groups_rejected=total["groups_dropped"],
        rules={f"{s.name}: {_words(key)}": t[key] for s, t in zip(ready, tallies, strict=True) for key in _COUNTS},
    )
