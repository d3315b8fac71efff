"""The gate: each bound alone, on one real evaluation of a candidate that is worse on a slice; exit statuses."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from linear_teacher import linear_teacher
from nightly import nightly
from weekly_log import Row, write_log

from jobs import cli, gate
from ltrscale.data.dataset.manifest import Feature
from ltrscale.errors import InputError, Refused
from ltrscale.evaluation.bounds import Bounds, GateVerdict, Power, judge
from ltrscale.evaluation.gate import GateJob, _foreseen
from ltrscale.evaluation.measure.drift import PeriodDrift
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import CANDIDATE
from ltrscale.evaluation.statistics.blocks import Blocks
from ltrscale.evaluation.statistics.summarise import Comparison, Scope, scopes

ROOT = Path(__file__).resolve().parents[2]
PERIODS = {"train": ["a"], "validation": ["b"], "test": ["c", "d"]}
LOOSE: dict[str, Any] = {
    "margin": 0.9,
    "slice_margin": 0.9,
    "groups": 20,
    "drifted": None,
    "expected": ["x"],
    "score_psi": None,
    "drift_groups": 20,
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Lists that x orders well; y is noise, and 0 but on a television. In period d x is larger than it ever was."""
    folder, rng = tmp_path_factory.mktemp("gate"), np.random.default_rng(0)
    rows = []
    for period in "abcd":
        for i in range(150):
            labels = (rng.random(8) < 0.2).astype(float)
            x = labels + rng.normal(0, 0.5, 8) + (9 if period == "d" else 0)
            y = rng.normal(size=8) if i % 5 == 0 else np.zeros(8)
            rows.append(Row(period, np.stack([x, y], 1).tolist(), labels.tolist(), "tv" if i % 5 == 0 else "web"))
    data = write_log(str(folder / "data"), rows, [Feature(name="x"), Feature(name="y")], row_group=50)
    weights = {"good": [1.0, 0.0], "worse on tv": [1.0, -2.0], "swapped": [0.0, 1.0]}
    bundles = {name: linear_teacher(str(folder / name), data, of) for name, of in weights.items()}
    return {**bundles, "data": data, "out": str(folder / "gate")}


def config(places: dict[str, str], candidate: str, bounds: dict[str, Any], out: str) -> dict[str, Any]:
    return {
        "out": out,
        "production": places["good"],
        "candidate": places[candidate],
        "splits": {name: {"data": places["data"], "periods": of} for name, of in PERIODS.items()},
        "evaluate": {"slices": {"tv": "meta_device == 'tv'"}, "resamples": 200, "outliers": {"gap": None}},
        "bounds": {**LOOSE, **bounds},
    }


@pytest.fixture(scope="module")
def found(places: dict[str, str]) -> Evaluation:
    GateJob.model_validate(config(places, "worse on tv", {}, places["out"])).run()
    return Evaluation.read(f"{places['out']}/evaluation")


def drifts(found: Evaluation) -> dict[str, PeriodDrift]:
    assert found.by_period is not None
    return found.by_period.periods


def broken(found: Evaluation, **bounds: Any) -> list[tuple[str, str]]:
    moving = bounds.get("moving", ())
    verdict = judge(found, Bounds(**{**LOOSE, **bounds}), moving=moving)
    assert verdict.passed == (not verdict.reasons)
    return [(check.bound, check.where) for check in verdict.checks if not check.holds]


@pytest.mark.slow
def test_each_bound_catches_what_no_other_does(found: Evaluation) -> None:
    assert broken(found) == []
    assert broken(found, margin=0) == [("margin", "all")]
    assert broken(found, slice_margin=0.1) == [("slice_margin", "tv")]
    assert broken(found, groups=10_000) == [("groups", "all")]
    assert broken(found, drifted=0.4) == [("drifted", "d")]
    assert broken(found, score_psi=0.0) == [("score_psi", "c")], "in d the index is below what chance gives"


def compared(found: Evaluation, where: str = "tv") -> Comparison:
    (candidate,) = (method for method in found.methods if method.name == CANDIDATE)
    return candidate.slices[where].comparisons["ndcg@5"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "by", "end"),
    [
        ("margin", "shown", "low"),
        ("slice_margin", "shown", "high"),
        ("slice_margin", "mean", "difference"),
        ("slice_margin", "excluded", "low"),
    ],
)
def test_a_bound_is_broken_where_the_end_that_the_config_names_is_below_it(
    found: Evaluation, key: str, by: str, end: str
) -> None:
    where = "all" if key == "margin" else "tv"
    alone, limit = with_slices(found, {"tv": compared(found)}, groups=100), -getattr(compared(found, where), end)
    assert 0 < limit < 0.9
    assert broken(alone, slices_by=by, **{key: limit - 1e-6}) == [(key, where)]
    assert broken(alone, slices_by=by, **{key: limit + 1e-6}) == []


