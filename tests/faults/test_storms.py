"""A storm over a training on six nodes: workers are killed, nodes are lost and others get notice, again and again."""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty_pretraining import (
    Attempt,
    FaultyPretraining,
    attempts,
    bundle_weights,
    check_exactly_once,
    in_background,
    process_launcher,
    run_pretraining,
    small_config,
)
from ray.cluster_utils import Cluster
from ray_nodes import NODE, give_notice, nodes, training_workers
from shared_cluster import SharedCluster
from waiting import wait_until

from ltrscale.progress import log
from ltrscale.runtime.workers import WorkersConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),  # the workers start seven times, each time a minute on a busy machine
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),  # Ray's
]
NODES, WORKERS, EPOCHS, FAULTS = 6, 3, 3, 6
STEP_S = 0.5


@pytest.fixture
def cluster(shared_cluster: SharedCluster) -> Iterator[Cluster]:
    """Six nodes on this machine; the first belongs to this process."""
    shared_cluster.stop()
    with nodes(NODES) as cluster:
        yield cluster


@dataclass(frozen=True)
class Struck:
    """A fault, and the start of the workers that it ended."""

    kind: str
    at_s: float
    attempt: int


class Storm:
    """Faults of each kind in turn, in a random order, each after the workers have made some steps."""

    def __init__(self, cluster: Cluster, steps: str, seed: int) -> None:
        self.cluster, self.steps, self.random = cluster, steps, random.Random(seed)
        self.struck: list[Struck] = []
        self.over = threading.Event()
        self._lost = 0

    def blow(self, faults: int) -> None:
        """Strike that often, or until the training is over."""
        kinds = [kind for _ in range(-(-faults // 3)) for kind in self.random.sample(["kill", "loss", "notice"], 3)]
        for kind in kinds[:faults]:
            attempt = self._await_steps(self.random.randint(2, 4))
            if attempt is None:
                return
            self._strike(kind, attempt)

    def _await_steps(self, steps: int) -> Attempt | None:
        """Wait until a start of the workers that no fault has ended has made so many steps; None at the end."""
        ended = max((struck.attempt for struck in self.struck), default=0)

        def newest() -> Attempt | None:
            return next((a for a in attempts(self.steps) if a.number > ended and len(a.steps) >= steps), None)

        wait_until(lambda: self.over.is_set() or newest() is not None)
        return newest()

    def _strike(self, kind: str, attempt: Attempt) -> None:
        nodes = [node for node in self.cluster.worker_nodes if node.node_id in attempt.nodes.values()]
        node = self.random.choice(sorted(nodes, key=lambda node: node.node_id))
        self.struck.append(Struck(kind, time.time(), attempt.number))
        match kind:
            case "kill":
                os.kill(self.random.choice(training_workers(node)), signal.SIGKILL)
                return
            case "notice":
                give_notice(self.cluster, node)
                wait_until(lambda: self.over.is_set() or attempts(self.steps)[-1].number > attempt.number)
        self.cluster.remove_node(node, allow_graceful=False)
        self._lost += 1

    def replace_lost(self, _: object) -> None:
        """Add a node for each that is gone, as a cloud does; only the main thread may."""
        while self._lost:
            self._lost -= 1
            self.cluster.add_node(**NODE)


def costs(struck: list[Struck], found: list[Attempt]) -> list[tuple[str, float, int]]:
    """For each fault its kind, the seconds until the workers run again, and the steps that they repeat."""
    rows = []
    for fault, (before, after) in zip(struck, itertools.pairwise(found), strict=True):
        assert fault.attempt == before.number
        rows.append((fault.kind, after.number / 1e9 - fault.at_s, max(before.steps) + 1 - min(after.steps)))
    return rows


def test_a_training_through_a_storm_equals_an_undisturbed_one(
    cluster: Cluster, synthetic_dataset: str, tmp_path: Path
) -> None:
    config = small_config(epochs=EPOCHS)
    calm = FaultyPretraining(str(tmp_path / "calm"))
    stormy = FaultyPretraining(str(tmp_path / "stormy"), every_step_s=STEP_S)
    out = {name: str(tmp_path / f"{name}-out") for name in ("calm", "stormy")}
    run_pretraining(calm, synthetic_dataset, out["calm"], launch=process_launcher(WORKERS, restarts=0), config=config)
    storm = Storm(cluster, stormy.folder, seed=0)
    thread = in_background(lambda: storm.blow(FAULTS))
    workers = WorkersConfig(number=WORKERS, cpus=2, max_failures=FAULTS)
    try:
        run_pretraining(
            stormy, synthetic_dataset, out["stormy"], workers=workers, config=config, report=storm.replace_lost
        )
    finally:
        storm.over.set()
        thread.join()
    rows = costs(storm.struck, attempts(stormy.folder))
    for kind, seconds, repeated in rows:
        log.info("%s: %.0f s until the workers ran again, %d steps repeated", kind, seconds, repeated)
    assert {kind for kind, *_ in rows} == {"kill", "loss", "notice"}
    assert all(repeated == 0 for kind, _, repeated in rows if kind == "notice")
    check_exactly_once(stormy.folder, epochs=EPOCHS)
    assert bundle_weights(out["stormy"]) == bundle_weights(out["calm"])
