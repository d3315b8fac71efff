"""Turns parsed rows into accepted query groups or rejections, and counts both exactly.

A group is a run of rows with one query id in one file (or in one sorted input). The rules, in this order:

- for a whole group: `returning_query` (an earlier group in the same scope has its id), `group_too_long`;
- for a row, while the rest of its group is kept: `infinite` (a feature, position, click, weight or gain), `bad_label`
  (negative or too large for a gain; missing if rows must have labels, or if other rows of the group have them and
  `unjudged` is `reject`),
  `bad_gain` and `bad_weight` (negative), `duplicate_document` (an accepted earlier row of the group has the same
  document id), unless `duplicates` says which row of a document stays; then the others are merged into it, without a
  rejection.

Rows that a reader rejected neither start nor end a group; a query id that only such rows have is one rejected group.
A group without any labels is unlabelled.

Shapes: N rows, Q groups, F features.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ltrscale.arrays import HIGHEST_LABEL, Bits, Bools, Doubles, Floats, Ints, offsets
from ltrscale.data.dataset.columns import GOAL, is_of_documents, to_columns
from ltrscale.data.dataset.manifest import Accounting
from ltrscale.data.dataset.writer import BESIDE_LABELS, to_lists
from ltrscale.data.ids import QueryIds, hash_ids
from ltrscale.ingest.rows import Cause, Quarantine, Rejection, RowBlock, RowTexts, Rule, concat, cut, keep
from ltrscale.ingest.texts import FULL

Unjudged = Literal[0, "unlabelled", "reject"]
"""How to treat rows without a label in a group with labels."""

_NOT_NEGATIVE: dict[Rule, str] = {"bad_gain": "gains", "bad_weight": "weights"}
"""Columns with values that must be 0 or more (besides labels), by rule."""
Duplicates = Literal["reject", "keep_first", "keep_last", "max_label"]
"""How to treat rows of a group with the same document id."""


@dataclass(frozen=True)
class Groups:
    """Complete, accepted groups in order of arrival; none is empty.

    `rows.lines_N[offsets_Q1[q]:offsets_Q1[q + 1]]` are the rows of group q. The labels of a group that is not in
    `labelled_Q` are all NaN. `hashes_Q` are the hashes of the query ids, in their scope.
    """

    rows: RowBlock
    offsets_Q1: Ints
    labelled_Q: Bools
    hashes_Q: Bits

    def __len__(self) -> int:
        return len(self.labelled_Q)


@dataclass
class Validator:
    """Applies the rules block by block; it holds only the rows of the open group.

    `add` takes a block and returns the groups that it completes; `end` completes the last group at the end of a file or
    of a sorted input. `scope` keeps equal query ids of unrelated inputs apart. `ids` has the query ids of earlier
    groups and receives the new ones. `others` has the hashes of new query ids in groups that were not kept. Without a
    quarantine, rejections are lost. `features` are the feature names, for rejections.
    """

    ids: QueryIds
    quarantine: Quarantine | None
    max_group: int
    missing_labels: bool
    duplicates: Duplicates = "reject"
    unjudged: Unjudged = "reject"
    features: Sequence[str] = ()
    scope: str = ""
    counts: Counter[str] = field(default_factory=Counter, init=False)
    """Those of the accounting, by name."""
    others: list[Bits] = field(default_factory=list, init=False)
    _open: list[RowBlock] = field(default_factory=list, init=False)
    _open_rows: int = field(default=0, init=False)
    _open_id: str | None = field(default=None, init=False)

    def accounting(self) -> Accounting:
        """The accounting of all blocks, without the ids that only rejected rows have; asserts that it adds up."""
        assert self.quarantine is not None
        counts, rules = self.counts, self.quarantine.rows_by_rule
        counts["rows_rejected"] = rules.total()
        assert counts["rows_in"] == counts["rows_kept"] + counts["rows_rejected"] + counts["rows_merged"]
        assert counts["groups_in"] == counts["groups_kept"] + counts["groups_rejected"]
        return Accounting(**counts, rules=dict(sorted(rules.items())))

    def add(self, block: RowBlock) -> Groups | None:
        """Add a block; returns the groups that it completes, if any."""
        self.counts["rows_in"] += len(block) + sum(rejection.rows for rejection in block.rejected)
        if self.quarantine is not None:
            self.quarantine.add(block.rejected)
        self._count_lost(sum(rejection.rows == 0 for rejection in block.rejected))
        if unread := {rejection.query_id for rejection in block.rejected if rejection.rows} - {""}:
            self.ids.unread.add(hash_ids(unread, scope=self.scope))
        if not len(block):
            return None
        starts = np.flatnonzero(self._begins(block))
        self._open_id = block.query_ids_N[-1].as_py()
        if not len(starts):
            self._hold(block)
            return None
        first, last = int(starts[0]), int(starts[-1])
        self._hold(cut(block, 0, first))
        pieces = self._close()
        held = sum(map(len, pieces))
        offsets = [*([0] if held else []), *(starts - first + held).tolist()]
        self._hold(cut(block, last, len(block)))
        return self._judge([*pieces, cut(block, first, last)], np.array(offsets))

    def end(self) -> Groups | None:
        """Complete the last group of an input."""
        pieces = self._close()
        self._open_id = None
        return self._judge(pieces, np.array([0, sum(map(len, pieces))])) if pieces else None

    def _begins(self, block: RowBlock) -> Bools:
        """True at the rows that start a group."""
        ids_N = block.query_ids_N
        begins_N = np.empty(len(block), dtype=bool)
        begins_N[0] = self._open_id is None or ids_N[0].as_py() != self._open_id
        begins_N[1:] = pc.not_equal(ids_N[1:], ids_N[:-1]).to_numpy(zero_copy_only=False)
        return begins_N if block.starts_N is None else begins_N | block.starts_N

    def _hold(self, piece: RowBlock) -> None:
        """Add rows to the open group; if it is too long, only its first row is kept, for the rejection."""
        self._open_rows += len(piece)
        if self._open_rows <= self.max_group:
            self._open += [_own(piece)] if len(piece) else []
        else:
            self._open = [_own(cut((self._open or [piece])[0], 0, 1))]

    def _close(self) -> list[RowBlock]:
        """Close the open group and return its pieces; a group that is too long is rejected and returns none."""
        pieces, rows = self._open, self._open_rows
        self._open, self._open_rows = [], 0
        if rows <= self.max_group:
            return pieces
        query_id = pieces[0].query_ids_N[0].as_py()
        hashes_Q = hash_ids([query_id], scope=self.scope)
        returning_Q = self.ids.groups.add(hashes_Q)
        self.others.append(hashes_Q[~returning_Q])
        self._reject_group(pieces, 0, returning=bool(returning_Q[0]), rows=rows)
        return []

    def _reject_group(self, pieces: Sequence[RowBlock], first: int, *, returning: bool, rows: int) -> None:
        rule: Rule = "returning_query" if returning else "group_too_long"
        self._quarantine(pieces, [(first, rule, rows)])
        self._count_lost(1)

    def _reject(self, pieces: Sequence[RowBlock], row: int, rule: Rule, rows: int) -> Rejection:
        """The rejection of `rows` rows of consecutive pieces, starting at `row`."""
        for piece in pieces:
            if row < len(piece):
                break
            row -= len(piece)
        text, finding = _text(piece, row, rule), _found(piece, row, rule, rows, self.features)
        cause: Cause = "no_label" if finding == "no label" else ""
        line, query = int(piece.lines_N[row]), piece.query_ids_N[row].as_py()
        return Rejection(piece.file, line, rule, text, query, rows, finding, cause)

    def _quarantine(self, pieces: Sequence[RowBlock], bad: Iterable[tuple[int, Rule, int]]) -> None:
        """Reject rows of consecutive pieces: the first row of a run, the rule, and the number of rows."""
        if self.quarantine is not None:
            self.quarantine.add(self._reject(pieces, *each) for each in bad)

    def _count_lost(self, groups: int) -> None:
        self.counts.update(groups_in=groups, groups_rejected=groups)

    def _judge(self, pieces: Sequence[RowBlock], offsets_Q1: Ints) -> Groups | None:
        """Apply the rules to complete groups."""
        lengths_Q = np.diff(offsets_Q1)
        if not len(lengths_Q):
            return None
        rows = concat(pieces)
        if self.unjudged != "reject":
            rows = replace(rows, labels_N=rows.labels_N.copy())  # the rules change it
        ids = rows.query_ids_N.take(pa.array(offsets_Q1[:-1])).to_pylist()
        hashes_Q = hash_ids(ids, scope=self.scope)
        returning_Q = self.ids.groups.add(hashes_Q)
        rejected_Q = returning_Q | (lengths_Q > self.max_group)
        for q in np.flatnonzero(rejected_Q).tolist():
            self._reject_group(pieces, int(offsets_Q1[q]), returning=bool(returning_Q[q]), rows=int(lengths_Q[q]))

        group_N = np.repeat(np.arange(len(lengths_Q)), lengths_Q)
        kept_N = ~rejected_Q[group_N]
        bad_rows: list[tuple[int, Rule, int]] = []
        for rule, bad_N in self._row_rules(rows, group_N, kept_N):
            if rule == "duplicate_document" and self.duplicates != "reject":
                self.counts["rows_merged"] += int(bad_N.sum())
                continue
            bad_rows += [(i, rule, 1) for i in np.flatnonzero(bad_N).tolist()]
        self._quarantine(pieces, sorted(bad_rows))

        kept_Q = np.bincount(group_N[kept_N], minlength=len(lengths_Q))
        n_kept = int((kept_Q > 0).sum())
        self.others.append(hashes_Q[(kept_Q == 0) & ~returning_Q])
        self._count_lost(int(((kept_Q == 0) & ~rejected_Q).sum()))
        self.counts.update(rows_kept=int(kept_Q.sum()), groups_in=n_kept, groups_kept=n_kept)
        if not n_kept:
            return None
        rows = rows if kept_N.all() else keep(rows, kept_N)
        offsets_Q1 = offsets(kept_Q[kept_Q > 0])
        return Groups(rows, offsets_Q1, ~np.isnan(rows.labels_N[offsets_Q1[:-1]]), hashes_Q[kept_Q > 0])

    def _row_rules(self, rows: RowBlock, group_N: Ints, ok_N: Bools) -> Iterator[tuple[Rule, Bools]]:
        """Each rule with the rows that break it and no earlier rule; sets these rows of `ok_N` to False in place."""
        infinite_N = ok_N & _infinite(rows)
        ok_N &= ~infinite_N
        yield "infinite", infinite_N

        labels_N = rows.labels_N
        missing_N = np.isnan(labels_N)
        bad_N = ok_N & _no_label(labels_N)
        for name in (name for name in rows.columns if name.startswith(GOAL)):
            bad_N |= ok_N & _no_label(_numbers(rows.columns[name]))
        if self.missing_labels:
            partly_Q = np.bincount(group_N[ok_N & ~bad_N & ~missing_N], minlength=group_N[-1] + 1) > 0
            missing_N &= partly_Q[group_N]
            self._settle(rows.labels_N, group_N, missing_N)
        bad_N |= ok_N & missing_N
        ok_N &= ~bad_N
        yield "bad_label", bad_N

        for rule, name in _NOT_NEGATIVE.items():
            if name in rows.columns:
                negative_N = ok_N & (_numbers(rows.columns[name]) < 0)
                ok_N &= ~negative_N
                yield rule, negative_N

        if rows.doc_ids_N is not None:
            repeated_N = _repeated(rows.doc_ids_N, group_N, ok_N, _rank(rows.labels_N, self.duplicates))
            ok_N &= ~repeated_N
            yield "duplicate_document", repeated_N

    def _settle(self, labels_N: Floats, group_N: Ints, missing_N: Bools) -> None:
        """Apply `unjudged` in place to rows without a label; then no label counts as missing."""
        if self.unjudged == "reject":
            return
        if self.unjudged == "unlabelled":
            labels_N[np.isin(group_N, group_N[missing_N])] = np.nan
        else:
            labels_N[missing_N] = self.unjudged
        missing_N[:] = False


def total_accounting(parts: Iterable[Accounting], *, lost_groups: int = 0, hash_collisions: int = 0) -> Accounting:
    """The sum of several accountings, plus the given rejected groups and collisions."""
    sums: Counter[str] = Counter(groups_in=lost_groups, groups_rejected=lost_groups, hash_collisions=hash_collisions)
    rules: Counter[str] = Counter()
    for part in parts:
        sums.update(part.model_dump(exclude={"rules"}))
        rules.update(part.rules)
    return Accounting(**sums, rules=dict(sorted(rules.items())))


def with_counts(accounting: Accounting, events: Mapping[str, int]) -> Accounting:
    """The accounting with counts of the events that the rows were made of, under `rules`."""
    return accounting.model_copy(update={"rules": accounting.rules | {f"events_{k}": n for k, n in events.items()}})


def _own(piece: RowBlock) -> RowBlock:
    """A copy of the piece, since a view, and the texts of a block, would keep the whole block in memory."""
    texts = piece.texts
    if isinstance(texts, RowTexts):  # a text takes a quarter of a millisecond, and few groups are rejected
        texts = texts.only(piece.lines_N)
    elif texts is not None:
        texts = {line: texts(line) for line in piece.lines_N.tolist()}.__getitem__
    return replace(piece, features_NF=piece.features_NF.copy(), texts=texts)


def _infinite(rows: RowBlock) -> Bools:
    """Rows with an infinite feature, position, click, weight or gain."""
    infinite_N = np.asarray(np.isinf(rows.features_NF).any(axis=1))
    for column in rows.columns.values():
        if pa.types.is_floating(column.type):
            infinite_N |= np.isinf(column.to_numpy(zero_copy_only=False))
    return infinite_N


def _numbers(column: pa.Array) -> Doubles:
    """The values of a column, NaN if null."""
    return np.asarray(column.to_numpy(zero_copy_only=False), np.float64)


def _no_label(values_N: NDArray[np.floating[Any]]) -> Bools:
    """Values that cannot be labels: negative, or too large for a gain."""
    return (values_N < 0) | (values_N > HIGHEST_LABEL)


def _rank(labels_N: Floats, duplicates: Duplicates) -> Floats | Ints:
    """A rank for each row: of a document's rows, the first one with the lowest rank stays."""
    match duplicates:
        case "reject" | "keep_first":
            return np.zeros(len(labels_N), np.int64)
        case "keep_last":
            return -np.arange(len(labels_N))
        case "max_label":
            return -np.nan_to_num(labels_N, nan=-1)  # labels are at least 0


