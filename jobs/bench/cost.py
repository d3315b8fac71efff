"""A model of what a run on many workers costs, fitted at 1, 2 and 4 workers and checked at 8 before it speaks of 64.

A worker computes and exchanges gradients while a thread reads ahead, so the slower of the two bounds a step:

    step(W) = max(compute + host max(1, W / cores) + exchange(W), reading)
    exchange(W) = hops(W) latency + 2 (W - 1) / W bytes / bandwidth
    reading = row groups of a step (requests request_s + bytes / rate) / reads at once + documents decode_s

`hops` is 2 (W - 1) in a ring, which gloo and NCCL take for large messages, and 2 ceil(log2 W) in a tree, NCCL's way for
small ones. `host` is a worker's own processor time in a step beside its computation: where W workers share fewer cores,
as in the experiment, they wait for one another; on a cluster each has its own. A run adds its start, the reading for
the account, the last steps in which not all streams have data, and the pauses of checkpoints.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Network(NamedTuple):
    """The connection between workers."""

    latency_s: float
    """Of one message."""
    bandwidth: float
    """Bytes a second of one worker."""
    tree: bool = False
    """Whether small messages take a tree and not a ring."""

    def exchange_s(self, n_bytes: float, world: int) -> float:
        """Seconds of one sum over the workers.

        Example:
            >>> Network(1e-3, 1e9).exchange_s(1e6, 1), round(Network(1e-3, 1e9).exchange_s(1e6, 2), 4)
            (0.0, 0.003)
            >>> [round(Network(1e-3, 1e9, tree=True).exchange_s(0, world), 3) for world in (2, 8, 64)]
            [0.002, 0.006, 0.012]
        """
        if world == 1:
            return 0.0
        hops = 2 * math.ceil(math.log2(world)) if self.tree else 2 * (world - 1)
        return hops * self.latency_s + 2 * (world - 1) / world * n_bytes / self.bandwidth


class Store(NamedTuple):
    """The storage of the data, as one reader sees it."""

    request_s: float
    """Until the first byte of an answer."""
    rate: float
    """Bytes a second of one request."""
    requests: float
    """Requests for a row group, one after the other: size and footer of the file, if it is not open, and the data."""
    at_once: int
    """Row groups that a worker reads at the same time."""

    def row_group_s(self, n_bytes: float) -> float:
        """Seconds between two row groups that a worker has read."""
        return (self.requests * self.request_s + n_bytes / self.rate) / self.at_once


class Machine(NamedTuple):
    """What all workers share, and what each costs beside its computation."""

    cores: float
    """Cores on which the workers run."""
    host_s: float
    """Processor time of a worker in a step, besides the sleeping or the GPU's computation."""
    start_s: float
    """From the command to the first step, without the reading for the account."""
    start_of_each_s: float = 0.0
    """More for each worker that shares a core."""
    checkpoint_every_s: float = 600.0
    """Seconds between checkpoints."""
    pause_s: float = 0.025
    """For which training pauses while a checkpoint is copied to memory; it is written beside training."""


class Cluster(NamedTuple):
    """What the workers run on."""

    network: Network
    store: Store
    machine: Machine


class Workload(NamedTuple):
    """An epoch, and a step of one worker."""

    documents: float
    row_groups: int
    bytes_per_document: float
    documents_per_step: float
    """Of one worker."""
    compute_s: float
    """Of one worker in a step."""
    gradient_bytes: float
    small_sums: int = 1
    """Sums of a few numbers in a step: loss, counts and checksum."""
    tail: float = 1.0
    """Documents of the fullest stream, over the mean: the epoch's last steps wait for it."""
    decode_s: float = 0.0
    """Processor time of the thread that reads, for a document."""

    @property
    def row_group_bytes(self) -> float:
        """Mean bytes of a row group."""
        return self.documents * self.bytes_per_document / self.row_groups

    def steps(self, world: int) -> float:
        """Steps of an epoch, of which the last may be a part."""
        return self.tail * self.documents / world / self.documents_per_step


