"""The gate: each bound alone, on one real evaluation of a candidate that is worse on a slice; exit statuses."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from linear_teacher import linear_teacher
from weekly_log import Row, write_log

from jobs import cli, gate
from ltrscale.data.dataset.manifest import Feature
from ltrscale.errors import Refused
from ltrscale.evaluation.decay import Decay
from ltrscale.evaluation.gate import CANDIDATE, Bounds, Verdict, judge
from ltrscale.evaluation.report import Evaluation
from ltrscale.evaluation.summarise import Comparison
from ltrscale.workflows.gate import GateJob, run_gate

ROOT = Path(__file__).resolve().parents[2]
PERIODS = {"train": ["a"], "validation": ["b"], "test": ["c", "d"]}
LOOSE: dict[str, Any] = {"margin": 0.9, "slice_margin": 0.9, "groups": 20, "drifted": None, "score_psi": None}


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
def found(places: dict[str, str]) -> tuple[Evaluation, Decay]:
    run_gate(GateJob.model_validate(config(places, "worse on tv", {}, places["out"])))
    return tuple(of.read(f"{places['out']}/{name}") for of, name in ((Evaluation, "evaluation"), (Decay, "drift")))  # type: ignore[return-value]


def broken(found: tuple[Evaluation, Decay], **bounds: Any) -> list[tuple[str, str]]:
    verdict = judge(*found, Bounds(**{**LOOSE, **bounds}))
    assert verdict.passed == (not verdict.reasons)
    return [(check.bound, check.where) for check in verdict.checks if not check.holds]


def test_each_bound_catches_what_no_other_does(found: tuple[Evaluation, Decay]) -> None:
    assert broken(found) == []
    assert broken(found, margin=0) == [("margin", "all")]
    assert broken(found, slice_margin=0.1) == [("slice_margin", "tv")]
    assert broken(found, groups=10_000) == [("groups", "all")]
    assert broken(found, drifted=0.4) == [("drifted", "d")]
    assert broken(found, score_psi=0.0) == [("score_psi", "c"), ("score_psi", "d")]


def on_tv(found: tuple[Evaluation, Decay]) -> Comparison:
    (candidate,) = (method for method in found[0].methods if method.name == CANDIDATE)
    return candidate.slices["tv"].comparisons["ndcg@5"]


@pytest.mark.parametrize(("by", "end"), [("shown", "high"), ("mean", "difference"), ("excluded", "low")])
def test_a_slice_is_judged_by_the_end_that_the_config_names(found: tuple[Evaluation, Decay], by: str, end: str) -> None:
    limit = -getattr(on_tv(found), end)
    assert 0 < limit < 0.9
    assert broken(found, slices_by=by, slice_margin=limit - 1e-6) == [("slice_margin", "tv")]
    assert broken(found, slices_by=by, slice_margin=limit + 1e-6) == []


def test_all_groups_are_judged_by_the_lower_end(found: tuple[Evaluation, Decay]) -> None:
    (candidate,) = (method for method in found[0].methods if method.name == CANDIDATE)
    low = candidate.slices["all"].comparisons["ndcg@5"].low
    assert low is not None
    assert broken(found, margin=-low - 1e-6) == [("margin", "all")]
    assert broken(found, margin=-low + 1e-6) == []


def test_what_is_not_known_is_said(found: tuple[Evaluation, Decay], places: dict[str, str]) -> None:
    compared = on_tv(found)
    assert compared.high is not None
    verdict = judge(*found, Bounds(**{**LOOSE, "slice_margin": -compared.high + 1e-6}))
    assert verdict.not_excluded == ("tv",)
    assert verdict.not_judged == ("outliers",), "no group has an outlier value"
    strict = judge(*found, Bounds(**{**LOOSE, "groups": 60}))
    assert strict.not_judged == ("outliers", "tv")
    assert Verdict.read(places["out"]) == judge(*found, Bounds(**LOOSE))
    assert "# Gate: passed" in (Path(places["out"]) / "report.md").read_text()


def test_a_bundle_passes_against_itself(
    places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lower end of a difference of 0 is 0, which is not better, but not worse either."""
    path = tmp_path / "gate.yaml"
    bounds = {"margin": 0.005, "slice_margin": 0.0, "slices_by": "excluded"}
    path.write_text(yaml.safe_dump(config(places, "good", bounds, str(tmp_path / "gate"))))
    monkeypatch.setattr(sys, "argv", ["gate", "--config", str(path)])
    cli.main(gate.COMMAND)
    assert "BROKEN" not in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["gate", "--config", str(path), "--set", "bounds.margin=0"])
    with pytest.raises(SystemExit) as ended:
        cli.main(gate.COMMAND)
    assert ended.value.code == Refused.status == 3


@pytest.mark.slow
def test_a_damaged_bundle_is_refused_by_the_command(places: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "gate.yaml"
    out = str(tmp_path / "gate")
    path.write_text(yaml.safe_dump(config(places, "swapped", {"margin": 0.005, "slice_margin": 0.01}, out)))
    done = subprocess.run(
        [sys.executable, "-m", "jobs.gate", "--config", str(path)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("refused: ")]
    assert [line.split(":")[1].split("NDCG")[0].strip() for line in lines] == [
        "all groups",
        "slice tv",
        "slice period=c",
        "slice period=d",
    ]
    assert "Traceback" not in done.stderr
    verdict = Verdict.read(out)
    assert (verdict.passed, [f"refused: {reason}" for reason in verdict.reasons]) == (False, lines)


def test_a_baseline_is_refused(places: dict[str, str]) -> None:
    values = config(places, "good", {}, "out")
    values["evaluate"]["baseline"] = "gbdt"
    with pytest.raises(ValueError, match=r"evaluate.baseline: leave it out"):
        GateJob.model_validate(values)
