"""The LETOR reader against a row-by-row oracle, scikit-learn's reader and the published counts of real files."""

import gzip
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file

from ltrscale.errors import InputError
from ltrscale.experiments.first.forms import other_form
from ltrscale.ingest import letor_lines, lines
from ltrscale.ingest.letor import Letor, _infer_format, read_letor
from ltrscale.ingest.rows import Rejection, RowBlock
from ltrscale.ingest.source import File

F = 3


@dataclass
class Flat:
    """All blocks of a file as plain lists; rows are (line, query id, label, features, document id)."""

    rows: list[tuple[int, str, float, list[float], str | None]]
    rejected: list[tuple[int, str, str, str]]


def flatten(blocks: Iterator[RowBlock]) -> Flat:
    flat = Flat([], [])
    for block in blocks:
        n = len(block)
        assert block.features_NF.dtype == block.labels_N.dtype == np.float32
        doc_ids = [None] * n if block.doc_ids_N is None else block.doc_ids_N.to_pylist()
        columns = (block.lines_N.tolist(), block.query_ids_N.to_pylist(), block.labels_N.tolist())
        flat.rows += zip(*columns, block.features_NF.tolist(), doc_ids, strict=True)
        flat.rejected += [(bad.line, bad.rule, bad.text, bad.query_id) for bad in block.rejected]
    return flat


def read(content: bytes, **options: Any) -> Flat:
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        file.write(content)
        file.flush()
        return flatten(read_letor(file.name, **{"n_features": F, "dense": True, **options}))


def nearest_float32(word: str) -> float:
    """The exact nearest float32 of a decimal number; ties go to the even one."""
    exact = Fraction(Decimal(word))
    if abs(exact) >= Fraction(2**128 - 2**103):  # half a unit above the largest
        return np.inf if exact > 0 else -np.inf
    with np.errstate(over="ignore", under="ignore"):
        near = np.float32(min(max(float(exact), -3.4028234e38), 3.4028234e38))
        around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    finite = [value for value in around if np.isfinite(value)]
    return float(min(finite, key=lambda value: (abs(Fraction(float(value)) - exact), int(value.view(np.int32)) & 1)))


def oracle_number(word: str) -> float | None:
    if word.lower() in ("", "nan", "null"):
        return np.nan
    if match := re.fullmatch(r"([+-]?)inf(inity)?", word, re.IGNORECASE):
        return -np.inf if match[1] == "-" else np.inf
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", word):
        return float(np.copysign(nearest_float32(word), -1.0 if word.startswith("-") else 1.0))
    return None


def oracle(content: bytes, *, dense: bool, qid: bool = True, first: int = 1) -> Flat:
    """The reader's promise, one line at a time."""
    flat = Flat([], [])
    for number, line in enumerate(content.split(b"\n"), 1):
        data, _, comment = line.partition(b"#")
        words = data.split()
        if not words:
            continue
        queries = [word for word in words[1:] if word.startswith(b"qid:")]
        query_id = queries[0][4:].decode() if qid and len(queries) == 1 and b"\xff" not in queries[0] else ""
        row = oracle_row(words, query_id, dense, qid, first)
        if isinstance(row, str):
            text = line.decode(errors="replace").rstrip("\r")[:1000]
            flat.rejected.append((number, row, text, query_id))
        else:
            match = re.match(rb"\s*docid\s*=\s*(\S+)", comment)
            flat.rows.append((number, query_id, *row, match[1].decode() if match else None))
    return flat


def oracle_row(
    words: list[bytes], query_id: str, dense: bool, qid: bool, first: int
) -> str | tuple[float, list[float]]:
    label = oracle_number(words[0].decode(errors="replace"))
    features = dict[int, float]()
    if label is None or (qid and not query_id):
        return "unparsable"
    for word in words[1:]:
        if qid and word.startswith(b"qid:"):
            continue
        index, colon, value = word.decode(errors="replace").partition(":")
        number = oracle_number(value)
        if not colon or number is None or not re.fullmatch("[0-9]{1,18}", index):
            return "unparsable"
        if int(index) < first or int(index) in features:
            return "unparsable"
        features[int(index)] = number
    if max(features, default=0) >= F + first or (dense and len(features) != F):
        return "feature_count"
    return label, [features.get(i, 0.0) for i in range(first, F + first)]


