"""Trees of every library: our validation metric, gains, categories, missing values, repeatability, bad input.

Transforms of labels into targets for trees: laws, and slow oracles.

Students: trees that learn a teacher's scores of all groups, labelled or not.
"""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightgbm as lgb
import numpy as np
import pyarrow as pa
import pytest
import torch
from dataset_columns import add_column
from hypothesis import given
from hypothesis import strategies as st
from labelled_groups import Groups, WriteDataset, mean_ndcg, read, splits_of
from linear_teacher import linear_teacher
from nightly import nightly
from numpy.typing import NDArray
from pydantic import TypeAdapter
from small_trainers import grow_trees

from ltrscale.batch import QueryGroups, to_offsets
from ltrscale.bundle import Bundle
from ltrscale.bundle.views import raw
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.row_groups import RowGroups
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.agreement import kendall_tau
from ltrscale.ranking.metrics import ndcg
from ltrscale.scoring.score import ScoreJob
from ltrscale.trees import data as tree_data
from ltrscale.trees.configs import CatBoostConfig, GBDTConfig, LightGBMConfig, XGBoostConfig
from ltrscale.trees.data import Labelled, _document_numbers, read_labelled
from ltrscale.trees.gbdt import TreesStudent
from ltrscale.trees.library import QuantisedConfig, StandardisedConfig

WEIGHTS = [1.0, -0.7, 100.0]
"""The last feature is the same for all documents of a list: the teacher moves lists as a whole, and far."""
KINDS = ("regression", "lambdarank", "softmax")


def student(kind: str, **trees: object) -> TreesStudent:
    found: TreesStudent = TypeAdapter(TreesStudent).validate_python({"kind": kind, "trees": trees})
    return found


def groups(rng: np.random.Generator, count: int, *, labelled: bool) -> Groups:
    found: Groups = []
    for _ in range(count):
        n = int(rng.integers(2, 14))
        x_LF = np.column_stack([rng.normal(size=(n, 2)), np.full(n, rng.normal())]).astype(np.float32)
        found.append((x_LF, rng.integers(0, 3, n).astype(np.float32) if labelled else None))
    return found


@pytest.fixture(scope="module")
def splits(write_dataset: WriteDataset, tmp_path_factory: pytest.TempPathFactory) -> Splits:
    """Unlabelled training groups and the teacher's scores; all other labels are noise."""
    rng = np.random.default_rng(0)
    sizes = {"train": 300, "validation": 30, "test": 100}
    of_periods = {name: groups(rng, size, labelled=name != "train") for name, size in sizes.items()}
    url = write_dataset(of_periods, [Feature(name=name) for name in "abc"])
    folder = tmp_path_factory.mktemp("teacher")
    teacher = linear_teacher(str(folder / "teacher"), url, WEIGHTS)
    ScoreJob(bundle=teacher, data=url, out=str(folder / "scores")).run()
    named = {name: {"data": url, "periods": name} for name in sizes}
    named["train"]["scores"] = str(folder / "scores")
    return Splits.model_validate(named)


def test_students_of_the_paper_have_two_thousand_trees() -> None:
    for kind in KINDS:
        found = student(kind)
        assert (found.trees.num_trees, found.trees.early_stopping_rounds) == (2_000, None)
        assert student(kind, num_trees=7).trees.objective == kind
        with pytest.raises(ValueError, match=f"leave it out, kind says that it is {kind}"):
            student(kind, objective="rank_xendcg")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_student_of_a_linear_teacher_ranks_as_it_does(kind: str, splits: Splits, tmp_path: Path) -> None:
    config = student(kind, num_trees=150, num_threads=1).trees
    bundle = grow_trees(config, splits, str(tmp_path / "out"))
    assert bundle.metrics["labelled_groups"] == 300
    assert bundle.metrics["trees"] == 150
    test = read(splits.test, labelled=False)
    teacher_N = test.features_NF @ torch.tensor(WEIGHTS)
    tau_Q = kendall_tau(bundle.scorer()(test), teacher_N, test.offsets_Q1)
    assert float(tau_Q.nanmean()) > 0.9


