"""Nodes that could hold a worker."""

import pytest

from ltrscale.runtime.capacity import _fits
from ltrscale.runtime.workers import WorkersConfig


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
