"""Nodes of a Ray cluster on this machine: their loss, notices of their end, and the workers that run on them."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray._private import ray_constants
from ray._private.node import Node
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

NODE = {"num_cpus": 3, "include_dashboard": False}
"""Room for one worker of two CPUs, and for reading."""
_NOTICE_S = 3600
"""Longer than any test: what counts is that the run has left the node when it goes."""


@contextmanager
def nodes(number: int) -> Iterator[Cluster]:
    """A cluster of this many nodes on this machine, to which this process is connected; the first belongs to it."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        for _ in range(number - 1):
            cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        gc.collect()


def give_notice(cluster: Cluster, node: Node) -> None:
    """Announce to the cluster that a node will disappear, as a cloud does before it takes a spot instance back."""
    accepted, why = ray._raylet.GcsClient(address=cluster.address).drain_node(
        node.node_id,
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "a test",
        int(1000 * (time.time() + _NOTICE_S)),
    )
    assert accepted, why


def training_workers(node: Node) -> list[int]:
    """The process ids of the workers of Ray Train on a node."""
    (raylet,) = node.all_processes[ray_constants.PROCESS_TYPE_RAYLET]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            title = (folder / "cmdline").read_text()
        except OSError:  # it has just ended
            continue
        if parent == raylet.process.pid and "RayTrainWorker" in title:
            found.append(int(folder.name))
    return found