ODD_VALUES = [
    b"",
    b"NULL",
    b"null",
    b"nan",
    b"NaN",
    b"inf",
    b"-inf",
    b"+Infinity",
    b"1e39",
    b"-1e39",
    b"1e-50",
    b"1e-42",
]
ODD_VALUES += [b"+1.5", b"1E5", b"1e-3", b".5", b"5.", b"-0", b"16777217", b"1.00000017881393432617187499", b"007"]
BAD_VALUES = [
    b"abc",
    b"1_0",
    b"0x10",
    b"nan(1)",
    b"-nan",
    b"nano",
    b"1:2",
    b"--1",
    b"+-1",
    b"1e",
    b"\0",
    b"1\0",
    b"\xff",
]
ODD_INDICES = [
    b"0",
    b"01",
    b"1e0",
    b"1e2",
    b"0x2",
    b"-1",
    b"x",
    b"",
    b"99999999999",
    b"9" * 5000,
    b"4",
    b"2.0",
    b"+2",
    b"-0",
]
ODD_IDS = [b"qid:abc", b"qid:2024-01", b"qid:a:b", "qid:\u00e9".encode(), b"qid:", b"qid:\xff", b"QID:1", b"qi:1", b"5"]
BLANKS = [b" "] * 6 + [b"  ", b"\t", b" \r", b"\x0b", b"\x0c "]
ENDS = [b""] * 4 + [
    b" ",
    b"\r",
    b" \r",
    b"#docid = GX-1 inc = 1",
    b" # docid=7",
    b"#",
    b"# 1:2 qid:3 # \xff",
    b" #docid = ",
]

common_value = st.floats(width=32, allow_nan=False, allow_infinity=False).map(lambda value: f"{value:.7g}".encode())
long_value = st.decimals(-1000, 1000, places=12).map(lambda value: f"{value:f}".encode())


@st.composite
def letor_line(draw: st.DrawFn, qid: bool, first: int = 1) -> bytes:
    """A row that is mostly good; sometimes one word is odd, missing, repeated or in another place."""
    if draw(st.integers(0, 11)) == 0:
        return draw(
            st.sampled_from([b"", b"  \t", b"# all comment", b"\r", b"\0\0", b"1", b"1 qid:3", b":", b"qid:1 1:2"])
        )
    odd = draw(st.integers(0, 9)) if draw(st.booleans()) else 10
    value = st.one_of(common_value, common_value, long_value, st.sampled_from(ODD_VALUES))
    words = [[b"%d" % i, b":", draw(value)] for i in range(first, F + first)]
    label = draw(st.sampled_from([b"0", b"1", b"2", b"3.5", b"-1", b"nan", b"inf"]))
    query = draw(st.sampled_from([b"qid:1", b"qid:2", b"qid:10002"]))
    at = draw(st.integers(0, F - 1))
    match odd:
        case 0:
            words[at][2] = draw(st.sampled_from(BAD_VALUES))
        case 1:
            words[at][0] = draw(st.sampled_from(ODD_INDICES))
        case 2:
            query = draw(st.sampled_from(ODD_IDS))
        case 3:
            del words[at]
        case 4:
            words.insert(draw(st.integers(0, F)), words[at])
        case 5:
            label = draw(st.sampled_from(BAD_VALUES + ODD_VALUES[1:]))
        case 6:
            words[at][1] = draw(st.sampled_from([b"", b"::", b" : "]))
        case 7:
            words.append([b"4", b":", b"1"])
        case 8:
            words = draw(st.permutations(words))
    parts = [label, *([query] if qid else []), *(b"".join(word) for word in words)]
    if odd == 9:
        parts = [label, *draw(st.permutations(parts[1:]))]
    blank = st.sampled_from(BLANKS)
    line = b"".join(part + draw(blank) for part in parts[:-1]) + parts[-1] + draw(st.sampled_from(ENDS))
    return draw(st.sampled_from([b""] * 5 + [b" ", b"\t"])) + line


def texts(*, qid: bool, first: int = 1) -> st.SearchStrategy[bytes]:
    ends = st.sampled_from([b"", b"\n"])
    return st.tuples(st.lists(letor_line(qid, first), max_size=8).map(b"\n".join), ends).map(b"".join)


