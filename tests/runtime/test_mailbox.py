"""Slots of workers that come and go."""

import pytest

from ltrscale.runtime import mailbox
from ltrscale.runtime.mailbox import Mailbox, ReportedMetrics, Running


def test_slots_keep_the_ranks_of_ray_trains_workers_and_follow_the_order_of_coming(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox, "_SETTLE_S", -1.0)
    box = Mailbox()
    assert not box.standing().changed
    assert [box.come("a"), box.come("b")] == [0, 0]
    assert box.standing().changed
    assert box.slot("a", after=0) is None
    box.resize(2, ("host", 1))
    assert not box.standing().changed
    of_first = [box.slot(name, after=0) for name in (0, 1, "a", "b")]
    assert [slot and (slot.resizes, slot.rank, slot.world) for slot in of_first] == [(1, rank, 4) for rank in range(4)]
    box.go("a")
    box.resize(2, ("host", 2))
    of_second = [box.slot(name, after=1) for name in (0, 1, "a", "b")]
    assert [slot and (slot.rank, slot.world, slot.store) for slot in of_second] == [
        (0, 3, ("host", 2)), (1, 3, ("host", 2)), None, (2, 3, ("host", 2))
    ]  # fmt: skip
    assert box.take() == [
        ReportedMetrics({"running_workers": workers}) for workers in (4, 3)
    ]  # the number of workers is reported


def test_joiners_wait_a_moment_for_others_and_end_when_the_workers_fail() -> None:
    box = Mailbox()
    box.come("a")
    assert not box.standing().changed  # others may come at the same time
    box.post(Running(0))
    box.resize(1, ("host", 1))
    assert box.slot("a", after=0) is None
