"""The metrics of one bundle on the test groups, against the evaluation of the same bundle."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from linear_teacher import linear_teacher
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.split import Splits, SplitsWithTest
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.evaluate import evaluate
from ltrscale.evaluation.measure.settings import EvaluateConfig, EvaluateSettings
from ltrscale.evaluation.studies import measured as module
from ltrscale.evaluation.studies.measured import (
    Measured,
    Measurement,
    TestedOn,
    TestGroups,
    read_outliers,
    read_values,
)

Groups = list[tuple[NDArray[np.float32], NDArray[np.float32] | None]]
WriteDataset = Callable[[Mapping[str, Groups], list[Feature]], str]
SETTINGS = EvaluateSettings.model_validate(
    {"baseline": None, "docs_per_batch": 40, "outliers": {"known": {"x": {"at_least": 2.0}}, "gap": None}}
)


@pytest.fixture(scope="module")
def data(write_dataset: WriteDataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Splits, str]:
    """Groups of which a third have no label and another third no relevant document, and a model."""
    rng = np.random.default_rng(0)

    def groups(count: int) -> Groups:
        lengths = rng.integers(1, 9, count)
        labels = [None if i % 3 == 0 else rng.integers(0, 3, n) * (i % 3 == 1) for i, n in enumerate(lengths)]
        features = [rng.normal(size=(n, 2)).astype(np.float32) for n in lengths]
        return [(x, None if y is None else y.astype(np.float32)) for x, y in zip(features, labels, strict=True)]

    url = write_dataset({period: groups(60) for period in "abc"}, [Feature(name="x"), Feature(name="y")])
    named = {"train": "a", "validation": "b", "test": "c"}
    splits = Splits.model_validate({name: {"data": url, "periods": period} for name, period in named.items()})
    return splits, linear_teacher(str(tmp_path_factory.mktemp("model") / "teacher"), url, [1.0, -2.0])


def measure(url: str, splits: Splits, out: Path) -> None:
    tested = SplitsWithTest.from_splits(splits)
    Measurement(out=str(out), bundle=url, splits=tested, evaluate=SETTINGS, threads=1).run()


def values_of(url: str, splits: Splits, out: Path) -> tuple[list[int], NDArray[np.float64], Measured]:
    measure(url, splits, out)
    found = Measured.read(str(out))
    gids_Q, values_QM = read_values(str(out), found.metrics)
    return gids_Q.tolist(), values_QM, found


@pytest.mark.slow
def test_figures_are_those_of_an_evaluation(data: tuple[Splits, str], tmp_path: Path) -> None:
    splits, url = data
    config = EvaluateConfig(**SETTINGS.model_dump(), models={"model": (url,)}, splits=splits)
    evaluation = evaluate(config, str(tmp_path / "evaluation"), made_by={})
    gids, values_QM, found = values_of(url, splits, tmp_path / "measured")
    rows = {row["gid"]: row for row in pq.read_table(tmp_path / "evaluation" / "groups.parquet").to_pylist()}
    assert set(gids) == {gid for gid, row in rows.items() if row["ndcg@5"] is not None}
    assert 10 <= len(gids) <= 20, "a third of the groups"
    for gid, values_M in zip(gids, values_QM, strict=True):
        for metric, value in zip(found.metrics, values_M, strict=True):
            expected = rows[gid][metric]
            assert value == (
                pytest.approx(expected, abs=1e-12, nan_ok=True)
                if expected is not None
                else pytest.approx(np.nan, nan_ok=True)
            )
    assert found.documents == sum(rows[gid]["documents"] for gid in gids)

    TestGroups(out=str(tmp_path / "test"), splits=SplitsWithTest.from_splits(splits), evaluate=SETTINGS).run()
    assert TestedOn.read(str(tmp_path / "test")).test == evaluation.test
    outliers = read_outliers(str(tmp_path / "test"))
    assert outliers == {gid: "outliers" in row["slices"] for gid, row in rows.items()}
    assert 0 < sum(outliers.values()) < len(outliers)


def test_groups_from_memory_give_the_same_figures(
    data: tuple[Splits, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits, url = data
    module._kept.clear()
    read = values_of(url, splits, tmp_path / "read")
    monkeypatch.setattr(module, "iterate", None)  # nothing can be read now
    kept = values_of(url, splits, tmp_path / "kept")
    assert kept[0] == read[0]
    np.testing.assert_array_equal(kept[1], read[1])
    with pytest.raises(TypeError):  # other groups are not taken from memory
        measure(url, splits.replace(validation=splits.test, test=splits.validation), tmp_path / "no")


def test_groups_that_are_too_large_for_memory_are_read_again(
    data: tuple[Splits, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits, url = data
    module._kept.clear()
    monkeypatch.setattr(module, "_KEPT_BYTES", 100)
    first, second = (values_of(url, splits, tmp_path / name) for name in "ab")
    assert not module._kept
    assert first[0] == second[0]
    np.testing.assert_array_equal(first[1], second[1])


def test_test_groups_without_relevance_are_an_error(write_dataset: WriteDataset, tmp_path: Path) -> None:
    nothing = [(np.ones((3, 1), np.float32), np.zeros(3, np.float32))] * 4
    some = [(np.ones((3, 1), np.float32), np.arange(3, dtype=np.float32))] * 4
    url = write_dataset({"a": some, "b": some, "c": nothing}, [Feature(name="x")])
    teacher = linear_teacher(str(tmp_path / "teacher"), url, [1.0])
    splits = Splits.model_validate(
        {n: {"data": url, "periods": p} for n, p in zip(("train", "validation", "test"), "abc", strict=True)}
    )
    with pytest.raises(InputError, match="no test group has a relevant document; choose other periods"):
        measure(teacher, splits, tmp_path / "out")
    assert storage.read_manifest(str(tmp_path / "out")) is None