@given(data=st.data(), first=st.integers(0, 1), dense=st.booleans(), block_bytes=st.sampled_from([1, 7, 64, 1 << 24]))
@pytest.mark.slow
def test_reader_keeps_its_promise_line_by_line(data: st.DataObject, first: int, dense: bool, block_bytes: int) -> None:
    content = data.draw(texts(qid=True, first=first))
    found = read(content, dense=dense, block_bytes=block_bytes, first=first)
    expected = oracle(content, dense=dense, first=first)
    np.testing.assert_equal(found.rows, expected.rows)
    assert found.rejected == expected.rejected


def parsed_slowly(text: bytes, row_format: letor_lines.RowFormat) -> RowBlock:
    convert = letor_lines._convert

    def no_row(text: bytes, words_S2: Any, counts_L: Any, usual_L: Any, row_format: letor_lines.RowFormat) -> Any:
        return convert(text, words_S2, counts_L, np.zeros_like(usual_L), row_format)

    with mock.patch.object(letor_lines, "_convert", no_row):
        return letor_lines.parse_lines(lines.Lines(text, 1), "f", row_format)


@given(data=st.data(), first=st.integers(0, 1), dense=st.booleans())
@pytest.mark.slow
def test_fast_and_slow_path_agree(data: st.DataObject, first: int, dense: bool) -> None:
    for qid in (True, False):
        text = data.draw(texts(qid=qid, first=first))
        row_format = letor_lines.RowFormat(n_features=F, dense=dense, qid=qid, first=first)
        text = text + b"\n"
        fast = flatten(iter([letor_lines.parse_lines(lines.Lines(text, 1), "f", row_format)]))
        slow = flatten(iter([parsed_slowly(text, row_format)]))
        np.testing.assert_equal(fast.rows, slow.rows)
        assert fast.rejected == slow.rejected
        np.testing.assert_equal(fast.rows, oracle(text, dense=dense, qid=qid, first=first).rows)


@pytest.mark.parametrize("dense", [True, False])
def test_common_rows_take_the_fast_path_whatever_bad_rows_are_beside_them(dense: bool) -> None:
    good = b"1 qid:1 1:2 2:NULL 3:\n\n\t0  qid:x 1:-.5\t2:1e-3 3:nan \r\n2 qid:x 1:0 2:3 3:9 # docid = a\n"
    bad = b"1 qid:1 1:2 1:3 3:4\n1 qid:1 1:2 2:-inf 3:4\n1 qid:1 01:3 2:4 3:4\nx\n"
    calls: list[list[bytes]] = []

    def refuse(words: list[bytes], _: letor_lines.RowFormat) -> letor_lines._Row:
        calls.append(words)
        raise letor_lines._BadRowError("")

    with mock.patch.object(letor_lines, "_parse_row", refuse):
        found = read(good + bad + good, dense=dense)
    assert [row[0] for row in found.rows] == [1, 3, 4, 9, 11, 12]
    assert len(calls) == len(found.rejected) == 4


@pytest.mark.slow
@pytest.mark.parametrize("qid", [True, False])
def test_one_changed_byte_of_common_rows_gives_what_the_slow_path_gives(qid: bool) -> None:
    text = b"0 qid:1 1:2 2:.5 3:1 \r\n2 qid:ab 1:0 2:13 3:7 \r\n"
    text = text if qid else re.sub(rb"qid:\w+ ", b"", text)
    row_format = letor_lines.RowFormat(n_features=F, dense=True, qid=qid)
    for at in range(len(text) - 1):
        for byte in b" :\t\n\v\x1cx0n1\xe9":
            changed = text[:at] + bytes([byte]) + text[at + 1 :]
            fast = flatten(iter([letor_lines.parse_lines(lines.Lines(changed, 1), "f", row_format)]))
            slow = flatten(iter([parsed_slowly(changed, row_format)]))
            np.testing.assert_equal(fast.rows, slow.rows, err_msg=str(changed))
            assert fast.rejected == slow.rejected, changed