def test_missing_scores_and_scores_without_grades_are_errors(splits: Splits, tmp_path: Path) -> None:
    def train(split: Split, **trees: object) -> None:
        config = student("lambdarank", num_trees=2, **trees).trees
        settings = splits.replace(train=split.model_dump())
        grow_trees(config, settings, str(tmp_path / "out"))

    with pytest.raises(InputError, match=r"period 'train' is not scored there; score .* with jobs.score"):
        train(splits.train.replace(scores=str(tmp_path)))
    with pytest.raises(InputError, match=r"gains are for integers .* set gbdt.targets.kind=quantised"):
        train(splits.train, targets=None)


OFFSETS = np.array([0, 3, 4, 9, 12])


def scores_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=OFFSETS[-1]) * 5 + 2


standardised = StandardisedConfig().from_labels


def quantised(scores_N: np.ndarray, **settings: object) -> np.ndarray:
    return QuantisedConfig.model_validate(settings).from_labels(scores_N, np.array([0, len(scores_N)]))


def test_standardised_scores_have_mean_0_and_deviation_1_in_each_group() -> None:
    scores_N = scores_of(0)
    scores_N[9:] = 0.1  # a group of equal scores
    found_N = standardised(scores_N, OFFSETS)
    for first, last in itertools.pairwise(OFFSETS):
        group = scores_N[first:last]
        spread = group.std()
        expected = (group - group.mean()) / spread if spread > 1e-9 else np.zeros(len(group))
        np.testing.assert_allclose(found_N[first:last], expected, atol=1e-12)


@pytest.mark.parametrize("change", [lambda s: 3 * s, lambda s: s - 1e3])
def test_standardised_scores_do_not_depend_on_scale_and_shift(change: object) -> None:
    scores_N = scores_of(1)
    assert callable(change)
    np.testing.assert_allclose(standardised(change(scores_N), OFFSETS), standardised(scores_N, OFFSETS), atol=1e-9)


@pytest.mark.parametrize("bins", ["even", "equal_frequency"])
@pytest.mark.parametrize("grades", [2, 5, 31])
def test_grades_rise_with_the_scores_and_equal_scores_have_equal_grades(bins: str, grades: int) -> None:
    scores_N = np.random.default_rng(2).integers(0, 40, 500).astype(float) ** 2
    grades_N = quantised(scores_N, grades=grades, bins=bins)
    order = np.argsort(scores_N, kind="stable")
    assert (np.diff(grades_N[order]) >= 0).all()
    assert (np.diff(grades_N[order])[np.diff(scores_N[order]) == 0] == 0).all()
    assert grades_N.min() == 0
    assert grades_N.max() == grades - 1


def test_even_bins_are_of_equal_width() -> None:
    scores_N = np.append(np.random.default_rng(3).uniform(-2, 3, 2000), [-2, 3])
    expected = np.minimum(np.floor((scores_N + 2) / 5 * 31), 30)
    np.testing.assert_array_equal(quantised(scores_N, grades=31, bins="even"), expected)


def test_equal_frequency_bins_hold_equally_many() -> None:
    counts = np.bincount(
        quantised(np.random.default_rng(4).normal(size=3100), grades=31, bins="equal_frequency").astype(int)
    )
    assert counts.tolist() == [100] * 31


@pytest.mark.parametrize("bins", ["even", "equal_frequency"])
def test_scores_without_spread_have_one_grade(bins: str) -> None:
    assert quantised(np.full(5, 0.3), grades=31, bins=bins).tolist() == [0] * 5
    assert quantised(np.zeros(0), grades=31, bins=bins).tolist() == []


NUMERIC = [Feature(name=name) for name in ("a", "b@c[0]", "d")]
SMALL = LightGBMConfig(num_trees=20, num_threads=1, early_stopping_rounds=10)
XGBOOST = XGBoostConfig(num_trees=20, learning_rate=0.3, num_threads=1, early_stopping_rounds=10)
CATBOOST = CatBoostConfig(num_trees=20, learning_rate=0.3, num_threads=1, early_stopping_rounds=10)
every_library = pytest.mark.parametrize("config", [SMALL, XGBOOST, CATBOOST], ids=lambda config: config.kind)


