"""Columns that come and go: old files stay as they are, and all is as if missing values had been stored."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preparing import prepare

from ltrscale import bundle, storage
from ltrscale.data.dataset.disjoint import equal_periods
from ltrscale.data.dataset.manifest import Dataset, Lacking, open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits, SplitsWithTest
from ltrscale.data.stream.batches import iterate
from ltrscale.derive.rewrite import GroupWriter, read_groups
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.training.finetune import FinetuneConfig, FinetuneJob
from ltrscale.trees.configs import LightGBMConfig
from ltrscale.trees.gbdt import GBDTJob

ALWAYS, LATE = ("f1", "brand"), ("f1", "f2", "brand", "shop")
WEEKS = {"2026-W01": ALWAYS, "2026-W02": LATE, "2026-W03": ("f2", "shop"), "2026-W04": LATE}
"""The columns of each week: some come, some go, and all come again."""


def write_week(folder: Path, week: str, names: Sequence[str], optional: bool = False) -> PrepareConfig:
    """A week's rows, and how to add them; `optional` also names columns that it lacks."""
    rng, rows = np.random.default_rng(int(week[-2:])), []
    for query in range(30):
        for i in range(6):
            values = {"f1": rng.normal(), "f2": rng.integers(9), "brand": f"b{i % 3}", "shop": f"s{rng.integers(3)}"}
            label = float(values["f1"] > 0)
            own = {name: values[name] for name in names}
            rows.append({"q": f"{week}-{query}", "d": f"d{i}", "y": label, "week": week, **own})
    path = folder / f"{week}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    used = LATE if optional else names
    columns = {
        "query": "q",
        "item": "d",
        "label": "y",
        "period_column": "week",
        "features": [name for name in used if name.startswith("f")],
        "categorical": [name for name in used if not name.startswith("f")],
        "optional": [name for name in LATE if name not in names] if optional else [],
    }
    values = {"inputs": str(path), "source": {"kind": "items", "columns": columns}, "add": True}
    return PrepareConfig.model_validate(values)


def made(folder: Path, name: str, *, optional: bool = False) -> Dataset:
    """A data set of all weeks, one after the other."""
    for week, names in WEEKS.items():
        dataset = prepare(write_week(folder, week, names, optional), str(folder / name))
    return dataset


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Dataset]:
    """The same weeks, as they come, and with missing values stored."""
    folder = tmp_path_factory.mktemp("columns")
    return made(folder, "late"), made(folder, "stored", optional=True)


def values_of(dataset: Dataset, names: Sequence[str] = ()) -> dict[str, list[np.ndarray]]:
    """The features of each period, with the columns in the order of their names."""
    found = {}
    for period in dataset.manifest.periods:
        selection = select(Split(data=(dataset.url,), periods=(period,)), labelled=False)
        order = sorted(names or [feature.name for feature in selection.features])
        selection = selection.serving([f for n in order for f in selection.features if f.name == n], whose="test")
        found[period] = [groups.features_NF.numpy() for groups in iterate(selection)]
    return found


@pytest.mark.slow
def test_files_of_earlier_periods_stay_byte_for_byte(tmp_path: Path) -> None:
    out, before = str(tmp_path / "out"), dict[str, str]()
    for week, names in WEEKS.items():
        dataset = prepare(write_week(tmp_path, week, names), out)
        assert all(storage.sha256(tmp_path / "out" / path) == sha256 for path, sha256 in before.items())
        before = dict(zip(dataset.manifest.files.paths, dataset.manifest.files.sha256, strict=True))
    assert [feature.name for feature in dataset.manifest.features] == ["f1", "brand", "f2", "shop"]
    assert dataset.manifest.lacking == (
        Lacking(features=("f2", "shop"), periods=("2026-W01",)),
        Lacking(features=("f1", "brand"), periods=("2026-W03",)),
    )


@pytest.mark.slow
def test_a_data_set_without_such_periods_does_not_mention_them(tmp_path: Path) -> None:
    prepare(write_week(tmp_path, "2026-W01", ALWAYS), str(tmp_path / "out"))
    prepare(write_week(tmp_path, "2026-W02", ALWAYS), str(tmp_path / "out"))
    assert "lacking" not in (storage.read_manifest(str(tmp_path / "out")) or {})