def test_of_several_slices_the_p_value_is_adjusted(found: Evaluation) -> None:
    assert broken(found, slice_margin=-(compared(found).high or 0) - 1e-6) == []


def with_slices(evaluation: Evaluation, slices: Mapping[str, Comparison], *, groups: int) -> Evaluation:
    """The evaluation with other slices, of so many groups each."""
    production, candidate = evaluation.methods
    everything = candidate.slices["all"]
    summaries = {name: summary.replace(groups=groups) for name, summary in everything.summaries.items()}
    made = {name: Scope(summaries=summaries, comparisons={evaluation.primary: of}) for name, of in slices.items()}
    changed = candidate.replace(slices={"all": everything, **made})
    return evaluation.replace(methods=(production, changed))


def refused(
    found: Evaluation, harm_S: Sequence[float], *, repetitions: int = 200, groups: int = 100
) -> list[list[str]]:
    """The slices at which each of many gates refuses a candidate that loses so much on each slice.

    NDCG of half of the groups is equal; that of the others differs with a deviation of .42, that is .3 over all.
    """
    rng, n = np.random.default_rng(0), len(harm_S) * repetitions
    names = [str(i) for i in range(n)]
    difference_QM = np.where(rng.random((groups, n)) < 0.5, 0.0, rng.normal(0, 0.42, (groups, n)))
    values = [np.zeros((groups, 1, n)), (difference_QM - np.tile(harm_S, repetitions))[:, None]]
    ((_, scope),) = scopes([[Blocks.from_values(of) for of in values]], names, baseline=0, samples=400, seed=0)
    differences = [scope.comparisons[name] for name in names]
    gates = []
    for first in range(0, n, len(harm_S)):
        slices = {f"s{i}": of for i, of in enumerate(differences[first : first + len(harm_S)])}
        gates.append([where for _, where in broken(with_slices(found, slices, groups=groups), slice_margin=0.01)])
    return gates


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm_S",
    [[0.0] * 10, nightly([0.0] * 20), nightly([0.0] * 50), nightly([0.01] * 20), [0.2, *[0.0] * 49]],
    ids=["10", "20", "50", "at", "one"],
)
def test_a_harmed_slice_is_found_and_harmless_ones_are_seldom_refused_however_many(
    found: Evaluation, harm_S: list[float]
) -> None:
    """A loss of the margin itself is harmless."""
    gates = refused(found, harm_S)
    harmed = {f"s{i}" for i, harm in enumerate(harm_S) if harm > 0.01}
    assert np.mean([bool(set(gate) - harmed) for gate in gates]) <= 0.05
    assert all(np.mean([name in gate for gate in gates]) >= 0.9 for name in harmed)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1_000, nightly(5_000)])
@pytest.mark.parametrize("harm", [0.0, 0.005, 0.02])
def test_the_burden_of_proof_decides_how_often_a_gate_errs(found: Evaluation, groups: int, harm: float) -> None:
    """Of many candidates that are worse by `harm`; the shares are those of docs/weeks.md."""
    rng, n = np.random.default_rng(2), 300
    values = [np.zeros((groups, 1, n)), rng.normal(-harm, 0.25, (groups, 1, n))]
    ((_, scope),) = scopes(
        [[Blocks.from_values(of) for of in values]], [str(i) for i in range(n)], baseline=0, samples=400, seed=0
    )
    alone = [with_slices(found, {"all": of}, groups=groups) for of in scope.comparisons.values()]
    shares = {mode: np.mean([bool(broken(one, margin=0.005, refuse=mode)) for one in alone]) for mode in REFUSED}
    for mode, by_groups in REFUSED.items():
        assert shares[mode] == pytest.approx(by_groups[groups][harm], abs=0.08), mode
    for one in alone:
        if not broken(one, margin=0.005, refuse="unproven"):
            assert not broken(one, margin=0.005, refuse="worse"), "what is proven is not worse"


