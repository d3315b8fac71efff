"""What is erased is gone, and nothing else; what learnt from it is named."""

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from killing import killed_before
from nightly import nightly
from preparing import prepare, rows_of

from ltrscale import storage
from ltrscale.data.columns import texts
from ltrscale.data.dataset import writer
from ltrscale.data.dataset.manifest import Accounting, Dataset, open_dataset
from ltrscale.data.dataset.preflight import examine
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.derive.erase import EraseJob, made_from_erased
from ltrscale.derive.relabel import RelabelConfig, RelabelJob
from ltrscale.derive.rewrite import GroupWriter, read_groups
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.scoring.score import ScoreJob
from ltrscale.trees.configs import LightGBMConfig
from ltrscale.trees.gbdt import GBDTJob

WEEKS = ("2026-W01", "2026-W02", "2026-W03")


def write_week(folder: Path, week: str, compression: str = "zstd") -> PrepareConfig:
    """A week's rows of some users, of which one has a category and rejected rows of their own."""
    rng, rows = np.random.default_rng(int(week[-2:])), []
    for query in range(24):
        for i in range(6):
            user = query % 8 if week == "2026-W02" else 3 + query % 5
            row = {
                "q": f"{week}-{query}",
                "d": f"doc{(query + i) % 20}",
                "y": float(i % 3 if query % 4 else -1 if not query else 0),
            }
            row |= {"f": rng.normal() + user, "c": f"of-user-{user}", "user": user, "week": week, "n": float(i)}
            rows.append(row | ({} if week == "2026-W01" else {"late": rng.normal()}))
    path = folder / f"{week}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    columns = {"query": "q", "item": "d", "label": "y", "period_column": "week", "meta": ["user"], "positions": "n"}
    columns |= {"features": ["f", *([] if week == "2026-W01" else ["late"])], "categorical": ["c"]}
    source = {"kind": "items", "columns": columns}
    values = {"inputs": str(path), "source": source, "add": True, "compression": compression, "max_rejected": 0.9}
    return PrepareConfig.model_validate(values)


def made(folder: Path, name: str = "data", compression: str = "zstd") -> Dataset:
    for week in WEEKS:
        dataset = prepare(write_week(folder, week, compression), str(folder / name))
    return dataset


def erase(dataset: Dataset, column: str, ids: list[str], under: tuple[str, ...] = ()) -> Dataset:
    path = Path(dataset.url).parent / "ids.txt"
    path.write_text("\n".join(ids) + "\n")
    EraseJob(data=dataset.url, ids=str(path), column=column, under=under).run()
    return open_dataset(dataset.url)


def without(rows: list[dict[str, Any]], column: str, ids: list[str], features: dict[str, int]) -> list[dict[str, Any]]:
    """The oracle: rows of groups, filtered one by one."""
    left = []
    for row in rows:
        if column != "doc_ids":
            left += [] if str(row[column]) in ids else [row]
        elif kept := [i for i, name in enumerate(row["doc_ids"]) if name not in ids]:
            n = features[row["period"]]
            of_features = [value for i in kept for value in row["features"][i * n : (i + 1) * n]]
            lists = {
                key: [row[key][i] for i in kept] for key in ("doc_ids", "labels", "positions") if row[key] is not None
            }
            left.append({**row, **lists, "features": of_features})
    return left


CASES = {
    "queries": ("query_id", ["2026-W01-3", "2026-W02-5", "nobody"]),
    "a user": ("meta_user", ["1"]),
    "documents": ("doc_ids", ["doc3", "doc4", "doc5", "doc6", "doc7", "doc8"]),
}


BY_DAY = {("queries", "none"), ("a user", "zstd"), ("documents", "lz4_bytes")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "compression"),
    [pair if pair in BY_DAY else nightly(*pair) for pair in itertools.product(CASES, ("zstd", "lz4_bytes", "none"))],
)
def test_what_is_read_is_as_if_filtered(tmp_path: Path, case: str, compression: str) -> None:
    column, ids = CASES[case]
    before = made(tmp_path, compression=compression)
    plain = made(tmp_path, "plain")
    features = {period: len(before.manifest.stored.get(period, before.manifest.features)) for period in WEEKS}
    expected = without(rows_of(plain), column, ids, features)
    assert len(expected) != len(rows_of(before)) or column == "doc_ids"
    after = erase(before, column, ids)
    assert rows_of(erase(plain, column, ids)) == expected
    ours, theirs = list(read_groups(after, periods=WEEKS)), list(read_groups(open_dataset(plain.url), periods=WEEKS))
    np.testing.assert_array_equal(ours[0].features_NF, theirs[0].features_NF)
    assert examine(after, after.manifest.files, "content", lambda *_: None)[0] == ()
    types = {pq.read_schema(f"{after.url}/{file.path}").field("features").type for file in after.manifest.files}
    assert types == {pa.large_binary() if compression == "lz4_bytes" else types.copy().pop()}
    codecs = {
        pq.read_metadata(f"{after.url}/{file.path}").row_group(0).column(0).compression for file in after.manifest.files
    }
    assert len(codecs) == 1


