import itertools
import math
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltrscale.data.dataset.manifest import Accounting
from ltrscale.data.ids import QueryIds
from ltrscale.ingest.lines import Lines
from ltrscale.ingest.rows import Quarantine, Rejection, RowBlock
from ltrscale.ingest.validate import Duplicates, Validator, total_accounting
from ltrscale.storage import Commit, join


@dataclass(frozen=True)
class Row:
    """One input row; `rule` is the rule by which the reader rejected it."""

    query_id: str
    label: float = 1.0
    value: float = 0.5
    doc_id: str | None = None
    rule: str | None = None
    starts: bool = False


@dataclass
class Result:
    kept: list[tuple[str, bool, list[int]]]
    rejected: list[tuple[int, str, int]]
    accounting: Accounting


def blocks_of(rows: Sequence[Row], cuts: Sequence[int]) -> Iterator[RowBlock]:
    """The rows in blocks that end at the cuts, like a reader yields them."""
    edges = sorted({0, len(rows), *(c for c in cuts if c < len(rows))})
    for start, stop in itertools.pairwise(edges):
        here = [(i + 1, rows[i]) for i in range(start, stop)]
        good = [(line, row) for line, row in here if row.rule is None]
        yield RowBlock(
            file="log.txt",
            lines_N=np.array([line for line, _ in good], np.int64),
            query_ids_N=pa.array([row.query_id for _, row in good], pa.string()),
            features_NF=np.array([[row.value, 1] for _, row in good], np.float32).reshape(-1, 2),
            labels_N=np.array([row.label for _, row in good], np.float32),
            doc_ids_N=pa.array([row.doc_id for _, row in good], pa.string()),
            starts_N=np.array([row.starts for _, row in good], bool),
            rejected=[
                Rejection("log.txt", line, row.rule, "?", row.query_id, rows=0 if row.rule == "empty_group" else 1)  # type: ignore[arg-type]
                for line, row in here
                if row.rule is not None
            ],
        )


def run(
    folder: Path,
    rows: Sequence[Row],
    cuts: Sequence[int] = (),
    *,
    max_group: int = 4,
    missing_labels: bool = True,
    duplicates: Duplicates = "reject",
) -> Result:
    """The Validator's result for one file."""
    kept = []
    with Commit(str(folder / "out")) as commit:
        quarantine = Quarantine(commit)
        known = QueryIds(folder)
        validator = Validator(
            known, quarantine, max_group=max_group, missing_labels=missing_labels, duplicates=duplicates
        )
        for groups in [*map(validator.add, blocks_of(rows, cuts)), validator.end()]:
            for q in range(len(groups) if groups else 0):
                assert groups is not None
                inside = slice(*groups.offsets_Q1[q : q + 2])
                ids = set(groups.rows.query_ids_N[inside].to_pylist())
                assert len(ids) == 1
                kept.append((ids.pop(), bool(groups.labelled_Q[q]), groups.rows.lines_N[inside].tolist()))
        files = quarantine.close()
        tables = [pq.read_table(join(commit.url, name)) for name in files]
    rejected = [(r["line"], r["rule"], r["rows"]) for table in tables for r in table.to_pylist()]
    return Result(kept, sorted(rejected), total_accounting([validator.accounting()], lost_groups=len(known.lost())))


def oracle(
    rows: Sequence[Row], *, max_group: int = 4, missing_labels: bool = True, duplicates: Duplicates = "reject"
) -> Result:
    """Slow: the rules, row by row."""
    groups: list[list[tuple[int, Row]]] = []
    rejected: list[tuple[int, str, int]] = []
    lost_groups = merged = 0
    previous: str | None = None
    for line, row in enumerate(rows, 1):
        if row.rule == "empty_group":
            lost_groups += 1
            rejected.append((line, row.rule, 0))
        elif row.rule is not None:
            rejected.append((line, row.rule, 1))
        else:
            if row.query_id != previous or row.starts:
                groups.append([])
            groups[-1].append((line, row))
            previous = row.query_id
    unread = {row.query_id for row in rows if row.rule not in (None, "empty_group")} - {""}
    lost_groups += len(unread - {row.query_id for group in groups for _, row in group})
    kept = []
    seen: set[str] = set()
    for group in groups:
        first_line, first = group[0]
        returning, _ = first.query_id in seen, seen.add(first.query_id)
        if returning or len(group) > max_group:
            rejected.append((first_line, "returning_query" if returning else "group_too_long", len(group)))
            lost_groups += 1
            continue
        rest = []
        for line, row in group:
            if math.isinf(row.value):
                rejected.append((line, "infinite", 1))
            elif row.label < 0 or row.label > 1000 or (math.isnan(row.label) and not missing_labels):
                rejected.append((line, "bad_label", 1))
            else:
                rest.append((line, row))
        if any(not math.isnan(row.label) for _, row in rest):
            rejected += [(line, "bad_label", 1) for line, row in rest if math.isnan(row.label)]
            rest = [(line, row) for line, row in rest if not math.isnan(row.label)]
        lines = [line for line, row in rest if is_chosen(line, row, rest, duplicates)]
        if duplicates == "reject":
            rejected += [(line, "duplicate_document", 1) for line, _ in rest if line not in lines]
        else:
            merged += len(rest) - len(lines)
        if lines:
            kept.append((first.query_id, not math.isnan(rest[0][1].label), lines))
        else:
            lost_groups += 1
    rules: Counter[str] = Counter()
    for _, rule, count in rejected:
        rules[rule] += count
    accounting = Accounting(
        rows_in=sum(row.rule != "empty_group" for row in rows),
        rows_kept=sum(len(lines) for *_, lines in kept),
        rows_rejected=rules.total(),
        rows_merged=merged,
        groups_in=len(kept) + lost_groups,
        groups_kept=len(kept),
        groups_rejected=lost_groups,
        rules=dict(rules),
    )
    return Result(kept, sorted(rejected), accounting)


