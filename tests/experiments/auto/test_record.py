"""The time of a run of jobs.auto: what killed processes have spent counts, but for some seconds each."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_until

from ltrscale.experiments.auto import plan
from ltrscale.experiments.auto.plan import AutoRecord, RecordKeeper

BEAT_S = 5


def record_at(url: str) -> AutoRecord:
    return AutoRecord.model_validate_json(Path(url).read_bytes())


def killed_after(url: str, lives: list[int]) -> AutoRecord:
    """The record of processes that were killed after these seconds each."""
    now = 100.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "time", SimpleNamespace(monotonic=lambda: now))
        for life in lives:
            kept = RecordKeeper(url, AutoRecord.resumed(url, "data", 1.0), now)
            for second in range(life):
                if second % BEAT_S == 0:
                    kept.keep()
                now += 1
            now += 1000  # until the command is given again
    return record_at(url)


@pytest.mark.slow
@settings(max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_any_number_of_kills_costs_no_more_than_the_time_between_two_beats_each(lives: list[int]) -> None:
    with TemporaryDirectory() as folder:
        last = killed_after(f"{folder}/auto.json", lives)
    assert 0 <= sum(lives) - 60 * last.minutes + 1e-6 <= len(lives) * BEAT_S + 2e-6


def test_the_time_goes_on_while_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_BEAT_S", 0.02)
    url = str(tmp_path / "auto.json")
    kept = RecordKeeper(url, AutoRecord(of="data", budget=1.0), time.monotonic())
    kept.keep()
    with kept.beating():
        before = record_at(url).minutes
        wait_until(lambda: record_at(url).minutes > before)