def make_groups(
    rng: np.random.Generator,
    count: int,
    label_of: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    length: int = 10,
) -> Groups:
    """Groups of three features, with labels that are a function of them."""
    found: Groups = []
    for _ in range(count):
        x_LF = rng.normal(size=(rng.integers(2, length), 3))
        found.append((x_LF.astype(np.float32), label_of(x_LF).astype(np.float32)))
    return found


def grades(x_LF: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.clip(np.round(x_LF[:, 0] + 1), 0, 4)


def three(
    rng: np.random.Generator, label_of: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> dict[str, Groups]:
    sizes = {"train": 150, "validation": 60, "test": 60}
    return {period: make_groups(rng, count, label_of) for period, count in sizes.items()}


def train(
    url: str, out: Path, config: GBDTConfig = SMALL, start: str | None = None
) -> tuple[Bundle, list[dict[str, object]]]:
    records: list[dict[str, object]] = []
    bundle = grow_trees(config, splits_of(url), out, report=lambda r: records.append(dict(r)), start=start)
    return bundle, records


def score(bundle: Bundle, url: str, split: str) -> float:
    """Mean NDCG@5 of a bundle by the package's own metric and scorer."""
    groups = read(getattr(splits_of(url), split))
    return mean_ndcg(bundle.scorer()(groups), groups)


@pytest.mark.slow
@every_library
def test_learns_and_reports_our_metric(write_dataset: WriteDataset, tmp_path: Path, config: GBDTConfig) -> None:
    url = write_dataset(three(np.random.default_rng(0), grades), NUMERIC)
    bundle, records = train(url, tmp_path / "out", config)
    assert bundle.kind == "trees"
    assert [feature.name for feature in bundle.features] == ["a", "b@c[0]", "d"]
    assert score(bundle, url, "test") > 0.97
    values = [r["validation_ndcg@5"] for r in records]
    assert bundle.metrics["validation_ndcg@5"] == max(values) == pytest.approx(score(bundle, url, "validation"))
    assert bundle.metrics["trees"] == 1 + values.index(max(values))
    assert [r["tree"] for r in records] == list(range(1, len(records) + 1))
    assert all(0 < r[f"validation_ndcg@5_{config.kind}"] <= 1 for r in records)  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL, XGBOOST], ids=lambda config: config.kind)
@pytest.mark.parametrize("highest", [nightly(90), 1000])
def test_labels_of_linear_gain_go_beyond_those_of_exponential_gain_in_every_split(
    write_dataset: WriteDataset, tmp_path: Path, config: GBDTConfig, highest: int
) -> None:
    """Early stopping judges by NDCG with gains 2^y - 1 all the same, the metric of all methods."""
    revenue = three(
        np.random.default_rng(4), lambda x_LF: np.clip(np.round(highest * (x_LF[:, 0] + 2) / 4), 0, highest)
    )
    url = write_dataset(revenue, NUMERIC)
    linear = config.replace(label_gain="linear")
    bundle, records = train(url, tmp_path / "out", linear)
    assert score(bundle, url, "test") > 0.9
    values = [r["validation_ndcg@5"] for r in records]
    assert bundle.metrics["validation_ndcg@5"] == max(values) == pytest.approx(score(bundle, url, "validation"))
    for other in (config, SMALL.replace(objective="regression")):
        with pytest.raises(InputError, match=r"NDCG is of integers from 0 to 31 .* linear goes on to 1000"):
            train(url, tmp_path / "other", other)


def test_a_leaf_has_the_second_derivatives_that_are_asked_for(write_dataset: WriteDataset, tmp_path: Path) -> None:
    url = write_dataset(three(np.random.default_rng(5), grades), NUMERIC)
    found = []
    for number, least in enumerate((1e-3, 20.0, 1e6)):
        config = SMALL.replace(min_sum_hessian_in_leaf=least, num_trees=1, early_stopping_rounds=None)
        text = train(url, tmp_path / str(number), config)[0].content.decode()
        (tree,) = lgb.Booster(model_str=text).dump_model()["tree_info"]
        found.append(tree["num_leaves"])
    assert found[0] > found[1] > found[2] == 1


