"""A cluster of three nodes that loses one, with or without notice."""

import logging
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import ray_nodes
import safetensors.torch
import torch
from faulty_pretraining import (
    Attempt,
    FaultyPretraining,
    attempts,
    await_step,
    bundle_weights,
    check_exactly_once,
    in_background,
    last_executions,
    run_pretraining,
    small_config,
)
from ray._private.node import Node
from ray.cluster_utils import Cluster
from ray_nodes import NODE, nodes
from shared_cluster import SharedCluster
from waiting import wait_until

from ltrscale.runtime.ray_internals import keep_sigterm
from ltrscale.runtime.workers import WorkersConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),  # Ray's
]
SGD = {"kind": "sgd", "learning_rate": 0.001}
"""Larger steps, or Adam, would make a difference of the rounding between numbers of workers."""


@pytest.fixture(scope="module")
def two_nodes(shared_cluster: SharedCluster) -> Iterator[Cluster]:
    """Two nodes on this machine; the first belongs to this process."""
    shared_cluster.stop()
    with nodes(2) as cluster:
        yield cluster


@pytest.fixture
def cluster(two_nodes: Cluster) -> Cluster:
    """A third node for each test, which removes one."""
    two_nodes.add_node(**NODE)
    return two_nodes


def a_workers_node(cluster: Cluster, attempt: Attempt) -> Node:
    """A node that runs a worker, but not this process."""
    return next(node for node in cluster.worker_nodes if node.node_id in attempt.nodes.values())


@pytest.mark.nightly
def test_after_the_loss_of_a_node_the_run_starts_again_from_a_checkpoint_on_others(
    cluster: Cluster, synthetic_dataset: str, tmp_path: Path
) -> None:
    steps, lost = str(tmp_path / "steps"), []

    def lose_a_node() -> None:
        node = a_workers_node(cluster, await_step(steps, 4))
        lost.append(node.node_id)
        cluster.remove_node(node, allow_graceful=False)

    thread = in_background(lose_a_node)
    run_pretraining(
        FaultyPretraining(steps, every_step_s=0.3),
        synthetic_dataset,
        str(tmp_path),
        workers=WorkersConfig(number=2, cpus=2),
    )
    thread.join()
    first, second = attempts(steps)
    assert 0 < min(second.steps) <= max(first.steps) + 1
    assert lost[0] in first.nodes.values()
    assert lost[0] not in second.nodes.values()
    check_exactly_once(steps)


@pytest.mark.nightly
def test_a_node_that_is_given_notice_is_left_with_no_step_lost(
    cluster: Cluster, synthetic_dataset: str, tmp_path: Path
) -> None:
    steps, drained = str(tmp_path / "steps"), []

    def leave_a_node() -> None:
        node = a_workers_node(cluster, await_step(steps, 4))
        ray_nodes.give_notice(cluster, node)
        drained.append(node.node_id)
        wait_until(lambda: len(attempts(steps)) == 2)
        cluster.remove_node(node, allow_graceful=False)

    thread = in_background(leave_a_node)
    workers = WorkersConfig(number=2, cpus=2, max_failures=0)  # it counts as no failure
    run_pretraining(FaultyPretraining(steps, every_step_s=0.3), synthetic_dataset, str(tmp_path), workers=workers)
    thread.join()
    first, second = attempts(steps)
    assert min(second.steps) == max(first.steps) + 1
    assert drained[0] not in second.nodes.values()
    check_exactly_once(steps)


@pytest.mark.slow
def test_workers_join_and_leave_an_epoch_under_way_and_no_step_is_lost_or_repeated(
    two_nodes: Cluster, synthetic_dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, steps = tmp_path / "expected", str(tmp_path / "steps")
    config = small_config(checkpoint_minutes=60, optimizer=SGD)  # none is written: the state travels through memory
    run_pretraining(FaultyPretraining(str(expected / "steps")), synthetic_dataset, str(expected), config=config)

    def come_and_go() -> None:
        await_step(steps, 2)
        with keep_sigterm():  # a thread cannot handle signals
            node = two_nodes.add_node(**NODE)
        wait_until(lambda: len(attempts(steps)) == 2)
        ray_nodes.give_notice(two_nodes, node)
        wait_until(lambda: len(attempts(steps)) == 3)
        two_nodes.remove_node(node, allow_graceful=False)

    thread = in_background(come_and_go)
    workers = WorkersConfig(number=(2, 3), cpus=2, max_failures=0)
    records: list[Mapping[str, object]] = []
    with caplog.at_level(logging.INFO, "ltrscale"):
        run_pretraining(
            FaultyPretraining(steps, every_step_s=1.0),
            synthetic_dataset,
            str(tmp_path),
            workers=workers,
            config=config,
            report=lambda record: records.append(dict(record)),
        )
    thread.join()
    first, second, third = attempts(steps)
    assert [first.world, second.world, third.world] == [2, 3, 2]
    assert [r["running_workers"] for r in records if "running_workers" in r] == [2, 3, 2]
    assert min(second.steps) == max(first.steps) + 1
    assert min(third.steps) == max(second.steps) + 1
    assert last_executions(steps) == last_executions(str(expected / "steps"))
    check_exactly_once(steps)
    weights, once = (safetensors.torch.load(bundle_weights(str(out))) for out in (tmp_path, expected))
    torch.testing.assert_close(weights, once, rtol=1e-4, atol=1e-6)
    assert "resumed from" not in caplog.text
    pauses = re.findall(r"is the first with (\d) workers, after a pause of [0-9.]+ s", caplog.text)
    assert pauses == ["3", "2"]
    assert caplog.text.count("training on") == 1  # Ray Train has started its workers once


@pytest.mark.nightly
def test_a_worker_that_is_killed_while_another_one_joins_costs_no_group(
    two_nodes: Cluster, synthetic_dataset: str, tmp_path: Path
) -> None:
    steps, over = str(tmp_path / "steps"), threading.Event()

    def join_and_kill() -> None:
        first = await_step(steps, 3)
        victim = next(node for node in two_nodes.list_all_nodes() if node.node_id in first.nodes.values())
        (worker,) = ray_nodes.training_workers(victim)
        with keep_sigterm():  # a thread cannot handle signals
            node = two_nodes.add_node(**NODE)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: attempts(steps)[-1].world == 3 or over.is_set())
        two_nodes.remove_node(node, allow_graceful=False)

    thread = in_background(join_and_kill)
    run_pretraining(
        FaultyPretraining(steps, every_step_s=0.5),
        synthetic_dataset,
        str(tmp_path),
        workers=WorkersConfig(number=(1, 3), cpus=2, max_failures=3),
        config=small_config(epochs=4),
    )
    over.set()
    thread.join()
    assert {attempt.world for attempt in attempts(steps)} >= {2, 3}
    check_exactly_once(steps, epochs=4)
