"""Memory and time that a training needs on its device, estimated before it starts: the network, and the longest list.

A training that cannot fit is refused, a slow one is logged.

Shapes: N documents, S sizes of a list.
"""

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.batches import iterate
from ltrscale.devices import memory_of
from ltrscale.errors import InputError
from ltrscale.models.layers import ModuleT, host_tables
from ltrscale.pretext.objective import Pretrainer
from ltrscale.progress import log
from ltrscale.runtime.workers import rank_and_world
from ltrscale.training.loop import Trainer
from ltrscale.training.reduce import forget_moments
from ltrscale.training.settings import OptimizerConfig

_COPIES = {"adam": 4, "adamw": 4, "adagrad": 3, "sgd": 3}
"""Numbers stored per trained weight: itself, its gradient, and the optimizer's state."""
_LONG = 5_000
"""Lists longer than this are estimated beforehand; shorter ones take seconds."""
_SMALLEST, _LARGEST, _ENOUGH_S = 64, 4096, 0.25
"""Shortest and longest list to measure, and the seconds per step that are enough to stop earlier."""
_SLOW_S = 60.0
_FLOPS = 32
"""Operations of a matrix product that take as long as computing one number elsewhere."""
_ROUNDING = 0.002
"""A quadratic part below this share of the costs is rounding."""
_CPU = torch.device("cpu")
_REMEDY = "prepare the data with a lower prepare.max_group"
_OF_PAIRS = (
    ", or take a loss and a context that do not compare all pairs, such as loss.kind=softmax or loss.truncation of "
    "lambdarank"
)


def built(
    make: Callable[[], ModuleT], optimizer: OptimizerConfig | None, *, device: torch.device, networks: int = 1
) -> ModuleT:
    """The network of `make`, if the device has memory to train `networks` of it, or without optimizer, to hold them.

    Raises:
        InputError: there is not enough memory.
    """
    with torch.device("meta"):  # takes no memory
        outline = make()
    on_host = {id(table.weight) for table in host_tables(outline)}
    copies = networks * (1 if optimizer is None else _COPIES[optimizer.kind])
    for place, on_place in ((device, False), (_CPU, True)):
        parameters = sum(p.numel() for p in outline.parameters() if (id(p) in on_host) == on_place)
        if (needed := 4 * copies * parameters) > (available := memory_of(place)):
            raise InputError(
                f"the network has {parameters:,} parameters, which take {_gb(needed)} here, and {place} has "
                f"{_gb(available)}; lower the sizes or the number of its layers, embeddings or heads"
            )
    return make()


class Taken(NamedTuple):
    """The costs of a step of one list."""

    bytes: float
    """Kept from the forward pass for the backward one."""
    work: float
    """Numbers that operations compute; a matrix product counts one for every `_FLOPS` operations."""
    seconds: float


class _Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work of operations, which depends on the sizes alone, unlike time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.done += sum(value.numel() for value in tree_leaves(out) if isinstance(value, Tensor))
        if (flops := flop_registry.get(func._overloadpacket)) is not None:
            self.done += flops(*args, **(kwargs or {}), out_val=out) / _FLOPS
        return out


def foresee(trainer: Trainer, selection: Selection, title: str) -> None:
    """Log the costs of a step of the longest group, if it is long; every worker estimates them for its own device.

    Memory and time of a list of n documents are about `a n + b n^2` for any network and loss; lists of some hundred or
    thousand documents determine a and b.

    Raises:
        InputError: it does not fit into the memory of the device.
    """
    device, longest = trainer.device, selection.longest
    available = memory_of(device)
    if longest <= _LONG:
        return
    measured = _measured(trainer, selection)
    costs, size = extrapolated(measured, longest), max(measured)
    of_pairs = costs.work > 2 * measured[size].work * longest / size  # grows faster than the length
    remedy = _REMEDY + _OF_PAIRS if of_pairs else _REMEDY
    says = f"{title}: a step of the longest group, {longest:,} documents, takes about {_gb(costs.bytes)}"
    if costs.bytes > available and selection.serves_longest:
        raise InputError(f"{says}, and {device} has {_gb(available)}; {remedy}")
    if rank_and_world()[0] == 0:
        slow = costs.seconds > _SLOW_S or costs.bytes > available
        change = f"; to change that, {remedy}" if slow else ""
        say = log.warning if slow else log.info
        say("%s of %s (%s) and %s%s", says, _gb(available), device, _spoken(costs.seconds), change)