@pytest.mark.slow
def test_all_readers_see_missing_values(both: tuple[Dataset, Dataset]) -> None:
    late, stored = both
    for names in ((), ("f2",), ("f1", "shop")):
        for period, batches in values_of(late, names).items():
            for ours, theirs in zip(batches, values_of(stored, names)[period], strict=True):
                np.testing.assert_array_equal(ours, theirs)
    blocks = [np.concatenate([block.features_NF for block in read_groups(d, periods=d.manifest.periods)]) for d in both]
    order = [[f.name for f in late.manifest.features].index(f.name) for f in stored.manifest.features]
    np.testing.assert_array_equal(blocks[0][:, order], blocks[1])


@pytest.mark.slow
def test_the_manifest_counts_missing_values(both: tuple[Dataset, Dataset]) -> None:
    by_name = [dict(zip((f.name for f in d.manifest.features), d.manifest.summaries, strict=True)) for d in both]
    for name in LATE:
        ours, theirs = (each[name].model_dump(exclude_none=True) for each in by_name)
        assert ours == pytest.approx(theirs, rel=1e-12)
    assert both[0].manifest.categories == both[1].manifest.categories
    assert both[0].manifest.raw is not None
    assert both[0].manifest.raw.reads.keys() >= {*LATE}


def test_a_period_keeps_its_identity_but_for_what_it_lacks(both: tuple[Dataset, Dataset]) -> None:
    late = both[0]
    manifest = late.manifest
    other = manifest.model_validate({**manifest.model_dump(), "lacking": manifest.lacking[:1]})
    assert other.hash_of(["2026-W01", "2026-W02"]) == manifest.hash_of(["2026-W01", "2026-W02"])
    assert other.hash_of(["2026-W03"]) != manifest.hash_of(["2026-W03"])
    assert other.hashes["2026-W03"] != manifest.hashes["2026-W03"]


def test_periods_with_equal_lists_of_other_columns_are_no_copies(tmp_path: Path) -> None:
    rows = pa.table({"q": [f"q{i // 2}" for i in range(40)], "y": [float(i % 2) for i in range(40)]})
    for week, name in (("2026-W01", "a"), ("2026-W02", "b")):
        values = [float(i) for i in range(40)]
        ids = pa.array([f"{week}-{q}" for q in rows["q"].to_pylist()])
        pq.write_table(rows.set_column(0, "q", ids).append_column(name, [values]), tmp_path / f"{name}.parquet")
        source = {"kind": "items", "columns": {"query": "q", "label": "y", "features": [name]}}
        inputs = {"path": str(tmp_path / f"{name}.parquet"), "period": week}
        config = PrepareConfig.model_validate({"inputs": [inputs], "source": source, "add": True})
        dataset = prepare(config, str(tmp_path / "out"))
    assert list(equal_periods([(dataset, dataset.manifest.periods)])) == []


