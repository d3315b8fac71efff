"""The clock of `jobs.auto` on a machine that other work stops for random spans: the budget holds and nothing is lost.

Models are simulated: they take what was planned, some times over, in epochs, and end as trainings do, after the epoch
at which their minutes are up, or with what they have when the run asks them to stop. The decisions are the real ones.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltrscale.errors import Stopped
from ltrscale.experiments.auto import auto
from ltrscale.experiments.auto.auto import AutoJob, _Run
from ltrscale.experiments.auto.first_models import IN_CONTEXT, KNOWN_METHODS, STUDENT, AutoSizes
from ltrscale.experiments.auto.plan import AutoRecord, Decision, Entry, RecordKeeper, RunState, next_model
from ltrscale.experiments.first.configs import LogSize
from ltrscale.signals import stop_on_signal

EPOCHS = 12
LOGS = [(9_630, 7_000, 46), (550_000, 195_000, 13), (2_000_000, 20_000, 12)]


def sizes(log: tuple[int, int, int]) -> AutoSizes:
    return AutoSizes(LogSize(*log), lists=200, judged=20_000, tested=20_000, numbers=10, longest=40, cores=2, workers=1)


def stages(method: str, settings: Any) -> list[tuple[float, float]]:
    """The part of a method's time that each of its stages takes, and the seconds after which it ends."""
    if method == IN_CONTEXT:
        return [(1.0, np.inf)]
    parts = [settings.get(key, {}) for key in ("pretrain", "finetune", "student", "gbdt")]
    limits = [60 * part["minutes"] for part in (settings, *parts) if "minutes" in part]
    return [(1 / len(limits), limit) for limit in limits]


class Machine(_Run):
    """A run whose models only move a clock."""

    slowness: Callable[[], float]
    clock: SimpleNamespace
    finished: list[str]

    def model(self, entry: Entry) -> str:
        settings = self.record.methods[entry.trained_as]
        planned = entry.foretold or self.record.done(entry.method)[0].foretold
        parts = stages(entry.method, settings)[-1 if entry.number else 0 :]
        with stop_on_signal() as stopping:
            for number, (part, limit) in enumerate(parts, 1):
                began, epochs = self.clock.now, 0
                while epochs < EPOCHS and self.clock.now - began < limit:
                    self.clock.now += 60 * planned * part / EPOCHS * self.slowness()
                    if stopping():
                        if number < len(parts) or not epochs:
                            raise Stopped
                        break
                    epochs += 1
        self.finished.append(entry.name)
        return entry.name

    def scored(self, entry: Entry, url: str) -> float | None:  # noqa: ARG002
        return 50_000.0 / self.slowness()


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.sampled_from(LOGS), st.sampled_from([5.0, 60.0]), st.booleans())
def test_no_finished_model_is_lost_each_method_has_its_try_and_the_budget_holds(
    seed: int, log: tuple[int, int, int], budget: float, refits: bool
) -> None:
    rng, clock = np.random.default_rng(seed), SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now

    def slowness() -> float:
        """Some epochs wait for others' work."""
        return float(rng.choice([0.5, 1.0, 2.0, 6.0], p=[0.2, 0.4, 0.3, 0.1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ltrscale.signals.time", clock)
        for module in ("auto", "plan"):
            patch.setattr(f"ltrscale.experiments.auto.{module}.time", clock)
        patch.setattr(
            "ltrscale.experiments.auto.plan.storage", SimpleNamespace(check_lease=id, write_bytes=lambda *_: None)
        )
        patch.setattr(auto.Spent, "read", lambda _: None)
        patch.setattr(auto, "validation_metric", lambda *_: float(rng.uniform(0.4, 0.6)))
        config = AutoJob(out="out", data="data", budget=budget, refit=refits)
        kept = RecordKeeper("auto.json", AutoRecord(of="", budget=budget), 0.0)
        run = Machine(config, None, kept, sizes(log))  # type: ignore[arg-type]
        run.slowness, run.clock, run.finished = slowness, clock, []
        run.__dict__["refit_splits"] = object() if refits else None
        half_left: dict[str, bool] = {}

        def deciding(state: RunState) -> Decision | None:
            decision = next_model(state)
            if decision is not None:
                half_left.setdefault(decision.entry.name, state.minutes_left > budget / 2)
            return decision

        patch.setattr(auto, "next_model", deciding)
        run.train_all()
    entries = {entry.name: entry for entry in run.record.entries}
    assert [name for name, entry in entries.items() if entry.state == "done"] == run.finished
    for name in KNOWN_METHODS.keys() - {STUDENT}:  # whose turn comes later
        tried = entries[name].state != "late"
        assert tried or not half_left[name], (name, entries[name])
    assert clock.now / 60 <= 1.05 * budget