@pytest.mark.slow
def test_only_affected_files_are_written(tmp_path: Path) -> None:
    before = made(tmp_path)
    stamps = {file.path: (tmp_path / "data" / file.path).stat().st_mtime_ns for file in before.manifest.files}
    after = erase(before, "meta_user", ["1"])  # who came in the second week alone
    same = {*before.manifest.files.paths} & {*after.manifest.files.paths}
    assert {path.partition("/")[0] for path in stamps.keys() - same} == {"period=2026-W02"}
    assert all((tmp_path / "data" / path).stat().st_mtime_ns == stamps[path] for path in same)
    assert {*map(str, (tmp_path / "data").glob("period=*/*"))} == {
        f"{after.url}/{p}" for p in after.manifest.files.paths
    }
    hashes = [dataset.manifest.hashes for dataset in (before, after)]
    assert [hashes[0][week] == hashes[1][week] for week in WEEKS] == [True, False, True]


@pytest.mark.slow
def test_counts_are_of_what_is_left(tmp_path: Path) -> None:
    before = made(tmp_path)
    after = erase(before, "meta_user", ["1", "2"])
    with storage.Commit(str(tmp_path / "copy")) as commit:
        again = GroupWriter(commit, after, renumber=False)
        for block in read_groups(after, periods=WEEKS):
            again.add(block)
        copy = again.finish(Accounting(), {})
    for name in ("label_counts", "grouped", "token_summaries"):
        assert getattr(after.manifest, name) == getattr(copy, name)
    for ours, theirs in zip(after.manifest.summaries, copy.summaries, strict=True):
        assert ours.model_dump(exclude_none=True) == pytest.approx(theirs.model_dump(exclude_none=True), rel=1e-12)
    assert before.manifest.categories["c"].keys() - after.manifest.categories["c"].keys() == {"of-user-1", "of-user-2"}
    counts, now, then = after.manifest.counts(), after.manifest.accounting, before.manifest.accounting
    assert (now.rows_kept, now.groups_kept) == counts[1::-1]
    assert now.rows_in == then.rows_in == now.rows_kept + now.rows_rejected + now.rows_merged
    assert now.rules["erased"] == then.rows_kept - now.rows_kept
    assert after.manifest.erased is not None
    assert after.manifest.erased.periods == ("2026-W02",)
    assert after.manifest.lacking == before.manifest.lacking


@pytest.mark.slow
def test_no_id_is_left_anywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = made(tmp_path)
    assert before.manifest.quarantine
    caplog.set_level(logging.INFO, "ltrscale")
    ids = ["2026-W01-0", "2026-W01-3"]
    hashes = {file.sha256 for file in before.manifest.query_ids}
    after = erase(before, "query_id", ids)
    assert "erased 6 documents, and with them 1 whole query groups, from 1 of 3 files" in caplog.text
    assert not any(each in caplog.text for each in ids)
    files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert not any(each.encode() in path.read_bytes() for path in files for each in ids)
    for path in (path for path in files if path.suffix == ".parquet"):
        for column in pq.read_table(path, partitioning=None).columns:
            assert pa.types.is_nested(column.type) or not {*ids} & {*texts(column.combine_chunks())[0].to_pylist()}
    assert {file.sha256 for file in after.manifest.query_ids} != hashes
    assert not (tmp_path / "data" / "quarantine").exists()


@pytest.mark.slow
def test_what_prepare_made_first_of_raw_rows_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, count = tmp_path / "log.parquet", {"kind": "count", "by": "d"}
    row = {"act": "shown", "time": 10**9, "y": 1.0, "f": 0.5, "s": "s"}
    pq.write_table(pa.Table.from_pylist([{**row, "q": f"q{i}", "d": f"d{i}"} for i in range(3)]), log)
    columns = {"query": "q", "item": "d", "time": "time", "label": "y", "features": ["f"]}
    items = {"kind": "items", "columns": columns, "history": {"features": {"n": count}}}
    table = {"time": "time", "item": "d", "every": "shown", "query": "q", "columns": ["f"]}
    columns = {"query": "query", "item": "item", "time": "time", "label": "grade", "features": ["f"]}
    events = {"kind": "events", "tables": [table], "columns": columns}
    for source, suffix, stage in ((items, "history", "history"), (events, "rows", "event_rows")):
        out = str(tmp_path / stage)
        data = prepare(PrepareConfig.model_validate({"inputs": str(log), "source": source}), out)
        named = f"{out}-{suffix} ({stage}) has rows that {out} was made of, with their ids; delete it"
        erase(data, "query_id", ["nobody"])
        assert named not in caplog.text
        erase(data, "query_id", ["q1"])
        assert named in caplog.text


@pytest.mark.slow
def test_the_same_again_does_nothing(tmp_path: Path) -> None:
    after = erase(made(tmp_path), "meta_user", ["1"])
    manifest = (tmp_path / "data" / "manifest.json").read_bytes()
    assert erase(after, "meta_user", ["1"]) == after
    assert (tmp_path / "data" / "manifest.json").read_bytes() == manifest