@pytest.fixture(scope="module")
def copy(both: tuple[Dataset, Dataset], tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The weeks as they come, rewritten, which stores missing values in the same places."""
    late, url = both[0], str(tmp_path_factory.mktemp("copy"))
    with storage.Commit(url) as commit:
        writer = GroupWriter(commit, late, renumber=False)
        for block in read_groups(late, periods=late.manifest.periods):
            writer.add(block)
        writer.finish(late.manifest.accounting, {})
    return open_dataset(url)


@pytest.mark.slow
def test_a_data_set_that_is_made_of_it_stores_missing_values(both: tuple[Dataset, Dataset], copy: Dataset) -> None:
    assert copy.manifest.lacking == ()
    for period, batches in values_of(copy).items():
        for ours, theirs in zip(batches, values_of(both[0])[period], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def splits_of(dataset: Dataset) -> Splits:
    """Two weeks to train on, of which one lacks features, one to validate and one to test."""
    train, validation, test = ("2026-W01", "2026-W02"), ("2026-W04",), ("2026-W03",)
    of = {"train": train, "validation": validation, "test": test}
    return SplitsWithTest(**{name: Split(data=(dataset.url,), periods=periods) for name, periods in of.items()})


@pytest.mark.slow
def test_training_equals_that_on_stored_missing_values(
    both: tuple[Dataset, Dataset], copy: Dataset, tmp_path: Path
) -> None:
    stream = {"shuffle": False, "docs_per_batch": 256}
    finetuning = FinetuneConfig.model_validate({"epochs": 2, "stream": stream})
    for name, dataset in (("late", both[0]), ("copy", copy)):
        splits = splits_of(dataset)
        trees = LightGBMConfig(num_trees=5, num_threads=1)
        GBDTJob(out=str(tmp_path / f"{name}-trees"), splits=splits, gbdt=trees).run()
        FinetuneJob(out=str(tmp_path / f"{name}-network"), splits=splits, finetune=finetuning).run()
    for file in ("trees/model.txt", "network/weights.safetensors"):
        assert (tmp_path / f"late-{file}").read_bytes() == (tmp_path / f"copy-{file}").read_bytes()
    ours, theirs = (bundle.load(str(tmp_path / f"{name}-trees")) for name in ("late", "copy"))
    assert (ours.present, theirs.present) == ({"f2": 0.5, "shop": 0.5}, {})
    assert "shop: in 50% of the training periods" in (tmp_path / "late-trees" / "README.md").read_text()
    assert "present" not in (tmp_path / "copy-trees" / "config.json").read_text()
    models = {"trees": (str(tmp_path / "late-trees"),)}
    evaluation = EvaluateConfig(models=models, baseline=None, splits=splits_of(both[0]), by_period=True)
    EvaluateJob(out=str(tmp_path / "evaluation"), evaluate=evaluation).run()
    report = (tmp_path / "evaluation" / "report.md").read_text()
    assert "shop is not in the files of 50% of the training periods: a missing value in every document." in report
    assert "brand is not in the files of the test periods 2026-W03: a missing value in every document." in report
    assert "not in its files" in report


def test_a_number_that_becomes_text_is_not_dropped_by_a_pattern_for_numbers(tmp_path: Path) -> None:
    source = {"kind": "items", "columns": {"query": "q", "label": "y", "features": ["*"]}}
    for week, values in (("2026-W01", [1.0, 2.0]), ("2026-W02", ["a", "b"])):
        table = pa.table({"q": [week] * 2, "y": [0.0, 1.0], "f1": [1.0, 2.0], "f2": values})
        pq.write_table(table, tmp_path / f"{week}.parquet")
        inputs = [{"path": str(tmp_path / f"{week}.parquet"), "period": week}]
        config = PrepareConfig.model_validate({"inputs": inputs, "source": source, "add": True})
        if week == "2026-W01":
            prepare(config, str(tmp_path / "out"))
    with pytest.raises(InputError, match="column 'f2' is string, and numeric until period '2026-W01'"):
        prepare(config, str(tmp_path / "out"))
    columns = {**source["columns"], "exclude": ["f2"]}
    config = config.replace(source=config.source.replace(columns=columns))
    assert prepare(config, str(tmp_path / "out")).manifest.stored["2026-W02"][0].name == "f1"


def test_a_vector_keeps_its_length(tmp_path: Path) -> None:
    for week, size in (("2026-W01", 4), ("2026-W02", 3)):
        pq.write_table(
            pa.table({"q": [week] * 2, "y": [0.0, 1.0], "emb": [[0.5] * size] * 2}), tmp_path / f"{week}.parquet"
        )
        source = {"kind": "items", "columns": {"query": "q", "label": "y", "vectors": {"emb": size}}}
        inputs = [{"path": str(tmp_path / f"{week}.parquet"), "period": week}]
        config = PrepareConfig.model_validate({"inputs": inputs, "source": source, "add": True})
        if size == 4:
            prepare(config, str(tmp_path / "out"))
    with pytest.raises(
        InputError,
        match=r"column 'emb\.0' is one of 3, with other places than before, and numeric until",
    ):
        prepare(config, str(tmp_path / "out"))
