"""Damaged copies of real files: one readable error or an exact account, no other exception, no row lost."""

import gzip
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from news_log import NEWS
from nightly import nightly
from preparing import prepare, rejections_of

from ltrscale import storage
from ltrscale.data.dataset.manifest import Dataset, open_dataset
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig

Rng = np.random.Generator
SOURCES: dict[str, dict[str, Any]] = {
    "letor": {"kind": "letor"},
    "sparse": {"kind": "letor", "dense": False, "n_features": 300},
    "csv": {"kind": "items", "columns": {"query": "query_id", "label": "grade", "features": ["*"]}},
    "parquet": {"kind": "items", "columns": NEWS},
    "groups": {"kind": "groups", "columns": {"n_features": 46, "labels": "labels", "docs": "doc_ids"}},
}


@dataclass(frozen=True)
class Real:
    """A real file, the config that reads it, and the file of its group sizes."""

    path: str
    source: str
    sizes: str | None = None


TEXTS = {
    "MQ2008": Real("letor/MQ2008/Fold1/vali.txt.gz", "letor"),
    "OHSUMED": Real("letor/OHSUMED/Fold1/vali.txt.gz", "letor"),
    "OHSUMED-null": Real("letor/OHSUMED-null/Fold1.txt.gz", "letor"),
    "MSLR": Real("letor/MSLR-sample/train.txt.gz", "letor"),
    "lightgbm": Real("letor/lightgbm-example/rank.test.gz", "sparse", "letor/lightgbm-example/rank.test.query"),
    "msft": Real("csv/msft-docs/normalized_features.csv.gz", "csv"),
}
OTHERS = [
    *(Real(f"letor/{s}/Fold{i}/{p}.txt.gz", "letor") for s in ("MQ2008", "OHSUMED") for i in range(1, 6)
      for p in ("train", "vali", "test")),
    *(Real(f"letor/OHSUMED-null/Fold{i}.txt.gz", "letor") for i in range(1, 6)),
    Real("letor/lightgbm-example/rank.train.gz", "sparse", "letor/lightgbm-example/rank.train.query"),
]  # fmt: skip


