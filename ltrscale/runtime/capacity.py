"""Room for workers in a Ray cluster: what they ask for, whether it can ever come, and what is missing meanwhile."""

import time
from collections.abc import Mapping
from typing import Any

import ray

from ltrscale.errors import InputError
from ltrscale.progress import log
from ltrscale.runtime import ray_internals
from ltrscale.runtime.workers import WorkersConfig

_LOOK_S = 5.0
_PATIENCE_S = 60.0


class Waiting:
    """Logs while workers wait for capacity: every minute, and at once if no node could hold one."""

    def __init__(self, workers: WorkersConfig) -> None:
        self._workers = workers
        self._next_look, self._next_line = time.monotonic() + _LOOK_S, time.monotonic() + _PATIENCE_S
        self._looked = False

    def look(self) -> None:
        """Check the cluster, if it is time, and log what is missing.

        Raises:
            InputError: the cluster cannot get capacity for the workers.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        _check_possible(self._workers)
        if now >= self._next_line or not (self._looked or _has_nodes(self._workers)):
            log.warning("%s", _waiting_line(self._workers))
            self._next_line = now + _PATIENCE_S
        self._looked = True


def _has_nodes(workers: WorkersConfig) -> bool:
    """True if some node could hold a worker if it were empty."""
    return any(_fits(node, workers) for node in ray.nodes() if node["Alive"])


def resources(workers: WorkersConfig) -> dict[str, float]:
    """The Ray resources of each worker."""
    return {"CPU": workers.cpus, **({"GPU": workers.gpus} if workers.gpus else {})}


def _waiting_line(workers: WorkersConfig) -> str:
    """One line for a run without capacity for its workers: what they need, and why it is missing."""
    wanted = _needed(workers)
    if _has_nodes(workers):
        return f"waits for room for {wanted}; {_free_line(workers, ray.available_resources())}"
    if ray_internals.unmet_requests() is None:
        return f"waits for {wanted}: no node is such, and no autoscaler reports that it adds one; start such nodes"
    return f"waits for {wanted}: none there yet, asked the autoscaler"


def _free_line(workers: WorkersConfig, free: Mapping[str, float]) -> str:
    """What is free in the cluster, and why it may not suffice even if the sum is enough.

    Example:
        >>> two = WorkersConfig(number=2, cpus=2)
        >>> _free_line(two, {"CPU": 3.0})
        'free in the cluster: 3 CPU, 0 GPU'
        >>> _free_line(two, {"CPU": 4.0})
        'free in the cluster: 4 CPU, 0 GPU; these lie on several nodes, of which none has room for a worker, or ...'
    """
    line = f"free in the cluster: {_named({name: free.get(name, 0) for name in ('CPU', 'GPU')})}"
    if any(free.get(name, 0) < amount * workers.least for name, amount in resources(workers).items()):
        return line
    apart = "these lie on several nodes, of which none has room for a worker, or on nodes that are not asked for"
    return f"{line}; {apart}, or have just become free"


def _check_possible(workers: WorkersConfig) -> None:
    """Refuse workers that the cluster cannot get: this machine alone is too small, or no node type is theirs."""
    needed = _needed(workers)
    if ray_internals.is_own_cluster():
        if not _has_nodes(workers):
            raise InputError(f"{needed}: this machine has none of them; ask for less, or set RAY_ADDRESS to a cluster")
    elif [_asked(workers)] * workers.least in (ray_internals.unmet_requests() or []):
        raise InputError(
            f"{needed}: the cluster's autoscaler has no such node type, or not enough nodes of it; correct workers, or "
            "add a node type or raise its maximum"
        )


def _asked(workers: WorkersConfig) -> ray_internals.Demand:
    """Ray Train's request to the autoscaler for each worker."""
    of_type = {f"accelerator_type:{workers.accelerator}": 0.001} if workers.accelerator else {}
    labels = {name: _parsed(selector) for name, selector in workers.labels.items()}
    return ray_internals.Demand({**resources(workers), **of_type}, labels)


def _named(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _needed(workers: WorkersConfig) -> str:
    labels = {**({"accelerator": workers.accelerator} if workers.accelerator else {}), **workers.labels}
    where = f" on nodes with {', '.join(f'{name}: {value}' for name, value in labels.items())}" if labels else ""
    return f"{workers.least} workers with {_named(resources(workers))} each{where}"


def _fits(node: Mapping[str, Any], workers: WorkersConfig) -> bool:
    """True if this node could hold a worker if it were empty."""
    asked, has, labels = _asked(workers), node["Resources"], node.get("Labels", {})
    enough = all(has.get(name, 0.0) >= amount for name, amount in asked.resources.items())
    return enough and all((labels.get(name) in values) != negated for name, (negated, values) in asked.labels.items())


def _parsed(selector: str) -> tuple[bool, frozenset[str]]:
    """True if a Ray label selector is negated, and its values."""
    negated, plain = selector.startswith("!"), selector.removeprefix("!")
    values = plain.removeprefix("in(").removesuffix(")").split(",") if plain.startswith("in(") else [plain]
    return negated, frozenset(value.strip() for value in values)