def is_chosen(line: int, row: Row, group: Sequence[tuple[int, Row]], duplicates: Duplicates) -> bool:
    """Whether a row stays, of those of its group with its document id."""
    same = [(i, other) for i, other in group if other.doc_id == row.doc_id]
    if row.doc_id is None:
        return True
    if duplicates == "keep_last":
        return line == same[-1][0]
    if duplicates == "max_label" and not math.isnan(row.label):
        return line == next(i for i, other in same if other.label == max(each.label for _, each in same))
    return line == same[0][0]


dirty_rows = st.lists(
    st.builds(
        Row,
        query_id=st.sampled_from(["a", "a", "a", "b", "c", "d"]),
        label=st.sampled_from([0.0, 2.0, 1.0, 3.0, math.nan, -1.0, math.inf, 1000.0, 1001.0]),
        value=st.sampled_from([0.5, 0.5, 0.5, math.nan, math.inf, -math.inf]),
        doc_id=st.sampled_from([None, None, "x", "y", "z"]),
        rule=st.sampled_from([None] * 8 + ["unparsable", "feature_count", "empty_group"]),
        starts=st.sampled_from([False] * 5 + [True]),
    ),
    max_size=40,
)


@given(
    rows=dirty_rows,
    cuts=st.lists(st.integers(1, 40), max_size=8),
    max_group=st.integers(1, 5),
    missing_labels=st.booleans(),
    duplicates=st.sampled_from(get_args(Duplicates)),
)
@pytest.mark.slow
def test_every_cut_into_blocks_agrees_with_the_rules_row_by_row(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], cuts: list[int], **settings: Any
) -> None:
    found = run(tmp_path_factory.mktemp("v"), rows, cuts, **settings)
    expected = oracle(rows, **settings)
    assert found.kept == expected.kept
    assert found.rejected == expected.rejected
    assert found.accounting == expected.accounting


def test_ids_return_across_files_of_a_scope_and_not_across_scopes(tmp_path: Path) -> None:
    with Commit(str(tmp_path / "out")) as commit:
        validator = Validator(QueryIds(tmp_path), Quarantine(commit), max_group=9, missing_labels=False)
        rejected = []
        for scope in ("", "", "test"):
            validator.scope = scope
            for block in blocks_of([Row("q")], ()):
                assert validator.add(block) is None
            validator.end()
            rejected.append(validator.counts["groups_rejected"])
    assert rejected == [0, 1, 1]


@pytest.mark.slow
def test_a_group_beyond_the_cap_is_counted_and_not_held(tmp_path: Path) -> None:
    rows = [Row("long")] * 100_000 + [Row("next")]
    with Commit(str(tmp_path / "out")) as commit:
        validator = Validator(QueryIds(tmp_path), Quarantine(commit), max_group=10, missing_labels=False)
        for block in blocks_of(rows, range(0, 100_001, 1000)):
            validator.add(block)
            assert sum(len(piece) for piece in validator._open) <= 10
        assert validator.end() is not None
        assert validator.accounting().rules == {"group_too_long": 100_000}


def test_an_open_group_keeps_its_texts_and_not_its_blocks(tmp_path: Path) -> None:
    with Commit(str(tmp_path / "out")) as commit:
        quarantine = Quarantine(commit)
        validator = Validator(QueryIds(tmp_path), quarantine, max_group=50, missing_labels=False)
        blocks = []
        for block in blocks_of([Row("q", label=-1.0)] * 50 + [Row("long")] * 60, range(110)):
            line = int(block.lines_N[0])
            texts = Lines(f"row {line}\n".encode() + b"# comment\n" * 1000, line)
            blocks.append(weakref.ref(texts))
            block.texts = texts
            del texts
            validator.add(block)
            del block
            assert not any(gone() for gone in blocks)
        validator.end()
        (name,) = quarantine.close()
        commit.keep([name])
    texts = pq.read_table(tmp_path / "out" / name).column("text").to_pylist()
    assert texts == [f"row {line}" for line in range(1, 52)]


def test_quarantine_shows_what_is_wrong(tmp_path: Path) -> None:
    with Commit(str(tmp_path / "out")) as commit:
        quarantine = Quarantine(commit)
        validator = Validator(QueryIds(tmp_path), quarantine, max_group=9, missing_labels=False)
        rows = [Row("q", value=-math.inf, doc_id="d"), Row("q", label=-3), Row("", rule="unparsable")]
        rows += [Row("\udcff", rule="feature_count")]
        for block in blocks_of(rows, ()):
            validator.add(block)
        validator.end()
        (name,) = quarantine.close()
        commit.keep([name])
    table = pq.read_table(tmp_path / "out" / name)
    assert sorted(table.select(["line", "rule", "text", "query_id"]).to_pydict().items()) == [
        ("line", [3, 4, 1, 2]),
        ("query_id", ["", "?", "q", "q"]),
        ("rule", ["unparsable", "feature_count", "infinite", "bad_label"]),
        ("text", ["?", "?", "1 qid:q 1:-inf # d", "-3 qid:q 1:0.5 2:1"]),
    ]
    assert set(table.column("file").to_pylist()) == {"log.txt"}


def test_no_rejection_leaves_no_quarantine(tmp_path: Path) -> None:
    with Commit(str(tmp_path / "out")) as commit:
        assert Quarantine(commit).close() == ()
    assert not (tmp_path / "out" / "quarantine").exists()
