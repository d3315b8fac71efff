"""Drift of a small log against a slow oracle that looks at one value at a time, and an evaluation by period."""

import itertools
import json
import math
import pickle
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from linear_teacher import linear_teacher
from reference import drift as oracle
from scipy.stats import spearmanr
from weekly_log import Row, write_log

from ltrscale.arrays import Ints
from ltrscale.data.dataset.manifest import Feature
from ltrscale.errors import InputError, UnavailableError
from ltrscale.evaluation.measure.drift import (
    _CELLS,
    BinnedValues,
    ByPeriod,
    DriftCorrelation,
    FeatureDrift,
    PeriodDrift,
    chance_psi,
    measure_drift,
    psi,
)
from ltrscale.evaluation.measure.evaluate import _drift
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.evaluation.measure.page import document
from ltrscale.evaluation.measure.periods import _rank_correlation, _trained_until
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.reports.document import Table
from ltrscale.reports.render import markdown, table

FEATURES = [Feature(name="x"), Feature(name="steps"), Feature(name="never"), Feature(name="c", kind="categorical")]
WEIGHTS = [1.0, -0.5, 0.0, 0.0]
ALL = 10**6
TRAIN, VALIDATION, TEST = ("a", "b"), ("c",), ("d", "e", "f", "g", "h")