def extrapolated(measured: dict[int, Taken], longest: int) -> Taken:
    """The costs of a list of `longest` documents, from the last three sizes measured: n, 2 n and 4 n.

    Example:
        >>> costs = {n: Taken(1000 + 40 * n + n * n, 5 * n, 0.001 * n) for n in (256, 512, 1024)}
        >>> [round(cost) for cost in extrapolated(costs, 100_000)]
        [10004001000, 500000, 100]
    """
    sizes_S, last = [*measured][-3:], [*measured.values()][-3:]
    kept, work = (_at(longest, sizes_S, [costs[i] for costs in last]) for i in (0, 1))
    return Taken(kept, work, last[-1].seconds * work / last[-1].work)


def _at(longest: int, sizes_S: Sequence[int], costs_S: Sequence[float]) -> float:
    """The parabola through three costs at another size, or a line if the quadratic part is rounding."""
    quadratic, linear, constant = np.polyfit(sizes_S, costs_S, 2)
    if quadratic * sizes_S[-1] ** 2 < _ROUNDING * costs_S[-1]:
        return costs_S[-1] * longest / sizes_S[-1]
    return float(quadratic * longest**2 + linear * longest + constant)


def _measured(trainer: Trainer, selection: Selection) -> dict[int, Taken]:
    """The costs of lists of 64, 128, ... documents; leaves the network, its statistics and gradients unchanged."""
    some = next(iterate(selection, docs_per_batch=_LARGEST))
    measured: dict[int, Taken] = {}
    for size in (_SMALLEST << k for k in count()):
        measured[size] = _costs(trainer, _one_list(some, size).to(trainer.device))
        if len(measured) >= 3 and (size >= _LARGEST or measured[size].seconds > _ENOUGH_S):
            break
    trainer.optimizer.zero_grad()
    trainer.rows.collect(None)
    forget_moments(trainer.model)
    if isinstance(trainer.model, Pretrainer):
        trainer.model.watch.take()
    return measured


def _costs(trainer: Trainer, groups: QueryGroups) -> Taken:
    """The costs of a step of these groups; the time is the faster of two."""
    known = {value.untyped_storage().data_ptr() for value in (*trainer.model.parameters(), *trainer.model.buffers())}
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    def step() -> float:
        start = time.perf_counter()
        trainer.add_gradient(trainer.objective, trainer.seed, 0, groups)
        if groups.features_NF.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    with _Work() as work, torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        step()
    return Taken(sum(kept.values()), work.done, min(step(), step()))


def _one_list(groups: QueryGroups, length: int) -> QueryGroups:
    """One list of `length` documents with the first query; the documents repeat if there are too few."""
    return groups.of_rows(torch.arange(length) % groups.n_documents, torch.tensor([0, length]), torch.tensor([0]))


def _gb(bytes_: float) -> str:
    return f"{bytes_ / 1e9:,.1f} GB"


def _spoken(seconds: float) -> str:
    """A time with a fitting unit.

    Example:
        >>> _spoken(2.04), _spoken(600), _spoken(7201)
        ('2.0 s', '10.0 min', '2.0 h')
    """
    unit, name = next((unit for unit in ((3600, "h"), (60, "min")) if seconds >= 2 * unit[0]), (1, "s"))
    return f"{seconds / unit:,.1f} {name}"