def _repeated(doc_ids_N: pa.StringArray, group_N: Ints, ok_N: Bools, rank_N: Floats | Ints) -> Bools:
    """A mask of ok rows that repeat the group and document id of an ok row of lower rank; null ids never repeat."""
    rows = np.flatnonzero(ok_N & doc_ids_N.is_valid().to_numpy(zero_copy_only=False))
    coded = doc_ids_N.dictionary_encode()
    codes = coded.indices.fill_null(0).to_numpy().astype(np.int64)[rows]
    # one number for each pair of group and document id: codes are below the number of rows
    pairs = group_N[rows] * len(doc_ids_N) + codes
    order = np.lexsort((rank_N[rows], pairs))  # stable: the first of equal rank comes first
    same_as_last = np.diff(pairs[order]) == 0
    repeated_N = np.zeros(len(doc_ids_N), dtype=bool)
    repeated_N[rows[order[1:][same_as_last]]] = True
    return repeated_N


def _found(block: RowBlock, row: int, rule: Rule, rows: int, features: Sequence[str]) -> str:
    """The value that breaks a rule, in words."""
    match rule:
        case "returning_query":
            return f"query {block.query_ids_N[row].as_py()}"
        case "group_too_long":
            return f"{rows:,} documents"
        case "bad_label":
            goals = {name: _numbers(column) for name, column in block.columns.items() if name.startswith(GOAL)}
            bad = {name: values_N[row] for name, values_N in goals.items() if _no_label(values_N)[row]}
            label = next(iter(bad.values()), block.labels_N[row])
            return "no label" if np.isnan(label) else f"{next(iter(bad), 'label')} {label:g}"
        case "bad_gain" | "bad_weight":
            name = _NOT_NEGATIVE[rule]
            return f"{name.removesuffix('s')} {_numbers(block.columns[name])[row]:g}"
        case "duplicate_document":
            assert block.doc_ids_N is not None
            return f"document {block.doc_ids_N[row].as_py()}"
    infinite = np.flatnonzero(np.isinf(block.features_NF[row]))[:3]
    values = [f"{features[i] if features else i + 1} {block.features_NF[row, i]:g}" for i in infinite]
    return ", ".join(values) or "positions, clicks, weights or gains"


