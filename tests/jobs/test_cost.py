"""Laws of the model of what a run costs, and a run of two workers that it is fitted to."""

import math
from pathlib import Path

import pytest

from jobs.bench import predict
from jobs.bench.cost import (
    Cluster,
    Machine,
    Network,
    Store,
    Workload,
    account_s,
    epoch_s,
    fit_host,
    fit_network,
    run_s,
    step,
)
from jobs.bench.many import write_groups

WORK = Workload(
    documents=1e6,
    row_groups=1000,
    bytes_per_document=100,
    documents_per_step=2000,
    compute_s=0.5,
    gradient_bytes=4e6,
)
NETWORK, FAST = Network(1e-3, 1e8), Store(0.01, 1e9, requests=1, at_once=4)


def of(machine: Machine, store: Store = FAST) -> Cluster:
    return Cluster(NETWORK, store, machine)


WORLDS = (1, 2, 4, 8, 64)


def test_the_slower_of_computing_and_reading_bounds_a_step() -> None:
    machine = Machine(cores=math.inf, host_s=0.1, start_s=0)
    slow = FAST._replace(request_s=4.0)
    alone = step(WORK, 1, of(machine))
    assert alone.seconds == alone.compute + alone.host == 0.6
    assert step(WORK, 1, of(machine, slow)).seconds == pytest.approx(2 * slow.row_group_s(1e5))


def test_a_step_is_longer_on_more_workers_and_an_epoch_shorter() -> None:
    machine = Machine(cores=math.inf, host_s=0.01, start_s=0)
    of_steps = [step(WORK, world, of(machine)).seconds for world in WORLDS]
    of_epochs = [epoch_s(WORK, world, of(machine)) for world in WORLDS]
    assert of_steps == sorted(of_steps)
    assert of_epochs == sorted(of_epochs, reverse=True)
    assert [account_s(WORK, world, FAST) * world for world in WORLDS] == pytest.approx([account_s(WORK, 1, FAST)] * 5)


def test_workers_that_share_cores_wait_for_one_another() -> None:
    shared, own = (Machine(cores, 0.1, 0) for cores in (2, math.inf))
    of_eight = [step(WORK, 8, of(machine)) for machine in (shared, own)]
    assert [one.host for one in of_eight] == pytest.approx([0.4, 0.1])


def test_a_run_is_its_start_and_its_epochs_and_pauses_for_each_checkpoint() -> None:
    machine = Machine(cores=math.inf, host_s=0, start_s=60, checkpoint_every_s=100, pause_s=0.5)
    epoch = epoch_s(WORK, 1, of(machine))  # 500 steps of .5 s
    before = 60 + account_s(WORK, 1, FAST)
    assert run_s(WORK, 1, of(machine)) == pytest.approx(before + epoch + 2 * 0.5)
    assert run_s(WORK, 1, of(machine), epochs=2) == pytest.approx(before + 2 * epoch + 5 * 0.5)


@pytest.mark.parametrize("host_s", [0.0, 0.03])
def test_a_fit_to_what_the_model_says_finds_the_model_again(host_s: float) -> None:
    machine = Machine(2, host_s, 0)
    small, large = ({w: NETWORK.exchange_s(n, w) for w in (1, 2, 4)} for n in (0, 4e6))
    network = fit_network(small, large, 4e6)
    assert network[:2] == pytest.approx(NETWORK[:2])
    steps = {w: step(WORK, w, of(machine, Store(0, math.inf, 0, 1))).seconds for w in (1, 2, 4)}
    assert fit_host(steps, WORK, network, 2) == pytest.approx(host_s, abs=1e-12)


@pytest.mark.nightly
def test_a_run_of_two_workers_takes_at_least_its_sleep(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    write_groups(data)
    setting = predict.Setting("short", 0.05, Store(0.0, math.inf, requests=0, at_once=1))
    times = predict._run(setting, data, 2, tmp_path)
    work = predict._workload(setting, data, 2)
    assert 0 < times.small < times.whole
    assert times.step > 0.9 * work.compute_s
    assert times.epoch > 0.9 * work.compute_s * work.steps(2)
    assert times.whole > times.epoch