@pytest.mark.slow
@every_library
def test_validation_groups_without_a_relevant_document_do_not_count(
    write_dataset: WriteDataset, tmp_path: Path, config: GBDTConfig
) -> None:
    rng = np.random.default_rng(1)
    data = three(rng, grades)
    data["validation"] = [
        (x, y if i % 3 else np.zeros_like(y)) for i, (x, y) in enumerate(data["validation"]) if y is not None
    ]
    made, records = train(write_dataset(data, NUMERIC), tmp_path / "out", config.replace(num_trees=3))
    assert made.metrics["validation_groups"] == len(data["validation"])
    for record in records:  # scores of real numbers: no ties, and the library sees no group that it would count as 1
        assert record["validation_ndcg@5"] == pytest.approx(record[f"validation_ndcg@5_{config.kind}"], abs=0.02)
    data["validation"] = [(x, y) for x, y in data["validation"] if y is not None and y.any()]
    alone, _ = train(write_dataset(data, NUMERIC), tmp_path / "alone", config.replace(num_trees=3))
    assert alone.content == made.content


@pytest.mark.slow
@every_library
def test_without_groups_that_have_no_relevant_document_trees_are_those_of_a_log_that_lacks_them(
    write_dataset: WriteDataset, tmp_path: Path, config: GBDTConfig
) -> None:
    data = three(np.random.default_rng(2), grades)
    data["train"] = [(x, y if i % 3 else np.zeros_like(y)) for i, (x, y) in enumerate(data["train"]) if y is not None]
    url = write_dataset(data, NUMERIC)
    some, _ = train(url, tmp_path / "some", config.replace(relevant_only=True))
    every, _ = train(url, tmp_path / "every", config)
    data["train"] = [(x, y) for x, y in data["train"] if y is not None and y.any()]
    lacking, _ = train(write_dataset(data, NUMERIC), tmp_path / "lacking", config)
    assert some.metrics["labelled_groups"] == len(data["train"]) < every.metrics["labelled_groups"] == 150
    assert some.content == lacking.content != every.content