@pytest.mark.parametrize("wrong", [b"%d" % i for i in (2, 9, 13, 21, 100, 102, 111, 201, 1000, 1101)] + [b"1O", b"10a"])
def test_every_digit_of_an_index_counts(wrong: bytes) -> None:
    words = [b"%d:%d" % (i, i) for i in range(1, 121)]
    good = b"1 qid:1 " + b" ".join(words) + b"\n"
    bad = [
        b"1 qid:1 " + b" ".join([*words[:at], wrong + b":1", *words[at + 1 :]]) + b"\n" for at in (0, 9, 10, 100, 119)
    ]
    refuse = mock.patch.object(letor_lines, "_parse_row", side_effect=letor_lines._BadRowError(""))
    with refuse:  # good rows need no second look
        found = read(good + b"".join(bad) + good, n_features=120)
    assert [row[0] for row in found.rows] == [1, 7]
    assert found.rows[0][3] == found.rows[1][3] == [float(i) for i in range(1, 121)]
    assert [line for line, *_ in found.rejected] == [2, 3, 4, 5, 6]


def test_inferred_features_are_those_of_the_first_good_row(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"\n# c\n1 qid:1 1:x 2:3\n1 qid:1 2:3\n1 qid:1\n2 qid:1 1:3 2:4 # c\n1 qid:1 1:3\n")
    found = _infer_format(str(path))
    assert found is not None
    assert (found.n_features, found.first) == (2, 1)
    blocks = list(read_letor(str(path), n_features=2, dense=True))
    assert [(bad.line, bad.rule) for bad in blocks[0].rejected] == [
        (3, "unparsable"),
        (4, "feature_count"),
        (5, "feature_count"),
        (7, "feature_count"),
    ]
    path.write_bytes(b"1 1:3 2:4\n")
    assert _infer_format(str(path), qid=False) == replace(found, qid=False)
    assert _infer_format(str(path)) is None
    assert [bad.rule for bad in next(read_letor(str(path), n_features=1, dense=True)).rejected] == ["unparsable"]


def test_sparse_rows_need_a_number_of_features() -> None:
    with pytest.raises(InputError, match=r"source.n_features: sparse rows do not state .* set it"):
        Letor(dense=False).find_features([File(url="f.txt")])


def test_odd_files_give_rejections_and_no_crash() -> None:
    row = b"1 qid:1 1:1 2:2 3:3\n"
    assert read(b"") == read(b"\n \n# c\n") == Flat([], [])
    assert [r[0] for r in read(b"\xef\xbb\xbf" + row).rows] == [1], "a byte order mark is no part of the first label"
    junk = np.random.default_rng(0).integers(0, 256, 200_000, dtype=np.uint8).tobytes().replace(b"\x1f", b"")
    found = read(row + b"x" * (1 << 20) + b"\n" + junk + b"\n" + row)
    assert len(found.rows) == 2
    assert (found.rejected[0][0], len(found.rejected[0][2])) == (2, 1000)
    assert found.rejected == oracle(row + b"x" * (1 << 20) + b"\n" + junk + b"\n" + row, dense=True).rejected


def test_a_line_too_long_for_memory_is_one_unparsable_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_LONGEST_LINE", 10_000)
    row = b"1 qid:1 1:1 2:2 3:3\n"
    endless = b"1 qid:7 " + b" ".join(b"%d:1" % i for i in range(1, 9000))
    found = read(row + endless + b"\n" + row, dense=False, block_bytes=512)
    assert [r[0] for r in found.rows] == [1, 3]
    assert [(line, rule, query) for line, rule, _, query in found.rejected] == [(2, "unparsable", "7")]
    hidden = (
        b"1 qid:7 1:1" + b" " * 5000 + b"x" * 4000 + b" " * 3000 + b"3:3\n"
    )  # what is left of it would be a good row
    assert [bad[1] for bad in read(hidden, dense=False, block_bytes=512).rejected] == ["unparsable"]
    commented = read(row[:-1] + b" #" + b"c" * 30_000 + b"\n", block_bytes=512)
    assert len(commented.rows) == 1


