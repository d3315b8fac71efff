"""Settings of workers, requests to stop, and training on a GPU."""

import os
import pickle
import re
import signal
import time
from pathlib import Path

import pytest
import ray
import torch
from pydantic import ValidationError
from ray.exceptions import ActorDiedError, OutOfMemoryError
from small_trainers import pretrain

from ltrscale import bundle
from ltrscale.config import Config
from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError, Stopped, UnavailableError
from ltrscale.runtime import engine, ray_internals
from ltrscale.runtime.engine import ray_cluster
from ltrscale.runtime.under_ray import _cause, _fits, _gone, _waiting_line
from ltrscale.runtime.workers import ONE, Workers, WorkersConfig
from ltrscale.signals import ending_on_signal, stop_on_signal
from ltrscale.training.pretrain import PretrainConfig


class Job(Config):
    workers: Workers = ONE


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [(3, 3, 3), ([2, 5], 2, 5), ({"number": 2, "gpus": 0.5}, 2, 2), ({"number": [1, 4], "cpus": 2}, 1, 4)],
)
def test_workers_are_a_number_a_range_or_settings(value: object, least: int, most: int) -> None:
    workers = Job.model_validate({"workers": value}).workers
    assert (workers.least, workers.most) == (least, most)


@pytest.mark.parametrize("number", [0, (0, 2), (3, 2)])
def test_a_range_of_workers_must_make_sense(number: int | tuple[int, int]) -> None:
    with pytest.raises(ValidationError, match="at least 1"):
        WorkersConfig(number=number)


def test_sigterm_asks_to_stop_within_the_block_and_ends_the_process_as_before_outside() -> None:
    def others(_number: int, _frame: object) -> None:
        raise Stopped

    def train() -> None:
        with stop_on_signal() as stopping:
            assert not stopping()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopping()
            assert stopping()

    before = signal.signal(signal.SIGTERM, others)
    try:
        with pytest.raises(Stopped):  # the block passes its signal on when it ends
            train()
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_users_error_explains_the_errors_of_the_other_workers() -> None:
    lost, died, given, stopped = RuntimeError("closed by peer"), ActorDiedError(), InputError("no file"), Stopped("so")
    assert _cause({0: lost, 1: died}) == (1, died)
    assert _cause({0: lost, 1: died, 2: given}) == (2, given)
    assert _cause({0: lost, 1: stopped, 2: died}) == (1, stopped)
    for_memory = OutOfMemoryError("the node ran low on memory")
    assert _cause({0: lost, 1: for_memory}) == (1, for_memory)
    assert _cause({3: lost}) == (3, lost)
    gone = UnavailableError("no answer")
    assert _cause({0: lost, 1: gone}) == (1, gone)
    assert _cause({0: gone, 1: given}) == (1, given)


def test_an_address_without_a_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UnavailableError, match=r"RAY_ADDRESS=127\.0\.0\.1:1: no Ray cluster answers"), ray_cluster(1):
        pass


def test_the_death_of_rays_processes_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no trial, task or model is recorded as failed: the same command resumes it."""
    for death in (ActorDiedError(), OutOfMemoryError("the node ran low on memory")):
        assert isinstance(_gone("Ray Train's controller", death), UnavailableError)

    def start(**_: object) -> None:
        raise RuntimeError("no raylet")

    monkeypatch.setattr(ray, "init", start)
    with pytest.raises(UnavailableError, match=r"^Ray has not started \(no raylet\); give the same command again$"):
        engine._connect()

    monkeypatch.setattr(ray_internals, "needed_processes", lambda: [1])
    monkeypatch.setattr(ray_internals, "is_alive", lambda _: False)
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(UnavailableError, match="have died"), engine._ending_with_the_cluster():
        time.sleep(60)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_a_worker_on_a_gpu_trains_in_bfloat16_and_reduces_with_nccl(synthetic_dataset: str, tmp_path: Path) -> None:
    network = {"encoder": {"width": 16, "blocks": 2}}
    config = PretrainConfig.model_validate(
        {"network": network, "epochs": 3, "precision": "bf16", "stream": {"docs_per_batch": 1000, "streams": 2}}
    )
    records: list[dict[str, object]] = []
    pretrain(
        config,
        Split(data=(synthetic_dataset,)),
        str(tmp_path),
        origin={},
        report=lambda record: records.append(dict(record)),
        workers=WorkersConfig(number=1, gpus=1),
    )
    assert bundle.load(str(tmp_path))
    (worker,) = next(record["workers"] for record in records if "workers" in record)  # type: ignore[misc]
    assert worker["gpu_gb"] > 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_has_the_exit_status_of_its_signal(number: int, status: int) -> None:
    def train() -> None:
        with stop_on_signal() as stopping:
            signal.raise_signal(number)
            assert stopping()
            raise Stopped("a worker has written a checkpoint")

    with pytest.raises(Stopped) as stopped:
        train()
    assert stopped.value.status == status
    assert pickle.loads(pickle.dumps(stopped.value)).status == status  # as Ray carries it from process to process
    with pytest.raises(Stopped, match="asked to stop") as ended, ending_on_signal():
        signal.raise_signal(number)
    assert ended.value.status == status


def test_an_error_that_a_library_makes_of_an_interrupt_is_a_stop() -> None:
    def query() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError("query interrupted") from None

    with pytest.raises(Stopped) as stopped, ending_on_signal():
        query()
    assert stopped.value.status == 130
    with pytest.raises(RuntimeError, match="a defect"), ending_on_signal():
        raise RuntimeError("a defect")


def test_a_signal_after_the_last_step_of_a_training_keeps_the_next_from_beginning() -> None:
    begun = []

    def train_twice() -> None:
        for name in ("first", "second"):
            begun.append(name)
            with stop_on_signal():
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(Stopped) as stopped, ending_on_signal():
        train_twice()
    assert (begun, stopped.value.status) == (["first"], 130)


def test_ctrl_c_stays_ignored_where_it_was() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_on_signal() as stopping:
            signal.raise_signal(signal.SIGINT)
            assert not stopping()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


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


@pytest.mark.parametrize(
    ("free", "said"),
    [
        ({"CPU": 3.0}, r"free in the cluster: 3 CPU, 0 GPU$"),
        ({"CPU": 4.0}, r"free in the cluster: 4 CPU, 0 GPU; these lie on several nodes, of which none has room for"),
    ],
)
def test_who_waits_for_room_says_what_is_free(
    free: dict[str, float], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 4.0}}])
    monkeypatch.setattr(ray, "available_resources", lambda: free)
    assert re.search(said, _waiting_line(WorkersConfig(number=2, cpus=2)))