REFUSED = {
    "unproven": {1_000: {0.0: 0.91, 0.005: 0.97, 0.02: 1.0}, 5_000: {0.0: 0.71, 0.005: 0.97, 0.02: 1.0}},
    "worse": {1_000: {0.0: 0.02, 0.005: 0.09, 0.02: 0.72}, 5_000: {0.0: 0.02, 0.005: 0.29, 0.02: 1.0}},
}
"""Share of refused candidates by mode, groups and true loss."""


def test_a_small_loss_within_the_margin_is_no_reason_where_groups_are_many(found: Evaluation) -> None:
    """Worse by .002 to .004 is shown, and worse by .005 excluded; only a smaller margin refuses it."""
    small = compared(found).replace(difference=-0.003, low=-0.004, high=-0.002)
    one = with_slices(found, {"all": small}, groups=10**6)
    assert broken(one, refuse="worse", margin=0.005) == []
    assert broken(one, refuse="worse", margin=0.003) == [("margin", "all")]


def test_the_verdict_says_how_many_groups_are_lacking(found: Evaluation, places: dict[str, str]) -> None:
    verdict = judge(found, Bounds(**{**LOOSE, "margin": 0.005}))
    assert verdict.power is not None
    assert verdict.power == _foreseen(found, 0.005)["candidate against production"]
    assert verdict.power.more == (verdict.power.needed or 0) - verdict.power.groups > 0
    assert f"the gate needs {verdict.power.more:,} more groups" in verdict.power.stated
    (reason,) = verdict.reasons
    assert f"needs {verdict.power.more:,} more groups" in reason
    lenient = judge(found, Bounds(**{**LOOSE, "margin": 0.005, "refuse": "worse"})).power
    assert lenient is not None
    assert lenient.replace(refuse="unproven") == verdict.power, "the same number says how often a loss is found"
    assert lenient.stated.startswith("A candidate worse than production by bounds.margin 0.005 is refused with")
    enough = Power.from_margin(0.005, 0.249, 20_000)
    assert (enough.more, "needs no more groups" in enough.stated) == (0, True)
    assert "no number of groups" in Power.from_margin(0.0, 0.249, 20_000).stated
    own = GateVerdict.read(places["out"]).power
    assert own is not None
    assert own.stated in (Path(places["out"]) / "report.md").read_text()


def test_one_broken_feature_is_enough_where_the_config_says_so(found: Evaluation) -> None:
    x, y = (drifts(found)["d"].features[name].psi for name in "xy")
    assert x > 5 > y, "x has moved by 18 standard deviations"
    assert broken(found, feature_psi=5) == [("feature_psi", "d")]
    assert broken(found, feature_psi=x) == []
    assert broken(found, feature_psi=5, drifted=0.4, moving=["x"]) == [], "x is expected to move"


@pytest.mark.slow
def test_moving_names_features_of_the_data_set_that_no_ranker_has_to_read(
    places: dict[str, str], tmp_path: Path
) -> None:
    model, out = str(tmp_path / "x alone"), tmp_path / "gate"
    linear_teacher(model, places["data"], [1.0], leave_out=["y"])
    alone = {**places, "good": model}
    with pytest.raises(InputError, match=r"bounds.moving: no feature matches 'z'; the nearest is"):
        GateJob.model_validate(config(alone, "good", {"moving": ["z"]}, str(out))).run()
    assert not (out / "evaluation").exists(), "it is said before anything is measured"
    GateJob.model_validate(config(alone, "good", {"moving": ["y"]}, str(out))).run()


def test_a_single_feature_may_have_no_larger_index_than_the_bound_however_small_the_bound(found: Evaluation) -> None:
    assert found.by_period is not None
    period = drifts(found)["c"]
    x = period.features["x"].replace(psi=0.2, chance=0.0)
    periods = {"c": period.replace(features={**period.features, "x": x})}
    moved = found.replace(by_period=found.by_period.replace(periods=periods))
    assert broken(moved, feature_psi=0.1) == [("feature_psi", "c")]
    assert broken(moved, feature_psi=0.2) == []


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "margin"), [(1_000, 0.005), (3_000, 0.005), (1_000, 0.005 * 10**0.5)])
def test_a_plan_says_how_often_an_equal_candidate_passes(found: Evaluation, groups: int, margin: float) -> None:
    """The last one is that of 10,000 groups and .005: margin and error are larger by the same factor."""
    rng, n = np.random.default_rng(1), 400
    one = rng.normal(0, 0.249, (groups, 1, n))
    blocks = [Blocks.from_values(np.zeros((groups, 1, n))), Blocks.from_values(one)]
    ((_, scope),) = scopes([blocks], [str(i) for i in range(n)], baseline=0, samples=1000, seed=0)
    passed = [(c.low or 0) > -margin for c in scope.comparisons.values()]
    assert np.mean(passed) == pytest.approx(Power.from_margin(margin, 0.249, groups).passes, abs=0.06)
    evaluation = with_slices(found, {"all": next(iter(scope.comparisons.values()))}, groups=groups)
    (stated,) = _foreseen(evaluation, margin).values()
    assert stated.deviation == pytest.approx(0.249, rel=0.15)


