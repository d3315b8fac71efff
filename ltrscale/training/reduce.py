"""Sums over workers: counts, gradients, also those of embedding tables on the host, and BatchNorm moments.

Gradients are summed here once per step, instead of by DistributedDataParallel's hooks. A step accumulates micro-batches
of all streams of a worker, some of which may have run out. It divides by the count of the whole step, unknown before
the last backward pass. In one process the sums are the identity.

Of tables on the host workers exchange the indices of the rows that a step used and their gradients. The optimizer
updates these rows with their part of its state. Rows that a step did not use keep their weights and state: no momentum,
no decay. So plain SGD equals that of a dense table, and so does every optimizer for rows that each step uses.

Shapes: N documents, F features, C categorical features, E dimensions of an embedding, U different rows.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ltrscale.batch import QueryGroups
from ltrscale.models.batch_norm import moments, norms_of, update_running_statistics
from ltrscale.models.features import FeatureTransform
from ltrscale.models.layers import HostTable, Lent
from ltrscale.pretext.objective import Pretrainer
from ltrscale.runtime.workers import rank_and_world

T = TypeVar("T")

BUCKET_BYTES = 25 << 20
"""Size of a bucket of gradients that is sent at once."""


def sum_over_workers(values: Tensor) -> Tensor:
    """Sum a tensor over the workers, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def gather_over_workers(values: Tensor) -> Tensor:
    """The values of all workers, by rank: shape [world, ...]."""
    rank, world = rank_and_world()
    of_workers = torch.zeros(world, *values.shape, dtype=values.dtype)
    of_workers[rank] = values  # other rows are zero, so the sum is a gather
    return sum_over_workers(of_workers)


def from_rank_0(value: T) -> T:
    """Rank 0's value on all workers; plain data, because it is pickled."""
    shared = [value]
    if dist.is_initialized():  # on the CPU: by default NCCL would copy the pickled bytes through the GPU
        dist.broadcast_object_list(shared, src=0, device=torch.device("cpu"))
    return shared[0]


def broadcast(values: Tensor) -> Tensor:
    """Broadcast rank 0's values of a tensor, in place."""
    if dist.is_initialized():
        dist.broadcast(values, src=0)
    return values


class FlatGradient:
    """The gradients of all parameters as one vector, summed over the workers.

    The vector is sent in buckets, last layers first, in the order of backward. If there are several, each is sent as
    soon as the step's last backward has filled it, overlapping with the rest. All workers send the buckets in the same
    order; a worker without a micro-batch sends zeros.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(reversed(parameters))
        self.buckets: list[list[nn.Parameter]] = [[]]
        for parameter in self.parameters:
            if sum(p.nbytes for p in self.buckets[-1]) >= BUCKET_BYTES:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
        self._filling = False
        self._hooks: list[RemovableHandle] = []
        self._reset()
        if len(self.buckets) > 1 and dist.is_initialized():
            for number, bucket in enumerate(self.buckets):
                for parameter in bucket:
                    hook = partial(self._filled, number)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _reset(self) -> None:
        self._left = [len(bucket) for bucket in self.buckets]
        self._sent: list[tuple[Tensor, dist.Work | None]] = []

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Context of the last backward, which may send buckets as they fill."""
        self._filling = True
        try:
            yield
        finally:
            self._filling = False

    def _filled(self, number: int, _: Tensor) -> None:
        if self._filling:
            self._left[number] -= 1
            while len(self._sent) < len(self.buckets) and self._left[len(self._sent)] == 0:
                self._send()

    def _send(self) -> None:
        bucket = self.buckets[len(self._sent)]
        part = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
        self._sent.append((part, dist.all_reduce(part, async_op=True) if dist.is_initialized() else None))

    def summed(self) -> Tensor:
        """The summed vector; no other sum over workers may come between `last_backward` and this call."""
        while len(self._sent) < len(self.buckets):
            self._send()
        for _, work in self._sent:
            if work is not None:
                work.wait()
        parts = [part for part, _ in self._sent]
        self._reset()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def set(self, flat: Tensor) -> None:
        """Set the parameters' gradients to the parts of a vector."""
        parts = torch.split(flat, [p.numel() for p in self.parameters])
        for parameter, gradient in zip(self.parameters, parts, strict=True):
            parameter.grad = gradient.view_as(parameter)