def _text(block: RowBlock, row: int, rule: Rule) -> str:
    """The row as in the input; as parsed if the input is gone or its row has other documents too."""
    line = int(block.lines_N[row])
    if block.texts is None:
        return _parsed(block, row, rule)
    text = block.texts(line)
    has_others = np.count_nonzero(block.lines_N[max(0, row - 1) : row + 2] == line) > 1
    whole_group = rule in ("returning_query", "group_too_long")
    return f"{_parsed(block, row, rule)} in {text}" if has_others and not whole_group else text


def _parsed(block: RowBlock, row: int, rule: Rule) -> str:
    """A parsed row as svmlight text: the first ten infinite features for the rule `infinite`, else the nonzero ones."""
    features_F = block.features_NF[row]
    shown = np.flatnonzero(np.isinf(features_F) if rule == "infinite" else features_F)[:10]
    doc_id = None if block.doc_ids_N is None else block.doc_ids_N[row].as_py()
    parts = [f"{block.labels_N[row]:g}", f"qid:{block.query_ids_N[row].as_py()}"]
    parts += [f"{i + 1}:{features_F[i]:g}" for i in shown]
    return " ".join(parts + ([] if doc_id is None else [f"# {doc_id}"]))


def to_table(groups: Groups, first_gid: int) -> pa.Table:
    """Groups as rows of the data set directory, numbered from `first_gid`; features are not copied.

    Positions, clicks, weights and gains of a group are null if none of its documents has one, else NaN for documents
    without one. Further labels are 0 where they are missing, and null in a group without labels.
    """
    rows, offsets_Q1 = groups.rows, groups.offsets_Q1
    lengths_Q, labelled_Q = np.diff(offsets_Q1), groups.labelled_Q
    every_Q = np.ones(len(groups), dtype=bool)
    docs_N = pa.nulls(len(rows), pa.string()) if rows.doc_ids_N is None else rows.doc_ids_N
    columns = {
        "gid": pa.array(np.arange(first_gid, first_gid + len(groups))),
        "query_id": rows.query_ids_N.take(pa.array(offsets_Q1[:-1])),
        "doc_ids": to_lists(docs_N, lengths_Q, _any_valid(docs_N, offsets_Q1)),
        "features": to_lists(pa.array(rows.features_NF.ravel()), lengths_Q * rows.features_NF.shape[1], every_Q),
        "labels": to_lists(pa.array(rows.labels_N), lengths_Q, labelled_Q),
    }
    for name, column in rows.columns.items():
        if name.startswith(FULL):
            continue
        if is_of_documents(name):
            columns |= to_columns(name, column, offsets_Q1)
        elif name.startswith(GOAL):
            columns[name] = to_lists(
                pa.array(np.nan_to_num(_numbers(column)).astype(np.float32)), lengths_Q, labelled_Q
            )
        elif name in BESIDE_LABELS:
            values = column.cast(pa.float32()).fill_null(float("nan"))
            columns[name] = to_lists(values, lengths_Q, _any_valid(column, offsets_Q1))
        else:
            columns[name] = column.take(pa.array(offsets_Q1[:-1]))
    return pa.table(columns)


def _any_valid(values_N: pa.Array, offsets_Q1: Ints) -> Bools:
    """True for groups with any value that is not null."""
    valid_N = values_N.is_valid().to_numpy(zero_copy_only=False)
    return np.logical_or.reduceat(valid_N, offsets_Q1[:-1])