@pytest.mark.slow
def test_blocks_do_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"1 qid:1 1:1 2:2 3:3\n" * 20_000)
    sizes = [len(block) for block in read_letor(str(path), n_features=3, dense=True, block_bytes=4096)]
    assert sum(sizes) == 20_000
    assert max(sizes) <= 2 * 4096 // 20
    path.write_bytes(b"x\n" * 50_000)
    with mock.patch("ltrscale.ingest.letor._PIECE", 4096):
        assert max(len(block.rejected) for block in read_letor(str(path), n_features=3, dense=True)) < 15_000
    path.write_bytes(b"0 qid:1 1:1\n" * 600)
    wide = [(len(block), block.features_NF.nbytes) for block in read_letor(str(path), n_features=100_000, dense=False)]
    assert sum(rows for rows, _ in wide) == 600
    assert max(size for _, size in wide) <= 1 << 27, "short rows of many features are long arrays"


@pytest.mark.slow
def test_gzip_is_recognised_by_content_and_may_have_several_members(tmp_path: Path) -> None:
    row = b"1 qid:1 1:1 2:2 3:3\n"
    path = tmp_path / "plain.txt"
    path.write_bytes(gzip.compress(row * 300) + gzip.compress(b"") + gzip.compress(row * 300))
    for block_bytes in (1, 100, 1 << 24):
        blocks = list(read_letor(str(path), n_features=3, dense=True, block_bytes=block_bytes))
        assert sum(map(len, blocks)) == 600
        assert blocks[-1].lines_N[-1] == 600
    path = tmp_path / "plain.gz"
    path.write_bytes(row)
    assert len(next(read_letor(str(path), n_features=3, dense=True))) == 1