def test_few_groups_among_many_are_read_once_for_all_trees_of_a_process(
    write_dataset: WriteDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = write_dataset(three(np.random.default_rng(2), grades), NUMERIC)
    named = splits_of(url, labelled_groups=20).by_name
    splits = Splits(**named | {"validation": named["validation"].replace(labelled_groups=8)})
    grow = functools.partial(grow_trees, SMALL, splits)
    with monkeypatch.context() as without:
        without.setattr(tree_data, "memory_for", lambda *_: None)
        read_each_time = grow(out=str(tmp_path / "anew"))
    tree_data._memories.clear()
    assert grow(out=str(tmp_path / "first")).content == read_each_time.content
    monkeypatch.setattr("ltrscale.data.stream.readers.pq", None)  # any further reading fails
    assert grow(out=str(tmp_path / "second")).content == read_each_time.content


def test_features_that_fit_are_read_once_and_others_at_every_pass(
    write_dataset: WriteDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = splits_of(write_dataset(three(np.random.default_rng(2), grades), NUMERIC)).train
    kept, _ = read_labelled(select(split, labelled=True), "train")
    monkeypatch.setattr(tree_data, "_MEMORY_GB", 4e-9 * (len(kept.labels_N) * len(NUMERIC) - 1))
    streamed, _ = read_labelled(select(split, labelled=True), "train")
    rows_NF = np.concatenate(list(streamed.rows({})))
    monkeypatch.setattr("ltrscale.data.stream.readers.pq", None)  # any further reading fails
    np.testing.assert_array_equal(np.concatenate(list(kept.rows({}))), rows_NF)
    with pytest.raises(AttributeError):
        list(streamed.rows({}))


@pytest.mark.slow
@given(data=st.data(), k=st.integers(1, 7))
def test_the_ndcg_after_a_tree_is_that_of_all_documents(data: st.DataObject, k: int) -> None:
    """Of short and long groups, with ties of scores and labels; a score that is not a number is an error."""
    lengths_Q = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    n = sum(lengths_Q)
    numbers = st.lists(st.integers(0, 4), min_size=n, max_size=n).map(lambda values: np.array(values, np.float64))
    labels_N, offsets_Q1 = data.draw(numbers), np.cumsum([0, *lengths_Q])
    groups = Labelled(
        "v",
        Selection((), RowGroups.from_iterable(()), "", labelled=True),
        labels_N,
        offsets_Q1,
        offsets_Q1[1:],
        None,
        None,
        raw(()),
        None,
    )
    for scores_N in (data.draw(numbers), np.random.default_rng(0).normal(size=n), -np.inf * data.draw(numbers).clip(1)):
        expected_Q = ndcg(torch.from_numpy(scores_N), torch.from_numpy(labels_N), torch.from_numpy(offsets_Q1), k=k)
        assert groups.mean_ndcg(scores_N, k) == pytest.approx(float(expected_Q.nanmean()), nan_ok=True)
    scores_N[data.draw(st.integers(0, n - 1))] = np.nan
    with pytest.raises(ValueError, match="scores contain NaN"):
        groups.mean_ndcg(scores_N, k)


@pytest.mark.slow
@every_library
def test_stops_early_and_keeps_the_best_tree(write_dataset: WriteDataset, tmp_path: Path, config: GBDTConfig) -> None:
    rng = np.random.default_rng(2)
    url = write_dataset(three(rng, lambda x_LF: rng.integers(0, 3, len(x_LF)).astype(float)), NUMERIC)
    bundle, records = train(url, tmp_path / "out", config.replace(num_trees=300, early_stopping_rounds=5))
    assert len(records) == int(bundle.metrics["trees"] or 0) + 5
    assert bundle.metrics["validation_ndcg@5"] == pytest.approx(score(bundle, url, "validation"))


@pytest.mark.slow
@every_library
def test_it_ends_after_the_tree_at_which_its_minutes_are_up(
    write_dataset: WriteDataset, tmp_path: Path, config: GBDTConfig
) -> None:
    url = write_dataset(three(np.random.default_rng(2), grades), NUMERIC)
    late, records = train(url, tmp_path / "late", config.replace(num_trees=30, minutes=1e-9))
    assert len(records) == late.metrics["trees"] == 1
    assert late.metrics == train(url, tmp_path / "one", config.replace(num_trees=1))[0].metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [SMALL.replace(feature_fraction=0.5), XGBOOST.replace(colsample_bytree=0.5), CATBOOST],
    ids=lambda config: config.kind,
)
def test_the_same_bytes_twice(write_dataset: WriteDataset, tmp_path: Path, config: GBDTConfig) -> None:
    url = write_dataset(three(np.random.default_rng(3), grades), NUMERIC)
    first, second = train(url, tmp_path / "1", config)[0], train(url, tmp_path / "2", config)[0]
    assert first.content == second.content
    other = train(url, tmp_path / "3", config.replace(seed=1))[0]
    assert other.content != first.content


def test_ten_grades_get_their_gains(write_dataset: WriteDataset, tmp_path: Path) -> None:
    url = write_dataset(three(np.random.default_rng(4), lambda x: np.clip(np.round(3 * x[:, 1] + 5), 1, 10)), NUMERIC)
    bundle, _ = train(url, tmp_path / "out")
    assert f"[label_gain: {','.join(str(2**y - 1) for y in range(11))}]" in bundle.content.decode()
    assert score(bundle, url, "test") > 0.97


@pytest.mark.slow
@pytest.mark.parametrize(
    "one_split",
    [
        SMALL.replace(num_trees=1, num_leaves=2),
        XGBOOST.replace(num_trees=1, max_leaves=2, min_child_weight=1.0),
        CATBOOST.replace(num_trees=1, depth=1),
    ],
    ids=lambda config: config.kind,
)
def test_a_category_counts_by_its_code_and_large_codes_cost_nothing(
    write_dataset: WriteDataset, tmp_path: Path, one_split: GBDTConfig
) -> None:
    """Relevance depends on a scrambled property of the code, independent of its order; codes are hashes."""
    rng = np.random.default_rng(5)
    codes_K = rng.integers(0, 1 << 24, size=40).astype(np.float32)
    good_K = rng.permutation(40) % 2

    def groups(count: int) -> Groups:
        found: Groups = []
        for _ in range(count):
            k_L = rng.integers(0, 40, size=8)
            noise_LF = rng.normal(size=(8, 2))
            found.append((np.column_stack([codes_K[k_L], noise_LF]).astype(np.float32), good_K[k_L].astype(np.float32)))
        return found

    data = {"train": groups(200), "validation": groups(60), "test": groups(60)}
    features = [Feature(name="brand", kind="categorical"), Feature(name="x"), Feature(name="y")]
    url = write_dataset(data, features)
    bundle, _ = train(url, tmp_path / "as_category", one_split)
    numeric_url = write_dataset(data, NUMERIC)
    plain, _ = train(numeric_url, tmp_path / "as_number", one_split)
    assert score(bundle, url, "test") > 0.94 > score(plain, numeric_url, "test") + 0.05
    assert bundle.metrics["validation_ndcg@5"] == pytest.approx(score(bundle, url, "validation"))
    assert len(bundle.content) < 20_000
    strange = QueryGroups(torch.tensor([[5.0, 0, 0], [float("nan"), 0, 0]]), torch.tensor([0, 2]))
    scores = bundle.scorer()(strange)
    assert scores[0] == scores[1], "a code never seen in training is like a missing one"


@pytest.mark.slow
@every_library
def test_missing_values_are_split_on(write_dataset: WriteDataset, tmp_path: Path, config: GBDTConfig) -> None:
    rng = np.random.default_rng(6)
    data = three(rng, lambda x_LF: (x_LF[:, 2] > 0.5).astype(float))
    for of_period in data.values():
        for x_LF, labels_L in of_period:
            assert labels_L is not None
            x_LF[:, 2] = np.where(labels_L > 0, np.nan, rng.normal(size=len(x_LF)))
    url = write_dataset(data, NUMERIC)
    assert score(train(url, tmp_path / "out", config)[0], url, "test") > 0.99


def test_too_few_documents_give_equal_scores_and_say_so(
    write_dataset: WriteDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = three(np.random.default_rng(7), grades)
    data["train"] = data["train"][:2]
    url = write_dataset(data, NUMERIC)
    with caplog.at_level("WARNING", logger="ltrscale"):
        bundle, records = train(url, tmp_path / "out")
    assert "min_data_in_leaf = 20" in caplog.text
    assert len(records) == 1
    scores_N = bundle.scorer()(QueryGroups(torch.randn(5, 3), torch.tensor([0, 5])))
    assert len(scores_N.unique()) == 1


def test_the_validation_split_may_have_its_features_in_another_order(
    write_dataset: WriteDataset, reorder: Any, tmp_path: Path
) -> None:
    url = write_dataset(three(np.random.default_rng(0), grades), NUMERIC)
    moved = reorder(url, [*reversed(NUMERIC), Feature(name="more")])
    models = []
    for validation in (url, moved):
        splits = splits_of(url)
        splits = splits.replace(validation={**splits.validation.model_dump(), "data": validation})
        models.append(grow_trees(SMALL, splits, str(tmp_path / "out")))
    assert models[0].metrics == models[1].metrics
    assert models[0].contents == models[1].contents


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [SMALL.replace(num_leaves=4), XGBOOST.replace(max_leaves=4, min_child_weight=1.0)],
    ids=lambda config: config.kind,
)
def test_unbiased_trees_rank_by_relevance_where_clicks_follow_positions(
    write_dataset: WriteDataset, tmp_path: Path, config: GBDTConfig
) -> None:
    """Documents are shown almost in the order of the second feature, but the first one decides about relevance."""
    rng = np.random.default_rng(0)
    shown: list[NDArray[np.float64]] = []

    def group(*, clicked: bool) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        x_LF = rng.normal(size=(10, 3))
        positions_L = 1 + np.argsort(np.argsort(x_LF[:, 1] + 0.3 * rng.normal(size=10)))
        shown.append(positions_L)
        relevant_L = x_LF[:, 0] + rng.normal(size=10) > 0.5
        seen_L = rng.random(10) < 1 / positions_L
        labels_L = relevant_L & seen_L if clicked else relevant_L
        return x_LF.astype(np.float32), labels_L.astype(np.float32)

    data = {name: [group(clicked=name == "train") for _ in range(400)] for name in ("train", "validation", "test")}
    url = write_dataset(data, NUMERIC)
    add_column(url, "positions", pa.list_(pa.float32()), lambda gid: shown[gid])
    config = config.replace(early_stopping_rounds=None)
    biased, unbiased = (train(url, tmp_path / str(u), config.replace(unbiased=u))[0] for u in (False, True))
    assert score(unbiased, url, "test") > score(biased, url, "test") + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL, XGBOOST], ids=lambda config: config.kind)