class Step(NamedTuple):
    """The seconds of a step: computing and exchanging, beside reading."""

    compute: float
    host: float
    exchange: float
    reading: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max(self.compute + self.host + self.exchange, self.reading)


def step(work: Workload, world: int, cluster: Cluster) -> Step:
    """The seconds of a step on this many workers."""
    network, store, machine = cluster
    row_groups = work.documents_per_step * work.row_groups / work.documents
    exchange = network.exchange_s(work.gradient_bytes, world) + work.small_sums * network.exchange_s(0, world)
    return Step(
        work.compute_s,
        machine.host_s * max(1.0, world / machine.cores),
        exchange,
        row_groups * store.row_group_s(work.row_group_bytes) + work.documents_per_step * work.decode_s,
    )


def epoch_s(work: Workload, world: int, cluster: Cluster) -> float:
    """The seconds of one epoch, without its start."""
    return work.steps(world) * step(work, world, cluster).seconds


def run_s(work: Workload, world: int, cluster: Cluster, epochs: int = 1) -> float:
    """The seconds of a whole run."""
    machine = cluster.machine
    before = start_s(world, machine) + account_s(work, world, cluster.store)
    training = epochs * epoch_s(work, world, cluster)
    return before + training + training // machine.checkpoint_every_s * machine.pause_s


def start_s(world: int, machine: Machine) -> float:
    """The seconds from the command to the reading for the account."""
    return machine.start_s + machine.start_of_each_s * max(1.0, world / machine.cores)


def account_s(work: Workload, world: int, store: Store) -> float:
    """The seconds in which all workers together read the ids of all groups, before the first step."""
    return work.row_groups / world * store.row_group_s(0)


def fit_network(small_s: Mapping[int, float], large_s: Mapping[int, float], n_bytes: float) -> Network:
    """The network that explains measured sums of a few numbers and of many bytes, by number of workers; least squares.

    Example:
        >>> true = Network(1e-3, 1e8)
        >>> small, large = ({w: true.exchange_s(b, w) for w in (2, 4)} for b in (0, 1e6))
        >>> [round(value, 6) for value in fit_network(small, large, 1e6)[:2]]
        [0.001, 100000000.0]
    """
    worlds = [world for world in small_s if world > 1]
    hops = np.array([2.0 * (world - 1) for world in worlds])
    latency_s = _slope(hops, np.array([small_s[world] for world in worlds]))
    shares = np.array([2 * (world - 1) / world * n_bytes for world in worlds])
    of_bytes = np.array([large_s[world] - small_s[world] for world in worlds])
    return Network(latency_s, 1 / max(_slope(shares, of_bytes), 1e-15))


def fit_host(steps_s: Mapping[int, float], work: Workload, network: Network, cores: float) -> float:
    """The processor time of a worker in a step that explains measured steps which computation bounds."""
    worlds = list(steps_s)
    free = Cluster(network, Store(0, math.inf, 0, 1), Machine(cores, 0.0, 0.0))
    rest = [steps_s[w] - step(work, w, free).seconds for w in worlds]
    return max(0.0, _slope(np.array([max(1.0, world / cores) for world in worlds]), np.array(rest)))


def fit_start(starts_s: Mapping[int, float], cores: float) -> tuple[float, float]:
    """`start_s` and `start_of_each_s` that explain measured starts: the least squares' line.

    Example:
        >>> [round(value, 6) for value in fit_start({1: 1.5, 2: 1.5, 4: 2.0}, cores=2)]
        [1.0, 0.5]
    """
    shares = [max(1.0, world / cores) for world in starts_s]
    slope, start = np.polyfit(shares, list(starts_s.values()), 1)
    return float(start), float(slope)


def _slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Of the line through the origin that fits best."""
    return float(x @ y / (x @ x))
