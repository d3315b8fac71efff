"""Trees on several workers: shares, merged codes, global targets, the trees of one process, a worker that dies."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from labelled_groups import Groups, WriteDataset, read
from shared_cluster import SharedCluster
from small_trainers import grow_trees
from tree_worker_kill import TreesWithKilledWorker

from ltrscale.bundle import Bundle, load
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.row_groups import FileToRead, RowGroup, RowGroups
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Splits
from ltrscale.errors import InputError
from ltrscale.runtime.engine import ray_cluster
from ltrscale.runtime.launch import launch
from ltrscale.runtime.workers import ONE, WorkersConfig
from ltrscale.trees import gbdt
from ltrscale.trees.configs import CatBoostConfig, GBDTConfig, LightGBMConfig, XGBoostConfig
from ltrscale.trees.data import deal
from ltrscale.trees.gbdt import GBDTJob
from ltrscale.trees.library import QuantisedConfig

Kind = Literal["numeric", "categorical"]
TWO = WorkersConfig(number=2, max_failures=1)
PERIODS = 5
GRADES = QuantisedConfig(grades=5, bins="equal_frequency")
# no limit on the documents of a leaf or a category, which LightGBM estimates where documents are spread
LIGHTGBM = LightGBMConfig(
    num_trees=8, num_leaves=8, min_data_in_leaf=1, targets=GRADES, num_threads=1, lambda_l1=0.1, monotone={"x": 1}
)
XGBOOST = XGBoostConfig(
    num_trees=8, max_leaves=8, targets=GRADES, num_threads=1, reg_alpha=0.1, monotone={"x": 1, "z": -1}
)


def selection_of(documents: Sequence[int]) -> Selection:
    row_groups = [RowGroup(FileToRead("file", "p"), i, 1, n, 1, i) for i, n in enumerate(documents)]
    return Selection((), RowGroups.from_iterable(row_groups), "hash", labelled=True)


@given(documents=st.lists(st.integers(0, 50), min_size=1, max_size=30), data=st.data())
def test_each_row_group_is_one_workers_and_documents_are_balanced(documents: list[int], data: st.DataObject) -> None:
    world = data.draw(st.integers(1, len(documents)))
    whole = selection_of(documents)
    shares = [deal(whole, rank=rank, world=world) for rank in range(world)]
    assert sorted(r.index for share in shares for r in share.row_groups) == list(range(len(documents)))
    assert all(share.row_groups for share in shares)
    loads = [sum(max(1, r.documents) for r in share.row_groups) for share in shares]
    assert max(loads) - min(loads) <= max(1, *documents, 1)
    assert sum(share.n_groups for share in shares) == whole.n_groups


def groups_of(rng: np.random.Generator, count: int, *, codes: Sequence[int], shift: float, grades: bool) -> Groups:
    """Groups with integer features, so that each value has its own bin; labels are grades or shifted real numbers."""
    found: Groups = []
    for _ in range(count):
        n = int(rng.integers(2, 15))
        x_LF = np.column_stack([rng.choice(codes, n), rng.integers(0, 40, (n, 3))]).astype(np.float32)
        score_L = x_LF[:, 1] / 40 + (x_LF[:, 0] % 3) / 2 + rng.normal(size=n) / 20
        labels_L = np.clip(np.round(score_L * 3), 0, 4) if grades else score_L + shift
        found.append((x_LF, labels_L.astype(np.float32)))
    return found


@pytest.fixture(scope="module")
def splits_of(write_dataset: WriteDataset) -> Callable[[Kind], Splits]:
    """Training periods of one row group with different scores and codes, which are categories or numbers."""
    rng = np.random.default_rng(0)
    codes = [100_000 + i for i in range(11)]  # some are in the share of one worker alone
    data = {
        f"train-{i}": groups_of(rng, 40 + 15 * i, codes=codes[2 * i : 2 * i + 3], shift=i / 10, grades=False)
        for i in range(PERIODS)
    }
    data |= {name: groups_of(rng, 80, codes=codes, shift=0, grades=True) for name in ("validation", "test")}

    def splits(kind: Kind) -> Splits:
        url = write_dataset(data, [Feature(name="c", kind=kind), *(Feature(name=name) for name in "xyz")])
        periods = {"train": f"train-0..train-{PERIODS - 1}", "validation": "validation", "test": "test"}
        return Splits.model_validate({name: {"data": url, "periods": periods[name]} for name in periods})

    return splits


@pytest.fixture(scope="module")
def splits(splits_of: Callable[[Kind], Splits]) -> Splits:
    return splits_of("numeric")


def train(
    config: GBDTConfig, splits: Splits, out: Path, workers: WorkersConfig
) -> tuple[Bundle, list[Mapping[str, object]]]:
    records: list[Mapping[str, object]] = []
    bundle = grow_trees(config, splits, str(out), report=records.append, workers=workers)
    return bundle, records


def theirs(config: GBDTConfig, records: Sequence[Mapping[str, object]]) -> list[float]:
    """The library's own NDCG after each tree."""
    name = f"validation_ndcg@5_{config.kind}"
    # before the last trees there are those of a start that came to nothing
    of_library = [record for record in records if name in record][-config.num_trees :]
    assert [record["tree"] for record in of_library] == list(range(1, config.num_trees + 1)), "rank 0 alone reports"
    return [float(record[name]) for record in of_library]  # type: ignore[arg-type]


