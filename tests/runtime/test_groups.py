"""Slots of workers that come and go, and nodes that could hold a worker."""

import pytest

from ltrscale.runtime import mailbox
from ltrscale.runtime.capacity import _fits
from ltrscale.runtime.mailbox import Mailbox, ReportedMetrics, Running
from ltrscale.runtime.workers import WorkersConfig


def test_slots_keep_the_ranks_of_ray_trains_workers_and_follow_the_order_of_coming(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox, "_SETTLE_S", -1.0)
    box = Mailbox()
    assert not box.standing().changed
    assert [box.come("a"), box.come("b")] == [0, 0]
    assert box.standing().changed
    assert box.slot("a", after=0) is None
    box.form(2, ("host", 1))
    assert not box.standing().changed
    of_first = [box.slot(name, after=0) for name in (0, 1, "a", "b")]
    assert [slot and (slot.group, slot.rank, slot.world) for slot in of_first] == [(1, rank, 4) for rank in range(4)]
    box.go("a")
    box.form(2, ("host", 2))
    of_second = [box.slot(name, after=1) for name in (0, 1, "a", "b")]
    assert [slot and (slot.rank, slot.world, slot.store) for slot in of_second] == [
        (0, 3, ("host", 2)), (1, 3, ("host", 2)), None, (2, 3, ("host", 2))
    ]  # fmt: skip
    assert box.take() == [
        ReportedMetrics({"running_workers": workers}) for workers in (4, 3)
    ]  # the number of workers is reported


def test_joiners_wait_a_moment_for_others_and_end_with_a_failed_group() -> None:
    box = Mailbox()
    box.come("a")
    assert not box.standing().changed  # others may come at the same time
    box.post(Running(0))
    box.form(1, ("host", 1))
    assert box.slot("a", after=0) is None


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ({}, True),
        ({"cpus": 5}, False),
        ({"gpus": 2}, True),
        ({"gpus": 3}, False),
        ({"accelerator": "H100"}, True),
        ({"accelerator": "A100"}, False),
        ({"labels": {"pool": "train"}}, True),
        ({"labels": {"pool": "!train"}}, False),
        ({"labels": {"pool": "in(read, train)"}}, True),
        ({"labels": {"zone": "a"}}, False),
        ({"labels": {"zone": "!a"}}, True),
    ],
)
def test_a_node_holds_a_worker_by_resources_accelerator_and_labels(settings: dict[str, object], fits: bool) -> None:
    has = {"CPU": 4.0, "GPU": 2.0, "accelerator_type:H100": 1.0}
    workers = WorkersConfig.model_validate({"number": 2, **settings})
    assert _fits({"Resources": has, "Labels": {"pool": "train"}}, workers) == fits