def documents(rng: np.random.Generator, n: int, week: int) -> list[list[float]]:
    """Values that move from week to week, with new codes and more missing values."""
    x = rng.normal(0.3 * week, 1 + 0.1 * week, n) * rng.choice([1e-3, 1.0, 1e4], n)
    steps = np.where(rng.random(n) < 0.02 * week, np.nan, rng.integers(-1, 3, n))
    never = np.full(n, np.nan if week < 4 else 1.0)
    return np.stack([x, steps, never, rng.geometric(0.1, n) + week // 3], axis=1).astype(np.float32).tolist()


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    rng, found = np.random.default_rng(3), []
    for week, period in enumerate((*TRAIN, *VALIDATION, *TEST)):
        for i in range(30):
            n = int(rng.integers(1, 8 + week))
            labels = rng.integers(0, 3, n).astype(float).tolist() if i % 3 else None
            found.append(Row(period, documents(rng, n, week), labels))
    return found


def evaluation(data: str, model: str, **keys: Any) -> EvaluateConfig:
    periods = (("train", TRAIN), ("validation", VALIDATION), ("test", TEST))
    splits = {name: {"data": data, "periods": list(of)} for name, of in periods}
    keys = {"outliers": {"gap": None}, "resamples": 100, **keys}
    return EvaluateConfig(models={"linear": (model,)}, baseline=None, splits=splits, **keys)


@pytest.fixture(scope="module")
def config(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> EvaluateConfig:
    folder = tmp_path_factory.mktemp("drift")
    data = write_log(str(folder / "data"), rows, FEATURES, row_group=4)
    return evaluation(data, teacher(str(folder / "model"), rows, folder))


def teacher(url: str, rows: list[Row], folder: Path) -> str:
    """A linear scorer of x and steps, whose data lack the other features."""
    data = write_log(str(folder / "two"), [two(row) for row in rows[:2]], FEATURES[:2], row_group=4)
    return linear_teacher(url, data, WEIGHTS[:2])


def two(row: Row) -> Row:
    return Row(row.period, [document[:2] for document in row.documents], row.labels)


@pytest.fixture(scope="module")
def measured(config: EvaluateConfig) -> ByPeriod:
    return measure_drift(config, documents=ALL)


def column(rows: list[Row], f: int) -> list[float]:
    return [document[f] for row in rows for document in row.documents]


@pytest.mark.slow
def test_equals_a_slow_oracle(rows: list[Row], config: EvaluateConfig, measured: ByPeriod) -> None:
    """Of scores only: here all features are read, as if there were no bundle."""
    everything = measure_drift(config.replace(models={}, scores={"s": "unused"}), documents=ALL)
    train = [row for row in rows if row.period in TRAIN]
    assert list(everything.periods) == list(TEST)
    for period, found in everything.periods.items():
        now = [row for row in rows if row.period == period]
        lengths, before = ([float(len(row.documents)) for row in of] for of in (now, train))
        assert found.length == pytest.approx(statistics.mean(lengths))
        assert found.length_psi == pytest.approx(numbers_psi(before, lengths))
        for f, feature in enumerate(FEATURES):
            one, other = column(train, f), column(now, f)
            expected = codes_psi(one, other) if feature.kind == "categorical" else numbers_psi(one, other)
            assert found.features[feature.name].psi == pytest.approx(expected, abs=1e-12)
            assert found.features[feature.name].missing == pytest.approx(np.isnan(other).mean())
        assert found.features["c"].unknown == pytest.approx(
            np.mean([x not in column(train, 3) for x in column(now, 3)])
        )
        labelled = [row for row in now if row.labels is not None]
        assert found.labels is not None
        assert found.labels.groups == len(labelled)
        assert found.labels.documents == pytest.approx(np.mean([y >= 1 for r in labelled for y in r.labels or ()]))
        assert found.labels.relevant == pytest.approx(np.mean([max(r.labels or [0]) >= 1 for r in labelled]))
    assert list(measured.periods["d"].features) == ["x", "steps"], "those that the bundle reads"
    assert everything.periods["h"].features["x"] == measured.periods["h"].features["x"]


def numbers_psi(one: list[float], other: list[float]) -> float:
    starts = oracle.number_bins(one)
    return oracle.psi(*([oracle.number_bin(x, starts) for x in of] for of in (one, other)))


def codes_psi(one: list[float], other: list[float]) -> float:
    return oracle.psi(*([oracle.code_bin(x, one) for x in of] for of in (one, other)))


def test_scores_are_compared_by_their_spread_within_a_list(rows: list[Row], measured: ByPeriod) -> None:
    def spreads(period: str) -> list[float]:
        """Missing values count as 0 in the transform of the bundle."""
        lists = [row.documents for row in rows if row.period == period and len(row.documents) > 1]
        scores = [[sum(w * (0 if math.isnan(x) else x) for w, x in zip(WEIGHTS, d, strict=True)) for d in of]
                  for of in ([[*d[:2], 0, 0] for d in one] for one in lists)]  # fmt: skip
        return [statistics.pstdev(of) for of in scores]

    before = spreads("c")
    assert measured.train.spreads["linear"].psi == 0
    assert measured.train.spreads["linear"].mean == pytest.approx(statistics.mean(before), rel=1e-4)
    for period in TEST:
        found = measured.periods[period].spreads["linear"]
        assert found.mean == pytest.approx(statistics.mean(spreads(period)), rel=1e-4)
        assert found.psi == pytest.approx(numbers_psi(before, spreads(period)), rel=1e-6)


def test_the_rounding_of_scores_is_no_drift(tmp_path: Path) -> None:
    """A number that all scores of a list share does not matter, but the larger it is, the more is lost to rounding."""
    rng, rows = np.random.default_rng(0), []
    for period in (*TRAIN, *VALIDATION, *TEST):
        for _ in range(400):
            relevant = np.arange(8) < rng.integers(1, 8)
            of_list = np.full(8, rng.uniform(100, 200) if period in TEST else rng.uniform(0, 100))
            rows.append(Row(period, np.stack([of_list, 0.3 * relevant], axis=1).tolist(), None))
    data = write_log(str(tmp_path / "data"), rows, FEATURES[:2], row_group=100)
    config = evaluation(data, linear_teacher(str(tmp_path / "model"), data, [1.0, 1.0]))
    found = measure_drift(config)
    for period in found.periods.values():
        assert period.features["x"].psi > 10
        assert period.spreads["linear"].psi < 0.1


@pytest.mark.slow
def test_does_not_depend_on_the_order_of_rows_nor_on_files(
    rows: list[Row], config: EvaluateConfig, measured: ByPeriod, tmp_path: Path
) -> None:
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    turned = [Row(r.period, r.documents[::-1], r.labels and r.labels[::-1]) for r in shuffled]
    data = write_log(str(tmp_path / "data"), turned, FEATURES, row_group=3, file=11)
    in_other_batches = evaluation(data, config.bundles[0]).replace(docs_per_batch=13)
    other = measure_drift(in_other_batches, documents=ALL)
    assert approximately(other) == approximately(measured)
    assert list(other.periods) == list(measured.periods)


def approximately(drift: ByPeriod) -> list[PeriodDrift]:
    """Means of scores differ by rounding; counts do not."""
    return [
        period.replace(spreads={name: s.replace(mean=round(s.mean or 0, 2)) for name, s in period.spreads.items()})
        for period in (drift.train, *drift.periods.values())
    ]


def test_the_same_data_do_not_drift(rows: list[Row], config: EvaluateConfig, tmp_path: Path) -> None:
    copies = [Row(period, row.documents, row.labels) for row in rows if row.period == "a" for period in "abcdefgh"]
    data = write_log(str(tmp_path / "data"), copies, FEATURES, row_group=5)
    only_a = evaluation(data, config.bundles[0])
    only_a = only_a.replace(splits={**only_a.splits.model_dump(), "train": {"data": data, "periods": ["a"]}})
    found = measure_drift(only_a, documents=ALL)
    for period in found.periods.values():
        assert {feature.psi for feature in period.features.values()} == {0.0}
        assert (period.length_psi, period.spreads["linear"].psi, period.drifted) == (0.0, 0.0, [])


def test_a_sample_of_documents_is_near_the_whole(config: EvaluateConfig, measured: ByPeriod) -> None:
    some = measure_drift(config, documents=60)
    assert 60 <= some.train.documents < measured.train.documents
    assert all(0 < some.periods[p].documents < measured.periods[p].documents for p in TEST)


def test_features_have_drifted_by_what_their_index_is_beyond_chance(measured: ByPeriod) -> None:
    (name, *_), period = list(measured.periods["h"].features), measured.periods["h"]
    for psi_, chance, drifted in ((0.3, 0.0, [name]), (0.3, 0.1, []), (0.6, 0.1, [name])):
        feature = FeatureDrift(psi=psi_, missing=0.0, chance=chance)
        assert period.replace(features={name: feature}).drifted == drifted


def counted(values_N: np.ndarray) -> BinnedValues:
    """Numbers of training."""
    numbers = BinnedValues()
    numbers.add(values_N.astype(np.float32))
    return numbers


def later(train: BinnedValues, values_N: np.ndarray) -> Ints:
    """Numbers of a later period, in the bins of training."""
    numbers = train.later()
    numbers.add(values_N.astype(np.float32))
    return numbers.counts_B()


def histograms(before_N: np.ndarray, now_N: np.ndarray) -> tuple[Ints, Ints]:
    train = counted(before_N)
    return train.counts_B(), later(train, now_N)


@pytest.mark.parametrize("seed", range(3))
def test_bins_rise_with_the_value_and_hold_tenths(seed: int) -> None:
    rng = np.random.default_rng(seed)
    train = counted(rng.normal(size=5000) * 10.0 ** rng.integers(-30, 30, 5000))
    bins = train.counts_B()
    assert bins[0] == bins[-2] == bins[-1] == 0
    assert all(400 < count < 600 for count in bins[1:-2])
    largest = np.finfo(np.float32).max
    assert [int(n) for n in later(train, np.array([largest, -largest, 0.0, -0.0]))[[0, -2]]] == [1, 1]


PLACES = ((0, 1), (0, 1e-20), (-30, 1), (102, 0.3), (1010, 3), (-3e5, 1e3), (1.7e9, 1e6))
"""Mean and standard deviation."""


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.25, 0.5, 1, 2, 3])
def test_a_shift_has_the_same_index_wherever_the_feature_lies(shift: float) -> None:
    before_N, now_N = np.random.default_rng(0).normal(size=(2, 50_000))
    now_N += shift
    edges = [-np.inf, before_N.min(), *np.quantile(before_N, np.arange(1, 10) / 10), before_N.max() + 1e-9, np.inf]
    exact = psi(*(np.histogram(values_N, edges)[0] for values_N in (before_N, now_N)))
    found = [psi(*histograms(m + s * before_N, m + s * now_N)) for m, s in PLACES]
    assert found == pytest.approx([exact] * len(PLACES), rel=0.01)
    if shift == 1:
        assert exact == pytest.approx(0.95, abs=0.05), "about 1, as the bounds of the gate say"


@pytest.mark.slow
def test_without_a_shift_the_index_is_what_chance_gives() -> None:
    rng, n = np.random.default_rng(0), 4000
    for m, s in PLACES:
        pairs = [histograms(*(m + s * rng.normal(size=(2, n)))) for _ in range(50)]
        by_chance = np.mean([chance_psi(*pair, values=(n, n)) for pair in pairs])
        assert np.mean([psi(*pair) for pair in pairs]) == pytest.approx(by_chance, rel=0.25)


def test_values_that_training_lacks_have_a_large_index() -> None:
    rng = np.random.default_rng(0)
    years, unix, scores = rng.integers(2005, 2016, 9000), 1.7357e9 + 7.8e6 * rng.random(9000), 17 + rng.random(9000)
    for before_N, now_N in (
        (years, rng.integers(2022, 2027, 9000)),
        (years, rng.integers(1995, 2000, 9000)),
        (unix, 1.7487e9 + 2.6e6 * rng.random(9000)),
        (scores, np.full(9000, 17.2)),
        (np.full(9000, 1010.0), np.full(9000, 1010.5)),
    ):
        assert psi(*histograms(before_N, now_N)) > 5
    assert psi(*histograms(np.full(9000, 1010.0), np.full(500, 1010.0))) == 0


@pytest.mark.slow
def test_counts_do_not_depend_on_batches_nor_on_their_order() -> None:
    rng = np.random.default_rng(0)
    values_N = np.concatenate([1010 + 3 * rng.normal(size=40_000), np.exp(4 * rng.normal(size=20_000)), [np.nan] * 9])
    now_N = 1011 + 3 * rng.normal(size=20_000)
    whole = counted(values_N)
    assert len(np.unique(values_N.astype(np.float32))) > 2 * _CELLS, "so that cells are wider than a number"
    for parts in (3, 400):
        numbers = BinnedValues()
        for batch_N in np.array_split(rng.permutation(values_N), parts):
            numbers.add(batch_N.astype(np.float32))
        compared = numbers.later()
        for batch_N in np.array_split(rng.permutation(now_N), parts):
            compared.add(batch_N.astype(np.float32))
        assert numbers.counts_B().tolist() == whole.counts_B().tolist()
        assert compared.counts_B().tolist() == later(whole, now_N).tolist()


def test_any_numbers_take_little_memory() -> None:
    rng, train = np.random.default_rng(0), BinnedValues()
    for _ in range(20):  # of all magnitudes, the worst case
        bits_N = rng.integers(0, 2**32, 65_536, dtype=np.uint32).view(np.float32)
        train.add(bits_N)
    size = len(pickle.dumps(train))
    assert size < 12 * _CELLS + 2000
    compared = train.later()
    compared.add(bits_N)
    assert len(pickle.dumps(compared)) < size + 2000, "beside the bins of training, which all periods share"
    shares_B = train.counts_B()[1:-2] / train.counts_B()[:-1].sum()
    assert len(shares_B) == 10
    assert shares_B == pytest.approx(0.1, abs=0.001)


def test_psi_is_a_symmetric_divergence() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        one, other = rng.integers(0, 50, (2, 12))
        assert psi(one, other) == pytest.approx(psi(other, one))
        assert psi(one, other) > 0
        assert psi(one, one) == 0
    far = psi(np.array([0, 10**9]), np.array([10**9, 0]))
    assert math.isfinite(far)


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, 6, 40])
def test_rank_correlation_is_spearmans(n: int) -> None:
    rng = np.random.default_rng(n)
    one_P = rng.integers(0, 6, n).astype(float)
    other_P = one_P + rng.normal(size=n)
    found, p = _rank_correlation(one_P, other_P)
    assert found == pytest.approx(spearmanr(one_P, other_P).statistic)
    assert p is not None
    if n < 8:
        orders = [spearmanr(one_P[list(order)], other_P).statistic for order in itertools.permutations(range(n))]
        assert p == pytest.approx(np.mean(np.abs(orders) >= abs(found or 0) - 1e-9))
    else:
        assert p == pytest.approx(spearmanr(one_P, other_P).pvalue, abs=0.01)