def test_more_workers_than_row_groups_are_refused_before_any_starts(splits: Splits, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train has 5 row groups for 6 workers, .*; lower workers to 5"):
        train(LIGHTGBM, splits, tmp_path, WorkersConfig(number=(2, 6)))


def test_catboost_takes_one_worker(splits: Splits, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="CatBoost trains in one process, not on 2 workers; set workers to 1"):
        train(CatBoostConfig(), splits, tmp_path, TWO)


@pytest.mark.parametrize("config", [LIGHTGBM, XGBOOST], ids=lambda config: config.kind)
def test_unbiased_trees_take_one_worker(splits: Splits, tmp_path: Path, config: GBDTConfig) -> None:
    with pytest.raises(InputError, match=r"^unbiased trees train in one process, not on 2 workers; set workers to 1$"):
        train(config.replace(unbiased=True), splits, tmp_path, TWO)


@pytest.fixture(scope="module")
def cluster(shared_cluster: SharedCluster) -> Iterator[None]:
    """Ray with six logical CPUs."""
    shared_cluster.stop()
    with ray_cluster(6):
        yield


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_two_workers_grow_the_trees_of_one_even_if_one_of_them_dies(
    splits: Splits,
    splits_of: Callable[[Kind], Splits],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """LightGBM on numbers, then XGBoost on categories, on the same workers, because starting workers takes time."""
    with_categories = splits_of("categorical")
    selections = [select(split, labelled=True) for split in (with_categories.train, with_categories.validation)]
    job = GBDTJob(out=str(tmp_path / "xgboost"), splits=with_categories, gbdt=XGBOOST, workers=TWO)
    then = functools.partial(job._grow, *selections, {})
    monkeypatch.setattr(
        gbdt,
        "launch",
        lambda work, **others: launch(TreesWithKilledWorker(str(tmp_path), 1, 3, work=work, then=then), **others),
    )
    with caplog.at_level(logging.WARNING, "ltrscale"):
        by_two, records = train(LIGHTGBM, splits, tmp_path / "lightgbm", TWO)
    assert "rank 1: ActorDiedError" in caplog.text
    monkeypatch.undo()
    check_like_one(LIGHTGBM, splits, by_two, records, tmp_path)
    check_like_one(XGBOOST, with_categories, load(str(tmp_path / "xgboost")), records, tmp_path)


def check_like_one(
    config: GBDTConfig, splits: Splits, by_two: Bundle, records: Sequence[Mapping[str, object]], folder: Path
) -> None:
    by_one, records_of_one = train(config, splits, folder / f"{config.kind}-by-one", ONE)
    assert by_one.metrics["labelled_groups"] == by_two.metrics["labelled_groups"] == 350
    assert theirs(config, records) == pytest.approx(theirs(config, records_of_one), abs=1e-5)
    test = read(splits.test)
    expected_N = by_one.scorer()(test).numpy()
    assert len(np.unique(expected_N)) > 20
    np.testing.assert_allclose(by_two.scorer()(test).numpy(), expected_N, atol=1e-5)