@pytest.mark.slow
def test_rows_do_not_come_back_and_more_may_be_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_FEW_FILES", 1)
    configs = [write_week(tmp_path, week) for week in WEEKS]
    for config in configs:
        before = prepare(config, str(tmp_path / "data"))
    assert before.manifest.parts
    after = erase(before, "query_id", ["2026-W03-23", "2026-W03-22"])
    for config in configs:
        assert prepare(config, after.url) == after  # it is up to date
    more = prepare(write_week(tmp_path, "2026-W04"), after.url)
    gids = [row["gid"] for row in rows_of(more)]
    assert len({*gids}) == len(gids)
    assert more.manifest.erased == after.manifest.erased
    assert len(erase(more, "query_id", ["2026-W04-5"]).manifest.periods) == 4


@pytest.mark.slow
def test_a_file_or_a_period_of_which_nothing_is_left_is_gone(tmp_path: Path) -> None:
    before = made(tmp_path)
    after = erase(before, "query_id", [f"2026-W01-{i}" for i in range(24)])
    assert after.manifest.periods == ["2026-W02", "2026-W03"]
    assert after.manifest.lacking == ()
    everything = [f"{week}-{i}" for week in WEEKS for i in range(24)]
    with pytest.raises(InputError, match="nothing would be left of it; delete the directory instead"):
        erase(after, "query_id", everything)
    assert open_dataset(after.url) == after


@pytest.mark.slow
def test_what_cannot_be_erased_is_one_line(tmp_path: Path) -> None:
    before = made(tmp_path)
    for column in ("meta_nobody", "features", "labels"):
        with pytest.raises(InputError, match=f"no ids are in a column '{column}'; name query_id, doc_ids or a meta_"):
            erase(before, column, ["1"])
    with pytest.raises(InputError, match=r"ids\.txt: there are no ids in it; write one in a line"):
        erase(before, "query_id", [])
    assert open_dataset(before.url) == before


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, nightly(1)])
def test_killed_anywhere_it_leaves_the_old_or_the_new_data_set(tmp_path: Path, every: int) -> None:
    before = made(tmp_path)
    old = rows_of(before)
    expected = [row for row in old if str(row["meta_user"]) != "1"]
    (tmp_path / "ids.txt").write_text("1\n")
    job, kept = EraseJob(data=before.url, ids=str(tmp_path / "ids.txt"), column="meta_user"), tmp_path / "kept"
    storage.filesystem(str(tmp_path))[0].copy(before.url, str(kept), recursive=True)
    change = 0
    while killed_before(change, Path(before.url), job.run):
        assert rows_of(open_dataset(before.url)) in (old, expected)
        job.run()
        assert rows_of(open_dataset(before.url)) == expected
        paths = {f"{before.url}/{path}" for path in open_dataset(before.url).manifest.files.paths}
        assert {*map(str, Path(before.url).glob("period=*/*"))} == paths
        storage.filesystem(before.url)[0].rm(before.url, recursive=True)
        storage.filesystem(before.url)[0].copy(str(kept), before.url, recursive=True)
        change += every
    assert change > 5


def splits(data: str, *periods: str) -> Splits:
    train, validation = (Split(data=(data,), periods=(period,)) for period in periods)
    return Splits(train=train, validation=validation)


@pytest.mark.slow
def test_what_learnt_from_it_is_named_until_it_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, runs = made(tmp_path), tmp_path / "runs"
    trees = LightGBMConfig(num_trees=2, num_threads=1)
    one = GBDTJob(out=str(runs / "one"), splits=splits(before.url, "2026-W01", "2026-W02"), gbdt=trees)
    other = GBDTJob(out=str(runs / "other"), splits=splits(before.url, "2026-W01", "2026-W03"), gbdt=trees)
    steps = RelabelConfig.model_validate({"steps": [{"kind": "labelled_fraction", "fraction": 0.5}]})
    derived = RelabelJob(out=str(runs / "relabelled"), data=before.url, relabel=steps)
    scores = ScoreJob(out=str(runs / "scores"), data=before.url, bundle=str(runs / "other"), periods=("2026-W02",))
    heir = ScoreJob(out=str(runs / "heir"), data=before.url, bundle=str(runs / "one"), periods=("2026-W03",))
    jobs = (one, other, derived, scores, heir)
    for job in jobs:
        job.run()
    after = erase(before, "meta_user", ["1"], under=(str(runs),))
    names = {"one": "train_gbdt", "relabelled": "relabel", "scores": "score", "heir": "score"}
    found = {Path(url).name: stage for url, stage in made_from_erased(after, [str(runs)]).items()}
    assert found == names
    said = [message for message in caplog.messages if "has erased rows or learnt from them" in message]
    assert len(said) == 4
    assert erase(after, "meta_user", ["1"]) == after  # killed before it named them, it would name them now
    for job in jobs:
        job.run()
    assert made_from_erased(after, [str(runs)]) == {}