@pytest.mark.parametrize("values", [[1.0, 2, 3, 4], [1.0] * 9])
def test_too_few_or_equal_periods_are_not_judged(values: list[float]) -> None:
    assert _rank_correlation(np.array(values), np.arange(len(values), dtype=float)) == (None, None)


@pytest.fixture(scope="module")
def report(config: EvaluateConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "evaluation"
    EvaluateJob(out=str(out), evaluate=config.replace(by_period=True)).run(show=False)
    return out


@pytest.mark.slow
def test_the_curve_counts_periods_from_the_end_of_training(report: Path, measured: ByPeriod) -> None:
    evaluation = Evaluation.read(str(report))
    (method,), found = evaluation.methods, evaluation.by_period
    assert found is not None
    assert found.trained_until == {"linear": "b"}, "that of the split, as the bundle states none"
    assert found.since == {"linear": dict(zip(TEST, range(2, 7), strict=True))}
    assert (found.train, found.periods) == (measured.train, measured.periods)
    losses = [-(scope.summaries["ndcg@5"].mean or 0) for scope in method.periods.values()]
    for one, drifts in zip(found.foretold, ("features", "scores"), strict=True):
        values = [p.median_psi if drifts == "features" else p.spreads["linear"].psi for p in measured.periods.values()]
        correlation, p = _rank_correlation(np.array(values), np.array(losses))
        assert one == DriftCorrelation(measure=drifts, method="linear", periods=5, correlation=correlation, p=p)
    text = (report / "report.md").read_text()
    few = found.replace(foretold=tuple(one.replace(periods=4) for one in found.foretold))
    other = markdown(document(evaluation.replace(by_period=few), ""))
    assert ["cannot be judged: 4 periods" in shown for shown in (text, other)] == [False, True]
    (section,) = (section for section in document(evaluation, "").sections if section.name == "Periods")
    shown = [block for block in section.blocks if isinstance(block, Table)]
    assert [table(block) in text for block in shown] == [True, True, True]
    assert (report / "decay.png").stat().st_size > 1000


@pytest.mark.slow
def test_drift_that_cannot_be_measured_costs_no_other_figure(
    rows: list[Row], config: EvaluateConfig, report: Path, tmp_path: Path
) -> None:
    of_x = [Row(row.period, [document[:1] for document in row.documents], row.labels) for row in rows]
    train = {"data": write_log(str(tmp_path / "x"), of_x, FEATURES[:1], row_group=4), "periods": list(TRAIN)}
    there = config.replace(by_period=True, splits={**config.splits.model_dump(), "train": train})
    EvaluateJob(out=str(tmp_path / "out"), evaluate=there).run(show=False)
    found = Evaluation.read(str(tmp_path / "out"))
    assert found.methods == Evaluation.read(str(report)).methods
    with pytest.raises(InputError, match=r"drift: .*features are not in"):
        found.drift()
    assert "*Left out: drift: " in (tmp_path / "out" / "report.md").read_text().partition("## Periods")[2]
    assert "drift_failed" not in (report / "metrics.json").read_text()


def test_an_outage_while_drift_is_measured_ends_the_evaluation(
    config: EvaluateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_answer(*_: object) -> ByPeriod:
        raise UnavailableError("bucket: no answer")

    monkeypatch.setattr("ltrscale.evaluation.measure.evaluate.measure_periods", no_answer)
    with pytest.raises(UnavailableError):
        _drift(config.replace(by_period=True), [])


def test_a_bundle_that_states_its_periods_is_believed(config: EvaluateConfig, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(config.bundles[0], bundle)
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["made_by"] = {"config": {"splits": [{"data": ["gone"], "periods": ["a", "a..c"]}, {"data": ["gone"]}]}}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    assert _trained_until(str(bundle), config) == "c"


def test_the_training_groups_are_an_input_where_drift_from_them_is_measured(config: EvaluateConfig) -> None:
    without, measured = (EvaluateJob(out="out", evaluate=config.replace(by_period=by)).inputs() for by in (False, True))
    (data,) = config.splits.train.data
    assert without[data] != measured[data]
