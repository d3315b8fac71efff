"""What a model took: the time before the first step stands apart, and a resumed training adds its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from ltrscale.errors import Stopped
from ltrscale.experiments import records
from ltrscale.experiments.records import Spent, timed
from ltrscale.progress import Report


def test_the_time_before_the_first_step_is_recorded_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, listeners = SimpleNamespace(now=0.0, monotonic=lambda: clock.now), list[Report]()

    @contextmanager
    def heard_by(listener: Report) -> Iterator[None]:
        listeners.append(listener)
        yield

    monkeypatch.setattr(records, "time", clock)
    monkeypatch.setattr(records, "heard_by", heard_by)

    def train(start: float, steps: int, *, stops: bool = False) -> None:
        listeners[-1]({})
        clock.now += start
        for _ in range(steps):
            clock.now += 1
            listeners[-1]({"step": 1, "documents": 100})
        if stops:
            raise Stopped

    with pytest.raises(Stopped), timed(str(tmp_path), "settings"):
        train(9, steps=2, stops=True)
    spent = Spent.read(str(tmp_path))
    assert spent is not None
    assert (spent.seconds, spent.start_s, spent.documents, spent.done) == (11, 10, 200, False)
    with timed(str(tmp_path), "settings"):
        train(4, steps=3)
        train(0, steps=1)  # another stage of the same model
    spent = Spent.read(str(tmp_path))
    assert spent is not None
    assert (spent.seconds, spent.start_s, spent.documents, spent.done) == (19, 15, 600, True)
