"""The benchmarks have every loss, metric, pretext objective and encoder that a config may name."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nightly import nightly

from jobs.bench import bench, device, growth, losses, metrics, models, prepare, training
from jobs.bench.measure import Cost, Row
from ltrscale.config import kind_of, members
from ltrscale.errors import InputError
from ltrscale.models.choices import FeatureEncoderConfig
from ltrscale.models.encoders import MLPConfig
from ltrscale.pretext.choices import FeatureMethodConfig
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.ranking.choices import MetricConfig
from ltrscale.ranking.loss_choices import LossConfig

KINDS = [kind_of(cls) for cls in members(LossConfig)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_is_timed_beside_its_padded_form_if_it_has_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "costs", lambda *_: [Cost(1, 1.0, None)] * 4)  # a process each
    row, *memory = losses.measure(kind, groups=4)
    assert row.name.startswith(f"{kind}, ")
    assert row.ours.endswith(" docs/CPU-s")
    assert len(memory) == (kind in losses.PEERS)
    assert (row.figure is not None) == bool(row.peer) == (kind in losses.PEERS)


def test_every_padded_form_belongs_to_an_existing_loss() -> None:
    assert set(losses.PEERS) <= set(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("cls", members(MetricConfig), ids=kind_of)
def test_every_metric_is_timed(cls: type) -> None:
    row = metrics.measure(cls, groups=4)
    assert row.name.startswith(kind_of(cls))
    assert row.figure


def test_a_peer_that_is_not_installed_is_named_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ranx", None)
    row = next(iter(metrics.bench_metrics()))
    assert row.figure is None
    assert "ranx is not installed" in row.note


def test_each_figure_is_kept_as_soon_as_it_is_there_and_judged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def two_rows() -> Iterator[Row]:
        yield Row("speed", 2.0, goal=1.5)
        yield Row("memory", 3, goal=1.5, at_least=False)
        raise OSError("the disk is full")

    monkeypatch.setitem(bench.BENCHES, "text", two_rows)
    monkeypatch.setitem(bench.BENCHES, "scale", lambda: [Row("a count", 1000, note="ltrscale[dev]")])
    with pytest.raises(OSError, match="full"):
        bench.BenchJob(only=("text",), out=str(tmp_path)).run()
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["figure"] for row in rows] == [2.0, 3]
    with caplog.at_level("INFO", "ltrscale"):
        bench.BenchJob(only=("scale",)).run()
    assert "measuring scale, 1 of 1" in caplog.text
    printed = capsys.readouterr().out
    assert "1,000" in printed
    assert "ltrscale[dev]" in printed, "brackets are no style"
    assert (Row("speed", 2.0, goal=1.5).met, Row("m", 3, goal=1.5, at_least=False).met) == (True, False)
    assert Row("a count", 1000).met is None


@pytest.mark.parametrize(("only", "quick"), [("speed", False), ("wide", True)])
def test_what_cannot_be_measured_is_refused_before_the_work(only: str, quick: bool) -> None:
    with pytest.raises(InputError, match=f"only: .*'{only}'"):
        bench.BenchJob(only=(only,), quick=quick).run()


@pytest.mark.nightly
def test_evaluating_committed_scores_is_timed_beside_two_scans(tmp_path: Path) -> None:
    whole, needed = metrics.speed(tmp_path, 300, metrics.SHORT)
    assert whole.goal == 0.3
    assert whole.ours == needed.ours
    assert whole.figure
    assert needed.figure


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls",
    [
        cls if cls in (SimCLRRankConfig, MLPConfig) else nightly(cls)
        for cls in (*members(FeatureMethodConfig), *members(FeatureEncoderConfig))
    ],
    ids=kind_of,
)
def test_a_step_of_every_objective_and_through_every_encoder_is_counted(cls: type) -> None:
    what = "method" if cls in members(FeatureMethodConfig) else "encoder"
    step = device.steps()[f"{what} {kind_of(cls)}"]
    assert device.count(step, device.lists(1)).counts.launches > 10


@pytest.mark.slow
def test_the_encoder_of_text_is_timed_beside_its_padded_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "costs", lambda *_: [Cost(1, 1.0, None)])  # a process each
    speed, memory = training.bench_text(sequences=4)
    assert speed.goal == 1.5
    assert speed.figure
    assert memory.figure == 1


@pytest.mark.nightly
def test_preparing_rows_of_items_is_timed_beside_duckdb() -> None:
    rows = [*prepare.bench_items(queries=20)]
    assert len(rows) == 3
    assert all(row.goal == 0.5 and row.figure for row in rows)


@pytest.mark.slow
def test_scoring_is_timed_beside_a_bare_loop() -> None:
    (row,) = models.bench_scoring(groups=4)
    assert row.goal == 0.9
    assert row.figure


@pytest.mark.nightly
@pytest.mark.slow
def test_every_stage_takes_a_list_above_its_budget_of_documents(tmp_path: Path) -> None:
    shape = growth.Shape(features=100, length=9000, long=1, short=60)
    taken = growth.costs_of_stages(tmp_path / "wide", shape)
    assert taken.keys() == growth.GOALS.keys()
    # ten times the list, and what a process keeps for small data
    assert max(cost.memory for cost in taken.values()) < 10 * shape.longest_bytes + (400 << 20)


@pytest.mark.nightly
def test_a_step_with_a_table_on_the_host_sends_and_takes_less_than_with_a_dense_one() -> None:
    for row in growth.table_rows(1_000_000, repeats=3):
        assert row.figure is not None
        assert row.goal is not None
        assert row.figure < row.goal, row