@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (None, "unbiased trees need positions; map the column in prepare"),
        ([1, 2, np.nan], "train: group 0 has position nan, and unbiased trees need a whole number for every document"),
        ([1, 2.5, 3], "train: group 0 has position 2.5, and"),
        ([1, 2, 2], "train: group 0 has position 2 twice; give each document its own position"),
    ],
)
def test_positions_that_unbiased_trees_cannot_use_are_named(
    write_dataset: WriteDataset, tmp_path: Path, config: GBDTConfig, positions: list[float] | None, message: str
) -> None:
    three_documents = (np.eye(3, dtype=np.float32), np.float32([1, 0, 0]))
    url = write_dataset({name: [three_documents] for name in ("train", "validation", "test")}, NUMERIC)
    if positions is not None:
        add_column(url, "positions", pa.list_(pa.float32()), lambda _: positions)
    with pytest.raises(InputError, match=message):
        train(url, tmp_path / "out", config.replace(unbiased=True))


def test_labelled_fraction_is_used(write_dataset: WriteDataset, tmp_path: Path) -> None:
    url = write_dataset(three(np.random.default_rng(8), grades), NUMERIC)
    splits = splits_of(url, labelled_fraction=0.1)
    made = grow_trees(SMALL.replace(num_trees=1), splits, str(tmp_path / "out"))
    assert (made.metrics["labelled_groups"], made.metrics["validation_groups"]) == (15, 60)