@pytest.mark.slow
def test_broken_gzip_is_an_error_with_its_offset(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = b"".join(b"1 qid:1 1:%d 2:%d 3:%d\n" % tuple(r) for r in rng.integers(0, 9**9, (5000, 3)).tolist())
    packed = gzip.compress(rows)
    path = tmp_path / "f.gz"

    def fails(content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(InputError) as error:
            list(read_letor(str(path), n_features=3, dense=True, block_bytes=1000))
        return str(error.value)

    cut = fails(packed[:30_000])
    assert str(path) in cut
    assert "byte 30000" in cut
    assert 0 < int(re.search(r"(\d+) bytes of text", cut)[1]) < len(rows)  # type: ignore[index]
    flipped = bytearray(packed)
    flipped[20_000] ^= 0xFF
    assert "corrupt gzip data" in fails(bytes(flipped))
    garbage = fails(packed + b"garbage")
    assert "corrupt gzip data" in garbage
    assert f"{len(rows)} bytes of text" in garbage
    assert int(re.search(r"byte (\d+)", garbage)[1]) == len(packed)  # type: ignore[index]
    assert "incorrect data check" in fails(packed[:-8] + b"\0\0\0\0" + packed[-4:])


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.txt: no such file"):
        list(read_letor(str(tmp_path / "none.txt"), n_features=3, dense=True))


def grouped(tmp_path: Path, rows: bytes, sizes: bytes, **options: Any) -> list[RowBlock]:
    (tmp_path / "rows").write_bytes(rows)
    (tmp_path / "sizes").write_bytes(sizes)
    options = {"n_features": F, "dense": False, **options}
    return list(read_letor(str(tmp_path / "rows"), group_sizes=str(tmp_path / "sizes"), **options))


@pytest.mark.parametrize("block_bytes", [1, 16, 1 << 24])
def test_group_sizes_number_the_rows_and_count_unparsable_ones(tmp_path: Path, block_bytes: int) -> None:
    rows = b"1 1:1\nx\n\n0 2:1\n# c\n1 1:7\ny\n2 3:1\n2 3:2\n"  # seven rows, in lines 1, 2, 4, 6, 7, 8 and 9
    for pack in (bytes, gzip.compress):
        blocks = grouped(tmp_path, rows, pack(b"1\n0\n2\r\n\n2\n0\n2"), block_bytes=block_bytes)
        seen: list[tuple[int, str, bool]] = []
        for block in blocks:
            starts = [] if block.starts_N is None else block.starts_N.tolist()
            seen += zip(block.lines_N.tolist(), block.query_ids_N.to_pylist(), starts, strict=True)
        assert seen == [(1, "1", True), (4, "3", True), (6, "4", True), (8, "6", True), (9, "6", False)]
        rejected = [bad for block in blocks for bad in block.rejected]
        empty, bad = rejected[:2], rejected[2:]
        side = str(tmp_path / "sizes")
        assert empty == [
            Rejection(side, 2, "empty_group", "0", "2", rows=0),
            Rejection(side, 6, "empty_group", "0", "5", rows=0),
        ]
        assert [(r.line, r.rule, r.query_id) for r in bad] == [(2, "unparsable", "3"), (7, "unparsable", "4")]


def test_group_sizes_that_do_not_fit_are_errors_with_counts(tmp_path: Path) -> None:
    rows = b"1 1:1\n" * 5
    for sizes in (b"2\n2\n", b"2\n4\n", b"", b"3\n"):
        for block_bytes in (1, 1 << 24):
            with pytest.raises(InputError, match=rf"rows has 5 rows.*sizes add up to {sum(map(int, sizes.split()))}"):
                grouped(tmp_path, rows, sizes, block_bytes=block_bytes)
    for sizes in (b"2\n2.5\n", b"5\n-1\n", b"x\n", b"2 3\n", b"\0\xff\n"):
        with pytest.raises(InputError, match=r"sizes: line \d: .* is no group size"):
            grouped(tmp_path, rows, sizes)
    assert grouped(tmp_path, b"", b"") == []


def test_rows_with_a_qid_do_not_fit_group_sizes(tmp_path: Path) -> None:
    (block,) = grouped(tmp_path, b"1 qid:1 1:1\n1 1:2\n", b"2\n")
    assert [(bad.line, bad.rule) for bad in block.rejected] == [(1, "unparsable")]


REAL = {
    "MQ2008/Fold1/train.txt.gz": (9630, 471, 46),
    "MQ2008/Fold1/vali.txt.gz": (2707, 157, 46),
    "MQ2008/Fold1/test.txt.gz": (2874, 156, 46),
    "OHSUMED/Fold1/test.txt.gz": (3383, 22, 45),
    "MSLR-sample/train.txt.gz": (5000, 43, 136),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_files_have_their_counts_and_scikit_learns_values(shared_data: Path, name: str) -> None:
    from sklearn.datasets import load_svmlight_file

    path = shared_data / "letor" / name
    blocks = list(
        read_letor(
            str(path), n_features=getattr(_infer_format(str(path)), "n_features", 1), dense=True, block_bytes=1 << 20
        )
    )
    query_ids = [query for block in blocks for query in block.query_ids_N.to_pylist()]
    features_NF = np.concatenate([block.features_NF for block in blocks])
    assert not any(block.rejected for block in blocks)
    assert (len(features_NF), len(set(query_ids)), features_NF.shape[1]) == REAL[name]
    expected, labels_N, queries_N = load_svmlight_file(str(path), dtype=np.float64, query_id=True)
    assert np.array_equal(features_NF, expected.toarray().astype(np.float32))
    assert np.array_equal(np.concatenate([block.labels_N for block in blocks]), labels_N)
    assert query_ids == [str(query) for query in queries_N]
    named = [block.doc_ids_N is not None and block.doc_ids_N.null_count == 0 for block in blocks]
    assert all(named) if "MSLR" not in name else not any(named)


def test_ohsumed_with_nulls_has_its_missing_values(shared_data: Path) -> None:
    missing_F = np.zeros(45, np.int64)
    rows = documents = 0
    for path in sorted((shared_data / "letor/OHSUMED-null").glob("*.gz")):
        for block in read_letor(str(path), n_features=45, dense=True):
            assert not block.rejected
            missing_NF = np.isnan(block.features_NF)
            missing_F += missing_NF.sum(0)
            rows += int(missing_NF.any(1).sum())
            documents += len(block)
    assert (documents, int(missing_F.sum()), rows) == (16_140, 51_490, 7_146)
    with_nulls = [*range(11, 16), *range(26, 31), *range(41, 46)]
    assert (np.flatnonzero(missing_F) + 1).tolist() == with_nulls


@pytest.mark.slow
@pytest.mark.parametrize(("part", "documents", "queries"), [("train", 3005, 201), ("test", 768, 50)])
def test_lightgbm_example_has_its_groups(shared_data: Path, part: str, documents: int, queries: int) -> None:
    from sklearn.datasets import load_svmlight_file

    path = shared_data / "letor/lightgbm-example" / f"rank.{part}"
    blocks = list(
        read_letor(f"{path}.gz", n_features=300, dense=False, group_sizes=f"{path}.query", block_bytes=100_000)
    )
    assert len(blocks) > 1
    features_NF = np.concatenate([block.features_NF for block in blocks])
    starts_N = np.concatenate([block.starts_N for block in blocks if block.starts_N is not None])
    assert (len(features_NF), int(starts_N.sum())) == (documents, queries)
    sizes = np.diff([*np.flatnonzero(starts_N), documents])
    assert sizes.tolist() == [int(size) for size in Path(f"{path}.query").read_text().split()]
    expected, labels_N = load_svmlight_file(f"{path}.gz", n_features=300)
    assert np.array_equal(features_NF, expected.toarray().astype(np.float32))
    assert np.array_equal(np.concatenate([block.labels_N for block in blocks]), labels_N)


ROWS = {"a": [0.5, 0.0, 3.0], "b": [1.0, 2.0, 0.0], "c": [0.0, 4.0, 5.0]}


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("form", ["{label} {query} {words}", "{label} {words} {query}"])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
@pytest.mark.parametrize("first", [0, 1])
def test_indices_from_zero_or_unsorted_and_a_query_at_the_end_are_read(
    tmp_path: Path, first: int, order: list[int], form: str, dense: bool
) -> None:
    path = tmp_path / "rows.txt"
    with path.open("w") as file:
        for query, values in ROWS.items():
            words = [f"{i + first}:{values[i]}" for i in order if dense or values[i]]
            file.write(form.format(label=1, query=f"qid:{query}", words=" ".join(words)) + "\n")
    settings = {} if dense else {"n_features": 3, "first_index": first}
    source, files = Letor(dense=dense, **settings), [File(url=str(path))]
    features = source.find_features(files)
    assert [feature.name for feature in features] == [str(i + first) for i in range(3)]
    [block] = source.open(features, first=str(path), encoders={})(files[0])
    assert not block.rejected
    assert dict(zip(block.query_ids_N.to_pylist(), block.features_NF.tolist(), strict=True)) == ROWS


@pytest.mark.parametrize("zero_based", [True, False])
def test_what_scikit_learn_writes_is_read(tmp_path: Path, zero_based: bool) -> None:
    rng = np.random.default_rng(0)
    x_NF = np.where(rng.random((50, 12)) < 0.5, 0, rng.normal(size=(50, 12))).astype(np.float32)
    query_N, path = np.repeat(np.arange(10), 5), str(tmp_path / "rows.txt")
    dump_svmlight_file(x_NF, rng.integers(0, 3, 50), path, zero_based=zero_based, query_id=query_N)
    source = Letor(dense=False, n_features=12, first_index=0 if zero_based else None)
    [block] = source.open(source.find_features([File(url=path)]), first=path, encoders={})(File(url=path))
    np.testing.assert_array_equal(block.features_NF, x_NF)
    lines = other_form(path, [path], "out", {})
    assert lines is not None
    planned = yaml.safe_load("\n".join(lines))["prepare"]["source"]
    assert planned == {"kind": "letor", "dense": False, "n_features": 12} | ({"first_index": 0} if zero_based else {})


@pytest.mark.parametrize(
    ("row", "found"),
    [
        (b"1 qid:1 0:1 1:2 2:3", "index 0, where the first feature has 1: set source.first_index to 0 if .*"),
        (b"1 qid:1 1:1 2:2 2:3", "index 2 is there twice"),
        (b"1 1:1 2:2 3:3", "there is not one qid:ID after the label"),
        (b"1 qid:1 1:1 2:2 x 3:3", "'x' is no feature as index:value"),
        (b"1 qid:1 1:1 2:two 3:3", "'two' is no number"),
        (b"good qid:1 1:1 2:2 3:3", "'good' is no number"),
        (b"1 qid:1 1:1 3:3", "2 of 3 features; set source.dense to false if zeros are left out"),
        (b"1 qid:1 1:1 2:2 3:3 4:4", "index 4, where the last feature has 3"),
    ],
)
def test_a_row_that_cannot_be_read_says_why(row: bytes, found: str, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_bytes(b"1 qid:1 1:1 2:2 3:3\n" + row + b"\n")
    [block] = read_letor(str(tmp_path / "rows.txt"), n_features=3, dense=True)
    [rejection] = block.rejected
    assert re.fullmatch(f"{found}: {re.escape(repr(row.decode()))}", rejection.found)