def update_norms(model: nn.Module) -> None:
    """Update every BatchNorm once from the moments of all micro-batches of the step, on all workers."""
    if norms := norms_of(model):
        update_running_statistics(norms, sum_over_workers(moments(norms)))


def forget_moments(model: nn.Module) -> None:
    """Drop the moments that BatchNorms have collected since their last update."""
    for norm in norms_of(model):
        norm.seen = ()


class RowGradients:
    """Rows of host tables that a step used, and their gradients.

    Args:
        networks: the trained network and others that share its tables.
    """

    def __init__(self, networks: Iterable[nn.Module]) -> None:
        modules = list(dict.fromkeys(module for network in networks for module in network.modules()))
        self.tables = [module for module in modules if isinstance(module, HostTable) and module.weight.requires_grad]
        self._used: list[list[Lent]] = [[] for _ in self.tables]
        self._summed: list[Lent] = []
        transforms = [module for module in modules if isinstance(module, FeatureTransform)]
        self.transform = copy.deepcopy(transforms[0]).cpu() if self.tables and len(transforms) == 1 else None
        """Finds the rows of a batch on the CPU; None if there are several transforms: then lookups find them."""
        drawn = [m.marginals_SF for m in modules if isinstance(m, Pretrainer) and m.marginals_SF is not None]
        self._others = [self._rows(x_SF.cpu()) for x_SF in drawn] if self.transform is not None else []

    def ids(self, groups: QueryGroups) -> Tensor | None:
        """Sorted rows that a micro-batch can use: its own, those of missing values, and those that views draw."""
        if self.transform is None:
            return None
        indices_NC = self.transform.indices(groups.features_NF).long()
        missing_1C = torch.zeros(1, len(self.transform.cardinalities), dtype=torch.int64)
        own = [(indices_NC + self._first_C).flatten(), (missing_1C + self._first_C).flatten()]
        ids_U: Tensor = torch.unique(torch.cat([*own, *self._others]))
        return ids_U

    def _rows(self, x_NF: Tensor) -> Tensor:
        """The distinct rows of transformed documents."""
        assert self.transform is not None
        ids_U: Tensor = torch.unique(x_NF[:, self.transform.categorical_C].long() + self._first_C)
        return ids_U

    @property
    def _first_C(self) -> Tensor:
        assert self.transform is not None
        return torch.tensor([0, *self.transform.cardinalities]).cumsum(0)[:-1]

    @contextmanager
    def planned(self, ids_U: Tensor | None) -> Iterator[None]:
        """Context in which the tables lend these rows; with None each lookup finds its own."""
        with ExitStack() as stack:
            for table in self.tables:
                stack.enter_context(table.planned(ids_U))
            yield

    def collect(self, divisor: Tensor | float | None) -> None:
        """Take the gradients of the lent rows, divided by `divisor`; None drops them."""
        for table, used in zip(self.tables, self._used, strict=True):
            if divisor is not None:
                used += [Lent(ids_U, _gradient(rows_UE) / divisor) for ids_U, rows_UE in table.lent]
            table.lent = []

    def beside(self, values: Tensor) -> Tensor:
        """Float64 values followed by the collected gradients, to copy both from the device at once."""
        rows = [lent.rows_UE.flatten() for used in self._used for lent in used]
        return torch.cat([values.view(rows[0].dtype), *rows]) if rows else values

    def taken_from(self, copied: Tensor, values: int) -> Tensor:
        """The values given to `beside`, from its CPU copy; keeps the gradients, summed over the workers."""
        sizes = [lent.rows_UE.numel() for used in self._used for lent in used]
        first = values * 8 // copied.element_size() if sizes else len(copied)
        parts = iter(torch.split(copied[first:], sizes) if sizes else ())
        on_cpu = [[Lent(ids_U, next(parts).view(rows_UE.shape)) for ids_U, rows_UE in used] for used in self._used]
        self._used = [[] for _ in self.tables]
        self._summed = [_over_workers(used, table.weight) for table, used in zip(self.tables, on_cpu, strict=True)]
        return copied[:first].view(torch.float64)

    @property
    def norm(self) -> float:
        """The norm of the summed gradients."""
        return math.hypot(*(float(torch.linalg.vector_norm(rows, dtype=torch.float64)) for _, rows in self._summed))

    def update(self, optimizer: torch.optim.Optimizer, scale: float) -> None:
        """Update the rows by the summed gradients times `scale`, at the optimizer's current rates."""
        for table, (ids_U, gradient_UE) in zip(self.tables, self._summed, strict=True):
            if len(ids_U):
                update_rows(optimizer, table.weight, ids_U, gradient_UE * scale)