def test_the_number_of_groups_that_a_plan_asks_for_gives_the_power() -> None:
    needed = Power.from_margin(0.005, 0.249, 1).needed
    assert needed is not None
    assert Power.from_margin(0.005, 0.249, needed).passes == pytest.approx(0.8, abs=1e-4)
    assert Power.from_margin(0.005, 0.249, needed - 1).passes < 0.8
    better = Power.from_margin(0.0, 0.249, 10**6)
    assert (better.passes, better.needed) == (pytest.approx(0.025), None)
    assert [Power.from_margin(margin, 0.0, 9).passes for margin in (0.0, 0.1)] == [0.0, 1.0]


@pytest.mark.usefixtures("found")
def test_a_plan_needs_no_candidate(
    places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By production alone, at several correlations; and by an evaluation that is there."""
    values = config(places, "good", {"margin": 0.005}, str(tmp_path / "gate"))
    del values["candidate"]
    path = tmp_path / "gate.yaml"
    path.write_text(yaml.safe_dump(values))
    command = ["gate", "--config", str(path), "--plan"]
    monkeypatch.setattr(sys, "argv", command)
    cli.main(gate.COMMAND)
    alone = Evaluation.read(str(tmp_path / "gate" / "plan"))
    assert [method.name for method in alone.methods] == ["production"]
    rows = _foreseen(alone, 0.005)
    mean = alone.methods[0].slices["all"].summaries["ndcg@5"]
    table = pq.read_table(tmp_path / "gate" / "plan" / "groups.parquet").to_pandas()["ndcg@5"].dropna()
    assert mean.groups == len(table)
    for r in (0.5, 0.95):
        assert rows[f"a correlation of {r:g}"].deviation == pytest.approx(table.std() * (2 * (1 - r)) ** 0.5, rel=0.15)
    printed = capsys.readouterr().out
    assert all(f"{power.needed:,}" in printed for power in rows.values())
    monkeypatch.setattr(sys, "argv", [*command, "--set", f"plan_from={places['out']}/evaluation"])
    cli.main(gate.COMMAND)
    assert "candidate against production" in capsys.readouterr().out


def test_a_plan_says_why_a_method_alone_shows_no_deviation(found: Evaluation) -> None:
    method, all_ = found.methods[0], found.methods[0].slices["all"]
    for changed, problem in (
        ({"trials": (0.5, 0.6)}, "plan_from: the evaluation's only method has 2 bundles"),
        ({"low": None, "high": None}, "ndcg@5: no test group defines it; choose other periods"),
    ):
        scope = all_.replace(summaries={"ndcg@5": all_.summaries["ndcg@5"].replace(**changed)})
        alone = found.replace(methods=(method.replace(slices={"all": scope}),), leads={})
        with pytest.raises(InputError, match=problem):
            _foreseen(alone, 0.005)


def test_what_is_not_known_is_said(found: Evaluation, places: dict[str, str]) -> None:
    verdict = judge(found, Bounds(**{**LOOSE, "slice_margin": -(compared(found).high or 0) + 1e-6}))
    assert verdict.not_excluded == ("tv",)
    assert verdict.not_judged == ("outliers",), "no group has an outlier value"
    strict = judge(found, Bounds(**{**LOOSE, "groups": 60}))
    assert strict.not_judged == ("outliers", "tv")
    written = GateVerdict.read(places["out"])
    leaks = [check for check in written.checks if check.bound == "expected"]
    assert [check.where for check in leaks] == ["x"]
    assert written == judge(found, Bounds(**LOOSE), leaks)
    assert "# Gate: passed" in (Path(places["out"]) / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("candidate", "bounds", "broken"),
    [
        ("good", {"slices_by": "excluded", "slice_margin": 0.0}, []),
        ("good", {"margin": 0}, ["all groups"]),
        ("swapped", {"slice_margin": 0.01}, ["all groups", "slice tv", "slice period=c", "slice period=d"]),
    ],
)
def test_the_command_ends_with_the_verdict_and_a_line_for_each_broken_bound(
    candidate: str,
    bounds: dict[str, Any],
    broken: list[str],
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The lower end of a bundle's difference from itself is 0, which is not better, but not worse either."""
    path, out = tmp_path / "gate.yaml", str(tmp_path / "gate")
    path.write_text(yaml.safe_dump(config(places, candidate, {"margin": 0.005, **bounds}, out)))
    monkeypatch.setattr(sys, "argv", ["gate", "--config", str(path)])
    status = 0
    try:
        cli.main(gate.COMMAND)
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == (Refused.status if broken else 0)
    assert Refused.status == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("refused: ")]
    assert [line.split(":")[1].split("NDCG")[0].strip() for line in lines] == broken
    verdict = GateVerdict.read(out)
    assert (verdict.passed, [f"refused: {reason}" for reason in verdict.reasons]) == (not broken, lines)


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """Ten features of documents and ten of lists that never drift, in periods of 200 lists, but for the last two.

    One of these has 40 lists. In the other all features have moved, and deviate twice as much. Every other feature lies
    300 deviations from 0.
    """
    folder, rng = tmp_path_factory.mktemp("steady"), np.random.default_rng(0)
    sizes = {"a": 300, "b": 200} | {f"c{i:02}": 200 for i in range(15)} | {"few": 40, "moved": 200}
    rows = []
    for period, size in sizes.items():
        for _ in range(size):
            x = np.hstack([rng.normal(size=(8, 10)), np.tile(rng.normal(size=10), (8, 1))])
            x = 2 * x + 1 if period == "moved" else x
            rows.append(Row(period, (x + [0, 300] * 10).tolist(), (x[:, 0] > 1).astype(float).tolist()))
    features = [Feature(name=f"f{i}") for i in range(20)]
    data = write_log(str(folder / "data"), rows, features, row_group=50)
    model = linear_teacher(str(folder / "model"), data, [1.0] * 20)
    names = {"train": ["a"], "validation": ["b"], "test": [period for period in sizes if period not in ("a", "b")]}
    splits = {name: {"data": data, "periods": of} for name, of in names.items()}
    out = str(folder / "gate")
    evaluate = {"resamples": 100, "outliers": {"gap": None}}
    job = {"out": out, "production": model, "candidate": model, "splits": splits, "evaluate": evaluate}
    with pytest.raises(Refused):
        GateJob.model_validate(job).run()
    return Evaluation.read(f"{out}/evaluation")


