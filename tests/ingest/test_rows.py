"""Cutting, joining and filtering RowBlocks: rows keep their texts, and memory holds only the parts in use."""

import weakref

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from ltrscale.ingest.lines import LineTexts
from ltrscale.ingest.rows import RawTexts, RowBlock, RowTexts, concat, cut, keep


def block_of(texts: RawTexts | None, lines: list[int], file: str = "log") -> RowBlock:
    one_N = np.ones(len(lines), np.float32)
    ids = pa.array(["q"] * len(lines), pa.string())
    return RowBlock(file, np.array(lines, np.int64), ids, one_N[:, None], one_N, texts=texts)


def piece_of(kind: str, first: int, n: int) -> RowBlock:
    """Rows with the text `row <line>`, from the lines of a text or the rows of a Parquet batch."""
    lines = list(range(first, first + n))
    if kind == "text":
        return block_of(LineTexts("".join(f"row {line}\r\n" for line in lines).encode(), first), lines)
    batch = pa.record_batch({"at": pa.array([f"row {line}" for line in lines], pa.string())})
    return block_of(RowTexts(batch, np.array(lines, np.int64)), lines)


def texts_of(rows: RowBlock) -> list[str]:
    assert rows.texts is not None
    return [rows.texts(line) for line in rows.lines_N.tolist()]


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(["text", "parquet"]),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    kept=st.lists(st.booleans(), min_size=20, max_size=20),
    bounds=st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_rows_keep_their_texts(kind: str, sizes: list[int], kept: list[bool], bounds: tuple[int, int]) -> None:
    firsts = np.cumsum([7, *sizes[:-1]]).tolist()
    rows = concat([piece_of(kind, first, n) for first, n in zip(firsts, sizes, strict=True)])
    rows = concat([cut(rows, 0, len(rows) // 2), cut(rows, len(rows) // 2, len(rows))])
    rows = keep(rows, np.array(kept[: len(rows)], bool))
    start, stop = sorted(min(bound, len(rows)) for bound in bounds)
    rows = cut(rows, start, stop)
    shown = "row {}" if kind == "text" else '{{"at": "row {}"}}'
    assert texts_of(rows) == [shown.format(line) for line in rows.lines_N.tolist()]
    if len(rows):
        assert rows.texts is not None
        only = rows.texts.only(rows.lines_N)
        rows.texts = only.only(rows.lines_N)
        assert texts_of(rows) == [shown.format(line) for line in rows.lines_N.tolist()]


def test_documents_of_one_row_share_its_text() -> None:
    batch = pa.record_batch({"docs": [["a", "b"], ["c"]]})
    rows = block_of(RowTexts(batch, np.array([4, 5])), [4, 4, 5])
    rows.texts = rows.texts.only(rows.lines_N) if rows.texts else None
    assert texts_of(rows) == ['{"docs": ["a", "b"]}'] * 2 + ['{"docs": ["c"]}']


def test_texts_are_cut_at_a_thousand_characters() -> None:
    assert LineTexts(("ü" * 5000 + "\n").encode(), 1)(1) == "ü" * 1000
    assert len(RowTexts(pa.record_batch({"a": ["x" * 5000]}), np.array([1]))(1)) == 1000
    assert LineTexts(b"a\xff\n", 1)(1) == "a\ufffd"


def test_a_kept_excerpt_does_not_hold_the_whole_text() -> None:
    texts = LineTexts(b"first\n" + b"# a long comment\n" * 1000 + b"last\n", 1)
    gone = weakref.ref(texts)
    kept = texts.only(np.array([1, 1002]))
    del texts
    assert gone() is None
    assert (kept(1), kept(1002)) == ("first", "last")

    batch = pa.record_batch({"at": np.arange(100_000)})
    few = RowTexts(batch, np.arange(1, 100_001)).only(np.array([7, 99_000]))
    assert (few(7), few(99_000)) == ('{"at": 6}', '{"at": 98999}')
    assert few.batch.get_total_buffer_size() < 1000


def test_rows_of_several_files_or_without_texts_have_none_together() -> None:
    first, second = piece_of("text", 1, 2), piece_of("text", 3, 2)
    assert concat([first, block_of(None, [3])]).texts is None
    second.file = "other"
    assert concat([first, second]).texts is None
