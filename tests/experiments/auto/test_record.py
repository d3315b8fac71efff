"""The time of a run of jobs.auto: what killed processes have spent counts, but for some seconds each."""

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_until

from ltrscale.experiments.auto import record
from ltrscale.experiments.auto.record import AutoRecord, Entry, RecordKeeper

BEAT_S = 5


def record_at(url: str) -> AutoRecord:
    return AutoRecord.model_validate_json(Path(url).read_bytes())


def killed_after(url: str, lives: list[int]) -> AutoRecord:
    """The record of processes that trained one model, and were killed after these seconds each."""
    now = 100.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "time", SimpleNamespace(monotonic=lambda: now))
        for life in lives:
            kept = RecordKeeper(url, AutoRecord.resumed(url, "data", 1.0), now)
            (entry,) = kept.record.entries or (kept.note(Entry(method="scratch")),)
            with kept.training(entry):
                for second in range(life):
                    if second % BEAT_S == 0:
                        kept.beat()
                    now += 1
            now += 1000  # until the command is given again
    return record_at(url)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_any_number_of_kills_costs_no_more_than_the_time_between_two_beats_each(lives: list[int]) -> None:
    with TemporaryDirectory() as folder:
        last = killed_after(f"{folder}/auto.json", lives)
    for minutes in (last.minutes, last.entries[0].minutes):
        assert 0 <= sum(lives) - 60 * minutes + 1e-6 <= len(lives) * BEAT_S + 2e-6


def test_the_time_goes_on_while_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_BEAT_S", 0.02)
    url = str(tmp_path / "auto.json")
    kept = RecordKeeper(url, AutoRecord(of="data", budget=1.0))
    entry = kept.note(Entry(method="trees"))

    def spent() -> tuple[float, float]:
        read = record_at(url)
        return read.minutes, read.entries[0].minutes

    with kept.beating(), kept.training(entry):
        before = spent()
        wait_until(lambda: all(now > then for now, then in zip(spent(), before, strict=True)))


def test_a_model_that_is_there_stays_there_whatever_the_beat(tmp_path: Path) -> None:
    kept = RecordKeeper(str(tmp_path / "auto.json"), AutoRecord(of="data", budget=1.0))
    with kept.training(kept.note(Entry(method="trees"))) as so_far:
        kept.beat()
    kept.note(done := so_far().replace(state="done"))
    kept.beat()
    assert record_at(kept.url).entries == (done,)