def test_bad_data_is_named(write_dataset: WriteDataset, tmp_path: Path) -> None:
    rng = np.random.default_rng(9)

    def error_of(change: Callable[[dict[str, Groups]], None]) -> str:
        data = three(rng, grades)
        change(data)
        with pytest.raises(InputError) as caught:
            train(write_dataset(data, NUMERIC), tmp_path / "out")
        return str(caught.value)

    def set_label(data: dict[str, Groups], value: float, period: str = "train") -> None:
        labels_L = data[period][7 if period == "train" else 0][1]
        assert labels_L is not None
        labels_L[1] = value

    assert error_of(lambda data: set_label(data, 0.5)).startswith("train: group 7 has label 0.5, ")
    assert error_of(lambda data: set_label(data, 32)).startswith("train: group 7 has label 32, ")
    assert "group 150 has label 0.25, and NDCG is of integers" in error_of(
        lambda data: set_label(data, 0.25, "validation")
    )
    irrelevant = [(x, np.zeros(len(x), np.float32)) for x, _ in three(rng, grades)["validation"]]
    assert "all labels of its 60 labelled groups are 0" in error_of(lambda data: data.update(validation=irrelevant))
    unlabelled: Groups = [(x, None) for x, _ in irrelevant]
    assert "no group has labels" in error_of(lambda data: data.update(train=unlabelled))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@every_library