@pytest.mark.nightly
def test_what_does_not_drift_is_not_refused_and_what_drifts_is(steady: Evaluation) -> None:
    verdict = judge(steady, Bounds())
    refused = [(check.bound, check.where) for check in verdict.checks if not check.holds]
    assert refused == [("drifted", "moved"), ("score_psi", "moved")]
    assert verdict.drift_not_judged == ("few",)
    periods = drifts(steady)
    assert periods["few"].spreads[CANDIDATE].psi > 0.25, "that is what chance alone does"
    judged = [check.where for check in verdict.checks if check.bound in ("drifted", "score_psi")]
    assert sorted(judged) == sorted(2 * [period for period in periods if period != "few"])


@pytest.mark.slow
def test_chance_is_what_the_index_is_without_drift(steady: Evaluation) -> None:
    """Of features that are equal in a list, and of scores; documents that are independent leave less to chance."""
    never = [period for name, period in drifts(steady).items() if name.startswith("c")]
    of_lists = [period.features[f"f{i}"] for period in never for i in range(10, 20)]
    assert np.mean([f.psi - f.chance for f in of_lists]) == pytest.approx(0.0, abs=0.03)
    assert np.mean([f.chance for f in of_lists]) > 0.07
    of_documents = [period.features[f"f{i}"] for period in never for i in range(10)]
    assert all(f.psi < f.chance for f in of_documents)
    scores = [period.spreads[CANDIDATE] for period in never]
    assert np.mean([s.psi - s.chance for s in scores]) == pytest.approx(0.0, abs=0.06)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate": {"baseline": "gbdt"}}, r"evaluate.baseline: leave it out"),
        ({"candidate": None}, "ask for a plan with --plan"),
        ({"plan_from": "x"}, "is read with --plan only"),
    ],
)
def test_settings_that_do_not_fit_are_refused(places: dict[str, str], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GateJob.model_validate({**config(places, "good", {}, "out"), **changes})
