"""The common parts of all relabelling steps: random draws, relevance grades as probabilities, counts of changes.

A random draw is a function of (seed, number of the step, key of the group, place of the document in the group), so it
depends neither on the layout of files nor on changes to other groups.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import pyarrow.compute as pc

from ltrscale.arrays import Bools, Doubles, Floats
from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.data.dataset.split import PeriodTexts
from ltrscale.derive.rewrite import GroupBlock, periods_of
from ltrscale.errors import InputError, nearest
from ltrscale.simulate.users import highest_grade

NO_LABELS = "no group of its periods has labels; name periods with labels"


class Changes(NamedTuple):
    """Counts of the groups and documents that a step changed, dropped and added; it passes on read + added - dropped.

    A changed group or document is passed on with another label or weight.
    """

    groups_changed: int = 0
    groups_dropped: int = 0
    groups_added: int = 0
    documents_changed: int = 0
    documents_dropped: int = 0
    documents_added: int = 0


Changed = Iterator[tuple[GroupBlock, Changes]]
Transform = Callable[[GroupBlock], Changed]
"""Maps a block to blocks, which may be empty, with their counts."""


@dataclass(frozen=True)
class StepStart:
    """What a step knows before it sees its first block.

    `blocks` starts a pass through its input groups, after the steps before it; `span` is above any key of a group.
    """

    dataset: Dataset
    seed: int
    blocks: Callable[[], Iterator[GroupBlock]]
    span: int

    def feature(self, name: str) -> int:
        """The column of a feature; an InputError names the nearest if none has this name."""
        names = [feature.name for feature in self.dataset.manifest.features]
        if name not in names:
            raise InputError(f"there is no feature {name!r}; the nearest name is {nearest(name, names)!r}")
        return names.index(name)

    def highest_grade(self, given: float | None) -> float:
        """The given grade, or else the highest label in the data set."""
        return highest_grade(given, self.dataset.manifest.label_counts)


class RelabelStep(Config):
    """A change to the groups of a data set."""

    kind: str
    columns: ClassVar[tuple[str, ...]] = ()
    """The columns of documents that it fills, whatever its settings."""
    renumbers: ClassVar[bool] = False
    """Whether it drops or adds groups even if `lists` is 1, so that those after them get other numbers."""
    acts_on_labels: ClassVar[bool] = False
    """Whether it changes labels, groups or their documents, and must read labels and leave some."""

    def transform(self, start: StepStart) -> Transform:
        """The step as a function of blocks; an InputError if the data set lacks what it needs."""
        raise NotImplementedError

    def further_inputs(self) -> dict[str, str]:
        """What it reads besides the data set: the hash of each content."""
        return {}

    def extended(self, dataset: Dataset) -> Dataset:
        """The data set with the features that it appends, as later steps and the output have it."""
        return dataset

    def check_after(self, before: Sequence["RelabelStep"]) -> None:
        """Refuse, with a ValueError, steps before this one that spoil what it counts."""

    def changed_periods(self, dataset: Dataset) -> frozenset[str]:
        """The periods that it changes."""
        return frozenset(dataset.manifest.periods)

    @property
    def fills(self) -> frozenset[str]:
        """The columns of documents that it fills, besides the labels."""
        return frozenset(self.columns)

    @property
    def lists(self) -> int:
        """Number of lists that replace each labelled one."""
        return 1


class LabelStep(RelabelStep):
    """A change to labels, groups or their documents."""

    acts_on_labels: ClassVar = True
    periods: PeriodTexts = ()
    """Periods, as in a split, to change; empty for all."""

    def changed_periods(self, dataset: Dataset) -> frozenset[str]:
        """Those that `periods` selects."""
        return periods_of(dataset, self.periods)


def check_grades(block: GroupBlock, top: float) -> None:
    """Refuse, with an InputError, a label above the top grade."""
    labels_N = block.columns_N["labels"]
    highest = float(np.nanmax(labels_N, initial=0))
    if highest > top:
        query = block.rows_Q.column("query_id")[int(block.group_N[np.nanargmax(labels_N)])]
        raise InputError(
            f"query {query} of period {block.period}: label {highest:g} is above max_relevance {top:g}; raise it"
        )


def labelled(block: GroupBlock) -> Bools:
    """True for groups with labels, shape [Q]."""
    return block.present_Q("labels")


def copies(block: GroupBlock, number: int, span: int) -> Iterator[GroupBlock]:
    """The given number of copies of all groups, as separate groups; none for an empty block.

    Their `query_id` is the original's with `#1`, `#2` ... appended. The first copy has the keys of the originals. Each
    further one adds `span`, which is above all keys, so keys stay unique.
    """
    for copy in range(number if len(block) else 0):
        ids_Q = pc.binary_join_element_wise(block.rows_Q.column("query_id"), f"#{copy + 1}", "")
        rows_Q = block.rows_Q.set_column(block.rows_Q.schema.get_field_index("query_id"), "query_id", ids_Q)
        yield replace(block, keys_Q=block.keys_Q + copy * span, rows_Q=rows_Q)


def relabelled(block: GroupBlock, labels_N: Floats | Doubles) -> GroupBlock:
    """The groups with these labels; if a group has clicks, they become its labels above 0."""
    labels_N = labels_N.astype(np.float32)
    if "clicks" not in block.columns_N:
        return block.with_columns(labels=labels_N)
    clicked_N = np.where(np.isnan(labels_N), np.nan, labels_N > 0).astype(np.float32)
    clicks_N = np.where(block.on_documents(block.present_Q("clicks")), clicked_N, np.nan).astype(np.float32)
    return block.with_columns(labels=labels_N, clicks=clicks_N)


def changed(before: GroupBlock, after: GroupBlock) -> tuple[GroupBlock, Changes]:
    """The second block, with the counts of the differences in labels and weights of the same documents."""
    different_N = np.zeros(before.n_documents, dtype=bool)
    for name in ("labels", "weights"):
        if name in after.columns_N:
            old_N, new_N = before.columns_N[name], after.columns_N[name]
            different_N |= (old_N != new_N) & ~(np.isnan(old_N) & np.isnan(new_N))
    groups = np.logical_or.reduceat(different_N, before.offsets_Q1[:-1]).sum()
    return after, Changes(groups_changed=int(groups), documents_changed=int(different_N.sum()))
