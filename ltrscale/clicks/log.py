"""Reading a click log: counts of all groups by position, and the sessions of a sample of the queries in arrays.

Shapes: Q groups of a row group, N documents, M documents of the sample, S sessions of the sample, P positions, D pairs
of query and document.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from ltrscale.arrays import Bools, Doubles
from ltrscale.clicks.models import Sessions, sums
from ltrscale.config import Config
from ltrscale.data.columns import is_per_document, spread_over_documents
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.ids import hash_ids
from ltrscale.data.stream.readers import PREPARE_AGAIN, read_direct
from ltrscale.draws import splitmix64
from ltrscale.errors import InputError
from ltrscale.progress import progress

_NEEDED = {
    "positions": "prepare the log with columns.positions",
    "clicks": "prepare the log with columns.clicks",
    "doc_ids": "prepare the log with columns.item (or columns.docs): without ids no document is known at two positions",
}
_MOST_CLICKS = 4
"""Groups with at least this many clicks are counted together."""
_HELD_OUT = 0.2
_COPY = r"#\d+$"


class LogSettings(Config):
    """The groups of a click log."""

    log: Split
    """Data sets with `positions`, `clicks` and `doc_ids`, and their periods; its other keys are not used."""
    held_out: Split | None = None
    """Later groups, on which click models are judged; by default the last periods of `log` that have a fifth of its
    groups, where it has several."""
    query: str = "query_id"
    """Column that names a query: `query_id`, or a `meta_*` column where `query_id` names a single search. A suffix such
    as `#7`, with which jobs.relabel numbers copies, is ignored."""
    depth: int = Field(default=10, ge=1)
    """Number of positions to look at."""
    sessions: int = Field(default=500_000, ge=100)
    """Approximate number of groups to keep in memory, some 1,500 bytes each at a depth of 10: all groups of a sample of
    the queries. Click and exposure by position are counted over all groups."""


@dataclass(frozen=True, eq=False)
class LogTally:
    """Counts over all groups."""

    groups: int
    unusable: int
    """Groups without positions, clicks or document ids; not counted elsewhere."""
    doubled: int
    """Groups with two documents at one position; not in any session."""
    below: int
    """Documents shown below the depth."""
    clicked_below: int
    shown_P: Doubles
    clicked_P: Doubles
    last_P: Doubles
    """Groups by the position of their last click."""
    clicks: Doubles
    """Groups with 0, 1, 2, 3, and at least 4 clicks at any position."""

    def __add__(self, other: "LogTally") -> "LogTally":
        return LogTally(**{name: value + vars(other)[name] for name, value in vars(self).items()})


@dataclass(frozen=True, eq=False)
class ClickLog:
    """A click log as it was read."""

    sessions: Sessions
    """Sessions of the sample: those of the log, and those held out."""
    in_log_S: Bools
    held_out_S: Bools
    """Both are true for the last periods of a log."""
    labels_D: NDArray[np.float32]
    """The expert label of each pair, from its first session that has one; NaN without one."""
    labels: str | None
    """The column that these labels are from; None if there are none."""
    tally: LogTally
    """Counts of the log."""
    share: float
    """Share of the queries in the sample."""


class _Planned(NamedTuple):
    """A row group to read; both are true in the last periods of a log, where no other data is `held_out`."""

    row_group: RowGroup
    in_log: bool
    held_out: bool


@dataclass(frozen=True, eq=False)
class _Part:
    """The sampled sessions of a row group."""

    codes_SP: NDArray[np.uint64]
    """A hash of query and document: the same pair has the same code in all row groups."""
    shown_SP: Bools
    clicks_SP: Bools
    labels_SP: NDArray[np.float32]
    """Of the label column; NaN without one."""
    label_column: str | None
    """`relevance`, or `labels` where no group has that; None without labels."""
    queries_S: NDArray[np.uint64]
    """Hashes of the queries."""


def read_log(settings: LogSettings) -> ClickLog:
    """Read a click log in one pass.

    Expert labels are the column `relevance` if any data set has it, otherwise `labels`, unless these are the clicks.

    Raises:
        InputError: a data set or a column is missing, a position is below 1, `held_out` shares a period with `log`, or
            no group has positions, clicks and document ids.
    """
    plan = _plan(settings)
    groups = sum(planned.row_group.groups for planned in plan)
    reader = _Reader(settings, min(1.0, settings.sessions / max(groups, 1)))
    parts = list(reader.parts(plan))
    if reader.tally is None or reader.tally.groups == reader.tally.unusable:
        raise InputError(f"log: {reader.lacking()}")
    return reader.joined(plan, parts)


def _plan(settings: LogSettings) -> list[_Planned]:
    """The row groups of the log, then those of `held_out`, if it is set."""
    of_log = _row_groups(settings.log)
    if settings.held_out is None:
        later = _last_periods(of_log)
        return [_Planned(r, in_log=True, held_out=r.file.period in later) for r in of_log]
    held_out = _row_groups(settings.held_out)
    if overlap := {(r.file.url, r.index) for r in of_log} & {(r.file.url, r.index) for r in held_out}:
        raise InputError(f"held_out and log both read {min(overlap)[0]}; name other periods or another data set")
    return [
        *(_Planned(r, in_log=True, held_out=False) for r in of_log),
        *(_Planned(r, in_log=False, held_out=True) for r in held_out),
    ]


def _row_groups(split: Split) -> tuple[RowGroup, ...]:
    return tuple(select(Split(data=split.data, periods=split.periods), labelled=False).row_groups)


def _last_periods(row_groups: tuple[RowGroup, ...]) -> frozenset[str]:
    """The fewest last periods with a fifth of the groups; empty for a single period."""
    groups: Counter[str] = Counter()
    for row_group in row_groups:
        groups[row_group.file.period] += row_group.groups
    later: set[str] = set()
    for period in sorted(groups, reverse=True)[: len(groups) - 1]:
        if sum(groups[name] for name in later) < _HELD_OUT * groups.total():
            later.add(period)
    return frozenset(later)


@dataclass
class _Reader:
    """Reads row groups one after another, and keeps what can be told only from all of them."""

    settings: LogSettings
    share: float
    """Share of the queries in the sample."""
    tally: LogTally | None = None
    """Counts of the log; None before its first row group."""
    labels_are_clicks: bool = True
    """Whether all labels so far are above 0 exactly where there is a click: then no expert gave them."""
    present: set[str] = field(default_factory=set)
    """The needed columns that some group has."""

    def lacking(self) -> str:
        """Why no group can be used."""
        absent = [f"no group has {name}; {remedy}" for name, remedy in _NEEDED.items() if name not in self.present]
        return absent[0] if absent else "no group has all of positions, clicks and document ids; prepare it with them"

    def parts(self, plan: list[_Planned]) -> Iterator[_Part]:
        """The sampled sessions of each row group; counts those of the log."""
        names = [*dict.fromkeys(("query_id", self.settings.query)), *_NEEDED, "labels", "relevance"]
        tables = read_direct([planned.row_group for planned in plan], names)
        with progress("clicks", sum(planned.row_group.documents for planned in plan)) as advance:
            for planned, table in zip(plan, tables, strict=True):
                yield self._part(planned.row_group, table, in_log=planned.in_log)
                advance(planned.row_group.documents)

    def _part(self, row_group: RowGroup, table: pa.Table, *, in_log: bool) -> _Part:
        for name, remedy in {self.settings.query: "name a column that is there", **_NEEDED}.items():
            if name not in table.column_names:
                raise InputError(f"{row_group.file.url}: no column {name!r}; {remedy}")
        valid = {name: np.asarray(table.column(name).is_valid(), np.bool_) for name in _NEEDED}
        self.present |= {name for name, valid_Q in valid.items() if valid_Q.any()}
        usable_Q = np.logical_and.reduce(list(valid.values()))
        groups = len(table)
        table = table.filter(pa.array(usable_Q))
        lists = _Lists(table, row_group, self.settings.depth)
        low_N = lists.positions_N < 1
        if low_N.any():
            name = table.column("query_id")[int(lists.group_N[low_N.argmax()])].as_py()
            raise InputError(f"query {name} of period {row_group.file.period} has a position below 1; count from 1")
        if in_log:
            tally = lists.tally(groups=groups, unusable=groups - len(table))
            self.tally = tally if self.tally is None else self.tally + tally
        if lists.labels_N is not None:
            judged_N = ~np.isnan(lists.labels_N)
            self.labels_are_clicks &= bool(((lists.labels_N > 0) == (lists.clicks_N > 0))[judged_N].all())
        texts = table.column(self.settings.query).cast(pa.string()).combine_chunks()
        queries_Q = hash_ids(pc.replace_substring_regex(texts, _COPY, "").fill_null("").to_pylist())
        chosen_Q = ((queries_Q >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.share) & ~lists.doubled_Q
        return lists.part(queries_Q, chosen_Q)

    def joined(self, plan: list[_Planned], parts: list[_Part]) -> ClickLog:
        """All sessions, with pairs and queries numbered; the number of a pair does not depend on the files."""
        assert self.tally is not None
        shown_SP, clicks_SP, codes_SP, queries_S = (
            np.concatenate([vars(part)[name] for part in parts])
            for name in ("shown_SP", "clicks_SP", "codes_SP", "queries_S")
        )
        codes_D, pair_N = np.unique(codes_SP[shown_SP], return_inverse=True)
        pairs_SP = np.full(shown_SP.shape, -1, np.int64)
        pairs_SP[shown_SP] = pair_N
        _, number_S = np.unique(queries_S, return_inverse=True)
        lengths = [len(part.queries_S) for part in parts]
        labels = self._expert_labels(parts)
        # labels of other data sets may be clicks
        labels_SP = np.concatenate([np.where(part.label_column == labels, part.labels_SP, np.nan) for part in parts])
        labels_N = labels_SP[shown_SP]
        known_N = ~np.isnan(labels_N)
        known_D, first_D = np.unique(pair_N[known_N], return_index=True)
        labels_D = np.full(len(codes_D), np.nan, np.float32)
        labels_D[known_D] = labels_N[known_N][first_D]
        return ClickLog(
            sessions=Sessions(pairs_SP, clicks_SP, number_S.astype(np.int64), len(codes_D)),
            in_log_S=np.repeat([planned.in_log for planned in plan], lengths),
            held_out_S=np.repeat([planned.held_out for planned in plan], lengths),
            labels_D=labels_D,
            labels=labels,
            tally=self.tally,
            share=self.share,
        )

    def _expert_labels(self, parts: list[_Part]) -> str | None:
        """The column of the expert labels; None if there is none."""
        columns = {part.label_column for part in parts}
        if "relevance" in columns:
            return "relevance"
        return "labels" if "labels" in columns and not self.labels_are_clicks else None


class _Lists:
    """The documents of some groups that have positions, clicks and ids."""

    def __init__(self, table: pa.Table, row_group: RowGroup, depth: int) -> None:
        lengths_Q = np.asarray(pc.list_value_length(table.column("clicks")), np.int64)
        columns = {}
        for name in (*_NEEDED, "labels", "relevance"):
            if name in _NEEDED or (name in table.column_names and table.column(name).null_count < len(table)):
                column = table.column(name).combine_chunks()
                if not is_per_document(column, lengths_Q):
                    problem = f"row group {row_group.index}: column {name!r} does not have one value a document"
                    raise InputError(f"{row_group.file.url}: {problem}; {PREPARE_AGAIN}")
                columns[name] = spread_over_documents(column, lengths_Q)
        self.depth, self.groups = depth, len(table)
        self.group_N = np.repeat(np.arange(len(table)), lengths_Q)
        """The group of each document, from 0."""
        self.positions_N, self.clicks_N = _numbers(columns["positions"]), _numbers(columns["clicks"])
        """Positions as the log has them, from 1; NaN for a document that was not shown."""
        self.ids_N = columns["doc_ids"]
        self.label_column = next((name for name in ("relevance", "labels") if name in columns), None)
        self.labels_N = None if self.label_column is None else _numbers(columns[self.label_column])
        self.shown_N = (self.positions_N >= 1) & self.ids_N.is_valid().to_numpy(zero_copy_only=False)
        """Has a position and an id."""
        self.place_N = np.where(self.shown_N, self.positions_N, 0).astype(np.int64) - 1
        """The position of a document that was shown, from 0."""
        self.inside_N = self.shown_N & (self.place_N < depth)
        cell_N = self.group_N[self.inside_N] * depth + self.place_N[self.inside_N]
        times = np.bincount(cell_N, minlength=len(table) * depth).reshape(-1, depth)
        self.doubled_Q: Bools = np.asarray((times > 1).any(axis=1))
        """Groups with two documents at one position."""

    def part(self, queries_Q: NDArray[np.uint64], chosen_Q: Bools) -> _Part:
        """The sessions of the chosen groups, down to the depth."""
        keep_N = self.inside_N & chosen_Q[self.group_N]
        row_M = (np.cumsum(chosen_Q) - 1)[self.group_N[keep_N]]
        cells = row_M, self.place_N[keep_N]
        shape = int(chosen_Q.sum()), self.depth
        ids = self.ids_N.filter(pa.array(keep_N)).dictionary_encode()
        numbers_M = np.asarray(ids.indices.to_numpy(zero_copy_only=False), np.int64)
        hashes_M = hash_ids(ids.dictionary.to_pylist(), scope="document")[numbers_M]
        codes_SP, labels_SP = np.zeros(shape, np.uint64), np.full(shape, np.nan, np.float32)
        shown_SP, clicks_SP = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        codes_SP[cells] = splitmix64(queries_Q[self.group_N[keep_N]], hashes_M)
        shown_SP[cells], clicks_SP[cells] = True, self.clicks_N[keep_N] > 0
        if self.labels_N is not None:
            labels_SP[cells] = self.labels_N[keep_N]
        return _Part(
            codes_SP=codes_SP,
            shown_SP=shown_SP,
            clicks_SP=clicks_SP,
            labels_SP=labels_SP,
            label_column=self.label_column,
            queries_S=queries_Q[chosen_Q],
        )

    def tally(self, *, groups: int, unusable: int) -> LogTally:
        """Their counts; `groups` and `unusable` count those that were read, before the unusable ones were left out."""
        depth, inside_N, below_N = self.depth, self.inside_N, self.shown_N & ~self.inside_N
        clicked_N = (self.clicks_N > 0) & self.shown_N
        clicks_Q = np.bincount(self.group_N, clicked_N, self.groups).astype(np.int64)
        last_Q = np.full(self.groups, -1)
        np.maximum.at(last_Q, self.group_N[clicked_N], self.place_N[clicked_N])
        ones_N = np.ones(int(inside_N.sum()))
        return LogTally(
            groups=groups,
            unusable=unusable,
            doubled=int(self.doubled_Q.sum()),
            below=int(below_N.sum()),
            clicked_below=int((below_N & clicked_N).sum()),
            shown_P=sums(self.place_N[inside_N], ones_N, depth),
            clicked_P=sums(self.place_N[inside_N], clicked_N[inside_N], depth),
            last_P=np.bincount(last_Q[(last_Q >= 0) & (last_Q < depth)], minlength=depth).astype(np.float64),
            clicks=np.bincount(np.minimum(clicks_Q, _MOST_CLICKS), minlength=_MOST_CLICKS + 1).astype(np.float64),
        )


def _numbers(values: pa.Array) -> Doubles:
    return np.asarray(values.to_numpy(zero_copy_only=False), np.float64)
