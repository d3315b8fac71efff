"""Gauges: without Ray nothing is imported or started; with Ray its exporter has the last of each number."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ltrscale.config import Config
from ltrscale.stages import tracking
from ltrscale.stages.runs import recorded
from ltrscale.stages.tracking import Gauges

STEP = {"step": 3, "loss": 0.5, "groups": 4, "documents": 40, "wait_s": 0.25}
EPOCH = {
    "phase": "full",
    "epoch": 1,
    "loss": 0.75,
    "groups": 8,
    "missed": 0,
    "repeated": 0,
    "validation_ndcg@5": 0.6,
    "workers": [{"wait_percent": 1.0, "memory_gb": 0.5}, {"wait_percent": 2.0, "memory_gb": 0.25}],
}


@pytest.mark.slow
def test_a_process_without_ray_imports_nothing_for_it(tmp_path: Path) -> None:
    script = f"""
import sys, threading
from ltrscale.config import Config
from ltrscale.stages.runs import recorded
with recorded({str(tmp_path / "out")!r}, Config(), "pretrain") as report:
    before = threading.active_count()
    report({STEP})
    assert threading.active_count() == before
assert "ray" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


class Metric:
    """Stands in for a metric of Ray, whose exporter another test reads with Prometheus."""

    kept: dict[tuple[str, ...], float]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        self.name, self.tag_keys = name, tag_keys

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self.tag_keys
        Metric.kept[self.name, *tags.values()] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses others"
        Metric.kept[self.name, *tags.values()] = Metric.kept.get((self.name, *tags.values()), 0) + value


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], float]:
    from ray.util import metrics

    Metric.kept = {}
    monkeypatch.setattr(metrics, "Gauge", Metric)
    monkeypatch.setattr(metrics, "Counter", Metric)
    monkeypatch.setattr(tracking, "_is_connected", lambda: True)
    monkeypatch.setattr(tracking, "_REFRESH_S", 0.05)
    return Metric.kept


def test_counters_add_up_and_gauges_keep_the_last(kept: dict[tuple[str, ...], float]) -> None:
    with Gauges("runs/a", "finetune") as export:
        for record in ({"running_workers": 2, "restarts": 0}, STEP, {**STEP, "step": 4, "loss": None, "wait_s": 0.0}):
            export(record)
        export(EPOCH)
        export({"preflight": "footers", "files": 3})
    run, full = ("runs/a", "finetune"), ("runs/a", "full")
    assert kept == {
        ("ltrscale_running_workers", *run): 2,
        ("ltrscale_restarts", *run): 0,
        ("ltrscale_step", *run): 4,
        ("ltrscale_loss", *run): 0.5,
        ("ltrscale_groups", *run): 8,
        ("ltrscale_documents", *run): 80,
        ("ltrscale_wait_s", *run): 0.25,
        ("ltrscale_epoch", *full): 1,
        ("ltrscale_epoch_loss", *full): 0.75,
        ("ltrscale_epoch_groups", *full): 8,
        ("ltrscale_missed", *full): 0,
        ("ltrscale_repeated", *full): 0,
        ("ltrscale_validation", *full, "ndcg@5"): 0.6,
        ("ltrscale_worker_wait_percent", *full, "0"): 1,
        ("ltrscale_worker_wait_percent", *full, "1"): 2,
        ("ltrscale_worker_memory_gb", *full, "0"): 0.5,
        ("ltrscale_worker_memory_gb", *full, "1"): 0.25,
    }


def test_what_ray_refuses_costs_the_gauges_and_not_the_run(
    kept: dict[tuple[str, ...], float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(metric: Metric, value: float, tags: dict[str, str]) -> None:
        raise ValueError(f"{metric.name} is another's: {value} {tags}")

    with Gauges("runs/a", "finetune") as export:
        export({**STEP, "wait_s": -1e-9})  # of a clock with few digits
        assert len(kept) == 4
        with monkeypatch.context() as refusing:
            refusing.setattr(Metric, "set", refuse)
            export(STEP)
            export(STEP)
        export(EPOCH)
    assert len(kept) == 4
    assert [message.partition(" is ")[0] for message in caplog.messages] == ["gauges: ltrscale_step"]


def test_gauges_stay_until_the_run_ends_though_ray_forgets_them(
    kept: dict[tuple[str, ...], float], tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    with recorded(out, Config(), "pretrain") as report:
        report({"running_workers": 2, "restarts": 1})
        kept.clear()
        while len(kept) < 2:
            time.sleep(0.01)
        (refreshing,) = [thread for thread in threading.enumerate() if thread.name == "gauges"]
    refreshing.join(10)
    assert not refreshing.is_alive()
    labels = (out.strip("/"), "pretrain")
    assert kept == {("ltrscale_running_workers", *labels): 2, ("ltrscale_restarts", *labels): 1}
