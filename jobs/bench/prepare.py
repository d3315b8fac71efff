"""`prepare`: its memory, LETOR text against scikit-learn and XGBoost, and rows of items against DuckDB."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xgboost
from pyarrow import csv
from sklearn.datasets import load_svmlight_file

from jobs.bench.measure import N_FEATURES, Row, apart, resident_peak, run_stage, write_letor
from ltrscale import storage
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.letor import read_letor
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.processor import cpu_seconds

_LISTS_OF_50_MB, _LISTS_OF_500_MB = 400, 4_000
_PARSED_LISTS, _ROUNDS = 160, 5


def bench_prepare_memory() -> Iterator[Row]:
    """Prepare LETOR text of about 50 and 500 MB, one process each, and compare their peak resident memory."""
    with storage.scratch.directory() as folder:
        small, large = (
            _peak_of_prepare(folder / str(groups), groups) for groups in (_LISTS_OF_50_MB, _LISTS_OF_500_MB)
        )
    note = f"{_LISTS_OF_50_MB} and {_LISTS_OF_500_MB} web search lists, {N_FEATURES} features, one period"
    yield Row.memory("prepare: peak memory, an input 10 times larger", large, small, goal=1.2, note=note)


def _peak_of_prepare(folder: Path, groups: int) -> int:
    """Peak resident bytes, including imports, of a process that prepares this number of groups."""
    folder.mkdir()
    write_letor(folder / "log.txt", groups)
    peak = apart(_prepare, str(folder))
    (folder / "log.txt").unlink()
    return peak


def _prepare(folder: str) -> int:
    config = PrepareConfig.model_validate({"inputs": f"{folder}/log.txt", "source": {"kind": "letor"}})
    run_stage(PrepareJob(out=f"{folder}/out", prepare=config))
    return resident_peak()


def bench_letor() -> Iterator[Row]:
    """Parse an MSLR-like file with our reader in turns with XGBoost's, then with scikit-learn's."""
    with storage.scratch.directory() as folder:
        path = folder / "letor.txt"
        n = write_letor(path, _PARSED_LISTS)

        def parse() -> None:
            rows = sum(len(block) for block in read_letor(str(path), n_features=N_FEATURES, dense=True))
            assert rows == n

        def parse_with_xgboost() -> None:
            with xgboost.config_context(verbosity=0):  # it warns that text input will go
                matrix = xgboost.DMatrix(f"{path}?format=libsvm", nthread=1)
            assert (matrix.num_row(), len(matrix.get_uint_info("group_ptr"))) == (n, _PARSED_LISTS + 1)

        def parse_with_sklearn() -> None:
            features_NF, *_ = load_svmlight_file(str(path), dtype=np.float32, query_id=True)
            assert features_NF.shape[0] == n

        for peer, goal, work in (("XGBoost", 1, parse_with_xgboost), ("scikit-learn", 6, parse_with_sklearn)):
            ours_s, peer_s = cpu_seconds(parse, work, repeats=_ROUNDS)
            note = f"{n:,} documents, {N_FEATURES} features, plain text"
            yield Row.speed(f"LETOR text against {peer}", n, ours_s, peer_s, goal=goal, note=note)


_QUERIES, _ITEMS = 10_000, 20
_NUMBERS = tuple(f"f{i}" for i in range(10))
_CATEGORIES = ("brand", "shelf")
_COLUMNS = {"query": "query", "item": "item", "label": "label", "features": _NUMBERS, "categorical": _CATEGORIES}
_TURNS = 3


def bench_items(queries: int = _QUERIES) -> Iterator[Row]:
    """Prepare logs with a row an item and let DuckDB write the same lists: Parquet, CSV, and rows of queries apart."""
    with storage.scratch.directory() as folder:
        rows = _log_rows(queries)
        apart_N = np.random.default_rng(1).permutation(len(rows))
        for name, table in (("runs", rows), ("apart", rows.take(pa.array(apart_N)))):
            pq.write_table(table, folder / f"{name}.parquet")
        csv.write_csv(rows, folder / "runs.csv")
        yield _against_duckdb(folder, "runs.parquet", len(rows), "Parquet")
        yield _against_duckdb(folder, "runs.csv", len(rows), "CSV")
        yield _against_duckdb(folder, "apart.parquet", len(rows), "Parquet, rows of a query apart (`sort`)")


def _log_rows(queries: int) -> pa.Table:
    """The rows of a log, those of a query together."""
    rng, n = np.random.default_rng(0), queries * _ITEMS
    items_N = rng.permuted(np.tile(np.arange(100, 100 + _ITEMS), (queries, 1)), axis=1).ravel()
    brands = pa.array([f"brand {i}" for i in range(500)])
    columns = {
        "query": pa.array(np.repeat(np.arange(queries), _ITEMS)).cast(pa.string()),
        "item": pa.array(items_N).cast(pa.string()),
        "label": pa.array(rng.integers(0, 5, n)),
        **{name: pa.array(rng.lognormal(size=n).round(4)) for name in _NUMBERS},
        "brand": brands.take(pa.array(rng.integers(0, len(brands), n))),
        "shelf": pa.array(rng.integers(0, 40, n)),
    }
    return pa.table(columns)


def _against_duckdb(folder: Path, file: str, n: int, what: str) -> Row:
    path, turn = folder / file, count()
    source = {"kind": "items", "columns": _COLUMNS}
    config = PrepareConfig.model_validate({"inputs": str(path), "source": source, "sort": file.startswith("apart")})
    codes = [f"(hash({name}) >> 40)::FLOAT" for name in _CATEGORIES]
    features = ", ".join([*(f"{name}::FLOAT" for name in _NUMBERS), *codes])  # list by list, which is its fastest way
    lists = f"list(item) AS doc_ids, flatten(list([{features}])) AS features, list(label::FLOAT) AS labels"
    types = {".csv": ", types = {'query': 'VARCHAR', 'item': 'VARCHAR'}"}.get(path.suffix, "")
    grouped = f"SELECT query, {lists} FROM read_{path.suffix[1:]}('{path}'{types}) GROUP BY query"

    def ours() -> None:
        out = f"{folder}/{next(turn)}"
        run_stage(PrepareJob(out=out, prepare=config))
        assert open_dataset(out).manifest.counts().documents == n

    def peer() -> None:
        with duckdb.connect(config={"threads": 1}) as connection:
            connection.sql(f"COPY ({grouped}) TO '{folder}/{next(turn)}.parquet' (COMPRESSION zstd)")

    ours_s, peer_s = cpu_seconds(ours, peer, repeats=_TURNS)
    name = f"prepare items / DuckDB: {what}"
    note = f"{n:,} rows, {len(_NUMBERS)} numbers, {len(_CATEGORIES)} categories; ours with checks, sums, hashes"
    return Row.speed(name, n, ours_s, peer_s, goal=0.5, what="rows", note=note)