def _gradient(rows_UE: Tensor) -> Tensor:
    return torch.zeros_like(rows_UE) if rows_UE.grad is None else rows_UE.grad


def _over_workers(used: list[Lent], weight: Tensor) -> Lent:
    """The rows that any worker used and the sums of their gradients, equal on all workers."""
    own = _joined(used, weight)
    if not dist.is_initialized():
        return own
    lengths = [int(n) for n in gather_over_workers(torch.tensor(len(own.ids_U)))]
    ids = own.ids_U.new_zeros(max(lengths))
    rows = own.rows_UE.new_zeros(max(lengths), weight.shape[1])
    ids[: len(own.ids_U)], rows[: len(own.ids_U)] = own
    all_ids, all_rows = [torch.empty_like(ids) for _ in lengths], [torch.empty_like(rows) for _ in lengths]
    dist.all_gather(all_ids, ids)
    dist.all_gather(all_rows, rows)
    return _joined([Lent(i[:n], r[:n]) for i, r, n in zip(all_ids, all_rows, lengths, strict=True)], weight)


def _joined(parts: list[Lent], weight: Tensor) -> Lent:
    """Each row of the parts once, sorted, with the sum of its gradients."""
    if len(parts) == 1:
        return parts[0]
    ids = torch.cat([torch.zeros(0, dtype=torch.int64), *(part.ids_U for part in parts)])
    ids_U, place = torch.unique(ids, return_inverse=True)
    rows = torch.cat([weight.new_zeros(0, weight.shape[1]), *(part.rows_UE for part in parts)])
    return Lent(ids_U, rows.new_zeros(len(ids_U), weight.shape[1]).index_add_(0, place, rows))


@torch.no_grad()
def update_rows(optimizer: torch.optim.Optimizer, weight: nn.Parameter, ids_U: Tensor, gradient_UE: Tensor) -> None:
    """Update some rows of a parameter as if it had no others; uses their part of the optimizer's state."""
    (group,) = (group for group in optimizer.param_groups if any(p is weight for p in group["params"]))
    part = nn.Parameter(weight[ids_U])
    part.grad = gradient_UE
    small = type(optimizer)([{**group, "params": [part]}], lr=group["lr"])  # type: ignore[call-arg]
    state = optimizer.state[weight]
    if state:
        small.state[part] = {key: _rows_of(value, weight, ids_U) for key, value in state.items()}
    small.step()
    weight[ids_U] = part
    for key, value in small.state[part].items():
        if not isinstance(value, Tensor) or value.shape != part.shape:
            state[key] = value
            continue
        if key not in state:
            state[key] = torch.zeros_like(weight)
        state[key][ids_U] = value


def _rows_of(value: object, weight: Tensor, ids_U: Tensor) -> object:
    return value[ids_U] if isinstance(value, Tensor) and value.shape == weight.shape else value