def test_a_long_group_trains_the_libraries_without_a_limit(
    write_dataset: WriteDataset, tmp_path: Path, config: GBDTConfig
) -> None:
    rng = np.random.default_rng(9)
    data = {name: groups[:20] for name, groups in three(rng, grades).items()}
    long_LF = rng.normal(size=(10_001, 3)).astype(np.float32)
    for name in ("train", "validation"):
        usual = data[name][3]
        data[name][3] = (long_LF, grades(long_LF).astype(np.float32))
        url = write_dataset(data, NUMERIC)
        if config.kind == "lightgbm":
            message = rf"{name}: group \d+ has 10,001 documents, LightGBM takes 10,000; .* choose another kind$"
            with pytest.raises(InputError, match=message):
                train(url, tmp_path / name, config.replace(num_trees=2))
        else:
            bundle, _ = train(url, tmp_path / name, config.replace(num_trees=2))
            assert bundle.metrics["labelled_groups"] == 20
        data[name][3] = usual


def test_each_document_has_a_number_of_its_own_however_long_its_group_is() -> None:
    lengths_Q = torch.tensor([25_000, 1, 10_000, 30_000])
    groups = QueryGroups(torch.zeros(int(lengths_Q.sum()), 1), to_offsets(lengths_Q), ids_Q=torch.tensor([0, 1, 2, 3]))
    numbers_N = _document_numbers(groups)
    assert len(np.unique(numbers_N)) == groups.n_documents
    assert numbers_N[25_000] == 10_000  # those of shorter groups are the same beside a long one


def documents(url: str, features: list[Feature]) -> QueryGroups:
    """The test documents with these features."""
    selection = select(splits_of(url).test, labelled=False).serving(features, whose="the test")
    return QueryGroups.concat(list(iterate(selection)))


@pytest.mark.slow
def test_going_on_from_trees_is_one_longer_training(
    write_dataset: WriteDataset, reorder: Callable[[str, list[Feature]], str], tmp_path: Path
) -> None:
    features = [*NUMERIC, Feature(name="code", kind="categorical")]
    rng = np.random.default_rng(0)

    def with_code(groups: Groups) -> Groups:
        return [(np.column_stack([x_LF, rng.integers(0, 3, len(x_LF))]), labels_L) for x_LF, labels_L in groups]

    url = write_dataset({period: with_code(of) for period, of in three(rng, grades).items()}, features)
    settings = {"num_threads": 1, "early_stopping_rounds": None}
    short, long = (LightGBMConfig.model_validate({**settings, "num_trees": n}) for n in (7, 14))
    whole, _ = train(url, tmp_path / "whole", long)
    first, _ = train(url, tmp_path / "first", short)
    turned = reorder(url, features[::-1])  # the new trees see the columns of the first ones
    more, records = train(turned, tmp_path / "more", short, first.url)
    assert more.contents["start.txt"] == first.content
    groups = documents(url, features)
    np.testing.assert_allclose(2 * more.scorer()(groups), whole.scorer()(groups), rtol=1e-9)
    assert records[-1]["validation_ndcg@5"] == pytest.approx(score(more, url, "validation"))
    assert more.metrics["validation_ndcg@5"] == pytest.approx(whole.metrics["validation_ndcg@5"])


@pytest.mark.slow
def test_trees_go_on_from_one_lightgbm_model_only(write_dataset: WriteDataset, tmp_path: Path) -> None:
    url = write_dataset(three(np.random.default_rng(0), grades), NUMERIC)
    first, _ = train(url, tmp_path / "first")
    other, _ = train(url, tmp_path / "other", XGBOOST)
    twice, _ = train(url, tmp_path / "twice", SMALL, first.url)
    for config, start in ((SMALL, other), (SMALL, twice), (XGBOOST, first)):
        with pytest.raises(InputError, match=f"^{start.url}: only LightGBM's trees go on from a bundle"):
            train(url, tmp_path / "out", config, start.url)
    assert not (tmp_path / "out").exists()