def flip_bits(text: bytes, rng: Rng) -> bytes:
    """Flip one bit in 5,000 bytes, after the first line."""
    damaged = np.frombuffer(text, np.uint8).copy()
    start = text.index(b"\n") + 1
    places = start + rng.choice(len(text) - start, (len(text) - start) // 5000 + 1, replace=False)
    damaged[places] ^= (1 << rng.integers(0, 8, len(places))).astype(np.uint8)
    return damaged.tobytes()


def by_lines(change: Callable[[list[bytes], Rng], None]) -> Callable[[bytes, Rng], bytes]:
    """Damage the lines after the first."""

    def damage(text: bytes, rng: Rng) -> bytes:
        lines = text.split(b"\n")
        rest = lines[1:]
        change(rest, rng)
        return b"\n".join(lines[:1] + rest)

    return damage


@by_lines
def cut_lines(lines: list[bytes], rng: Rng) -> None:
    for i in rng.choice(len(lines), len(lines) // 50 + 1, replace=False):
        lines[i] = lines[i][: rng.integers(0, len(lines[i]) + 1)]


@by_lines
def shuffle_queries(lines: list[bytes], rng: Rng) -> None:
    rng.shuffle(lines)  # type: ignore[arg-type]


@by_lines
def put_nan_and_inf(lines: list[bytes], rng: Rng) -> None:
    for i in rng.choice(len(lines), len(lines) // 20 + 1, replace=False):
        delimiter = b"," if b"," in lines[i] else b" "
        words = lines[i].split(delimiter)
        at = int(rng.integers(len(words)))
        index, colon, _ = words[at].rpartition(b":")
        words[at] = index + colon + [b"nan", b"inf", b"-inf", b"1e999", b"NULL", b""][rng.integers(6)]
        lines[i] = delimiter.join(words)


@by_lines
def put_a_long_line(lines: list[bytes], rng: Rng) -> None:
    i = int(rng.integers(len(lines)))
    lines.insert(i, (lines[i] + b" ") * (2**20 // (len(lines[i]) + 1) + 1))


@by_lines
def put_zeros_and_returns(lines: list[bytes], rng: Rng) -> None:
    for i, junk in zip(rng.choice(len(lines) - 1, 5), (b"\0" * 50, b"\r", b"\xff\xfe", b'"', b"#"), strict=True):
        lines[i] = lines[i][:20] + junk + lines[i][20:]


TEXT_DAMAGE: dict[str, Callable[[bytes, Rng], bytes]] = {
    "bit flips": flip_bits,
    "cut lines": cut_lines,
    "shuffled queries": shuffle_queries,
    "NaN and infinity": put_nan_and_inf,
    "a line of 1 MB": put_a_long_line,
    "junk": put_zeros_and_returns,
}


def flip_bytes(data: bytes, rng: Rng) -> bytes:
    damaged = np.frombuffer(data, np.uint8).copy()
    damaged[rng.choice(len(data), 20)] ^= 0x55
    return damaged.tobytes()


def flip_one_bit_of_the_end(data: bytes, rng: Rng) -> bytes:
    damaged = np.frombuffer(data, np.uint8).copy()
    damaged[-int(rng.integers(1, min(len(data), 20_000)))] ^= 1 << rng.integers(8)
    return damaged.tobytes()


FILE_DAMAGE: dict[str, Callable[[bytes, Rng], bytes]] = {
    "flipped bytes": flip_bytes,
    "a flipped bit at the end": flip_one_bit_of_the_end,
    "cut in the middle": lambda data, rng: data[: int(rng.integers(len(data) // 4, len(data)))],
    "cut end": lambda data, _: data[:-7],
    "empty": lambda _, __: b"",
    "binary": lambda _, rng: rng.bytes(30_000),
}


def physical_rows(path: Path, source: str) -> int:
    """The number of rows in a file, readable or not."""
    if path.suffix == ".parquet":
        batches = pq.ParquetFile(path).iter_batches()
        if source != "groups":
            return sum(len(batch) for batch in batches)
        return sum(len(features) // 46 for b in batches for features in b.column("features").to_pylist() if features)
    raw = path.read_bytes()
    lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).split(b"\n")
    if source == "csv":
        return sum(line not in (b"", b"\r") for line in lines[1:])
    return sum(bool(line.partition(b"#")[0].split()) for line in lines)


def outcome(path: Path, real: Real, shared: Path) -> Dataset | None:
    """Prepare a damaged file; checks the laws and returns the data set, or None after a readable error."""
    sizes = None if real.sizes is None else str(shared / real.sizes)
    inputs = [{"path": str(path), "group_sizes": sizes}]
    config = PrepareConfig.model_validate({"inputs": inputs, "source": SOURCES[real.source], "max_rejected": 1})
    out = str(path.parent / "out")
    try:
        dataset = prepare(config, out)
    except InputError as error:
        message = str(error)
    else:
        check_account(dataset, physical_rows(path, real.source))
        if path.suffix != ".parquet":
            check_texts(dataset, path)
        return dataset
    assert "\n" not in message
    assert path.name in message or (real.sizes is not None and real.sizes in message)
    assert storage.read_manifest(out) is None
    return None


def check_account(dataset: Dataset, rows: int) -> None:
    """Check that every physical row is in the data set or in the quarantine, and that the manifest counts it."""
    accounting = dataset.manifest.accounting
    assert accounting.rows_in == rows
    assert accounting.rows_in == accounting.rows_kept + accounting.rows_rejected
    assert accounting.groups_in == accounting.groups_kept + accounting.groups_rejected
    assert (accounting.groups_kept, accounting.rows_kept) == dataset.manifest.counts()[:2]
    assert dataset == open_dataset(dataset.url)
    assert sum(row["rows"] for row in rejections_of(dataset)) == accounting.rows_rejected
    tables = [pq.ParquetFile(storage.join(dataset.url, file.path)).read() for file in dataset.manifest.files]
    kept = np.concatenate([table.column("features").combine_chunks().values.to_numpy() for table in tables])
    assert len(kept) == accounting.rows_kept * len(dataset.manifest.features)
    assert not np.isinf(kept).any()


def check_texts(dataset: Dataset, path: Path) -> None:
    """Check that the quarantine shows the lines of the file, with a reason if a line of CSV is no row."""
    raw = path.read_bytes()
    lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).split(b"\n")
    for row in rejections_of(dataset):
        line = lines[row["line"] - 1].decode(errors="replace").rstrip("\r")[:1000]
        is_csv = ".csv" in path.name and row["rule"] == "unparsable"
        assert f": {line}"[:900] in row["text"] if is_csv else row["text"] == line, row


def damaged_text(real: Real, shared: Path, folder: Path, damage: str, seed: int = 0) -> Path:
    text = gzip.decompress((shared / real.path).read_bytes())
    path = folder / Path(real.path).name.removesuffix(".gz")
    path.write_bytes(TEXT_DAMAGE[damage](text, np.random.default_rng(seed)))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("damage", TEXT_DAMAGE)
@pytest.mark.parametrize("name", ["MQ2008", *map(nightly, ("OHSUMED", "OHSUMED-null", "MSLR", "lightgbm", "msft"))])
def test_damaged_text_is_accounted_for(shared_data: Path, tmp_path: Path, name: str, damage: str) -> None:
    real = TEXTS[name]
    path = damaged_text(real, shared_data, tmp_path, damage)
    dataset = outcome(path, real, shared_data)
    if real.sizes is None:  # of rows without qid, one more or less is an error: the groups are not known then
        assert dataset is not None
        assert dataset.manifest.accounting.rows_rejected > 0


@pytest.mark.slow
@pytest.mark.parametrize("damage", FILE_DAMAGE)
@pytest.mark.parametrize("name", TEXTS)
def test_a_damaged_gzip_file_is_an_error_or_accounted_for(
    shared_data: Path, tmp_path: Path, name: str, damage: str
) -> None:
    real = TEXTS[name]
    path = tmp_path / Path(real.path).name
    path.write_bytes(FILE_DAMAGE[damage]((shared_data / real.path).read_bytes(), np.random.default_rng(0)))
    assert outcome(path, real, shared_data) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("damage", ["empty", "binary"])
def test_a_file_that_is_not_text_is_an_error(shared_data: Path, tmp_path: Path, name: str, damage: str) -> None:
    real = TEXTS[name]
    path = tmp_path / Path(real.path).name.removesuffix(".gz")
    path.write_bytes(FILE_DAMAGE[damage](b"", np.random.default_rng(0)))
    assert outcome(path, real, shared_data) is None


def news_file(shared: Path) -> Path:
    return next((shared / "news/sample").rglob("*.parquet"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, nightly(1), nightly(2)])
@pytest.mark.parametrize("damage", FILE_DAMAGE)
@pytest.mark.parametrize("source", ["parquet", "groups"])
def test_a_damaged_parquet_file_is_an_error_or_accounted_for(
    shared_data: Path, tmp_path: Path, source: str, damage: str, seed: int
) -> None:
    real = Real("", source)
    path = tmp_path / "log.parquet"
    if source == "parquet":
        data = news_file(shared_data).read_bytes()
    else:
        config = {"inputs": str(shared_data / "letor/MQ2008/Fold1/vali.txt.gz"), "source": SOURCES["letor"]}
        made = prepare(PrepareConfig.model_validate(config), str(tmp_path / "made"))
        data = Path(storage.join(made.url, made.manifest.files[0].path)).read_bytes()
    path.write_bytes(FILE_DAMAGE[damage](data, np.random.default_rng(seed)))
    dataset = outcome(path, real, shared_data)
    if "cut" in damage or damage in ("empty", "binary"):
        assert dataset is None


def shuffle_rows(table: pa.Table, rng: Rng) -> pa.Table:
    return table.take(rng.permutation(len(table)))


def put_infinite_values(table: pa.Table, rng: Rng) -> pa.Table:
    values = table.column("f_pop_1h").to_numpy().copy()
    values[rng.choice(len(values), 100)] = [np.inf, -np.inf] * 50
    return table.set_column(table.schema.get_field_index("f_pop_1h"), "f_pop_1h", pa.array(values))


def put_bad_labels(table: pa.Table, rng: Rng) -> pa.Table:
    values = table.column("clicked").to_pylist()
    for i in rng.choice(len(values), 100):
        values[i] = [None, -1][rng.integers(2)]
    return table.set_column(table.schema.get_field_index("clicked"), "clicked", pa.array(values, pa.int8()))


def drop_query_ids(table: pa.Table, rng: Rng) -> pa.Table:
    values = table.column("impression_id").to_pylist()
    for i in rng.choice(len(values), 100):
        values[i] = None
    return table.set_column(table.schema.get_field_index("impression_id"), "impression_id", pa.array(values))


@pytest.mark.slow
@pytest.mark.parametrize("damage", [shuffle_rows, put_infinite_values, put_bad_labels, drop_query_ids])
def test_bad_values_in_parquet_are_accounted_for(
    shared_data: Path, tmp_path: Path, damage: Callable[[pa.Table, Rng], pa.Table]
) -> None:
    table = damage(pq.ParquetFile(news_file(shared_data)).read(), np.random.default_rng(0))
    pq.write_table(table, tmp_path / "log.parquet")
    dataset = outcome(tmp_path / "log.parquet", Real("", "parquet"), shared_data)
    assert dataset is not None
    assert dataset.manifest.accounting.rows_rejected > 50


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip_bits, cut_lines])
def test_damaged_group_sizes_are_an_error_or_accounted_for(
    shared_data: Path, tmp_path: Path, damage: Callable[[bytes, Rng], bytes]
) -> None:
    real = TEXTS["lightgbm"]
    assert real.sizes is not None
    shutil.copy(shared_data / real.path, tmp_path / "rank.gz")
    sizes = tmp_path / "sizes"
    for seed in range(10):
        sizes.write_bytes(damage((shared_data / real.sizes).read_bytes(), np.random.default_rng(seed)))
        outcome(tmp_path / "rank.gz", Real("", "sparse", str(sizes)), shared_data)


@pytest.mark.nightly
@pytest.mark.parametrize("damage", TEXT_DAMAGE)
def test_every_real_text_file_with_other_seeds(shared_data: Path, tmp_path: Path, damage: str) -> None:
    for seed, real in enumerate(OTHERS, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcome(damaged_text(real, shared_data, folder, damage, seed), real, shared_data)
        shutil.rmtree(folder)
