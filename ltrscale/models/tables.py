"""Embedding tables in the host's memory: a device gets only the rows of a batch, and their gradients.

Shapes: N documents, C categorical features, E dimensions of an embedding, U different rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ltrscale.models.layers import FeatureEmbedding


class Lent(NamedTuple):
    """Rows of a table that a computation used: their sorted ids on the CPU, and a copy that gets a gradient."""

    ids_U: Tensor
    rows_UE: Tensor


class HostTable(nn.Module):
    """An embedding whose weight stays on the CPU, wherever the network moves.

    A lookup that needs a gradient lends rows: a copy on the device gets the gradient, the whole weight never does. The
    CPU must know the ids of these rows. `planned` gives them in advance; otherwise a lookup waits for the device.

    Example:
        >>> table = HostTable(torch.arange(8.0).view(4, 2))
        >>> table(torch.tensor([[3], [1], [3]])).sum().backward()
        >>> [(lent.ids_U.tolist(), lent.rows_UE.grad.tolist()) for lent in table.lent], table.weight.grad
        ([([1, 3], [[1.0, 1.0], [2.0, 2.0]])], None)
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach())
        self.lent: list[Lent] = []
        """Rows that lookups have used; the code that takes the gradients empties it."""
        self._plan: Tensor | None = None
        self._planned: tuple[Tensor, Tensor] | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: ARG002
        """Follow the network to another dtype, but not to another device."""
        self.weight.data = self.weight.data.to(fn(self.weight.data[:0]).dtype)
        return self

    @contextmanager
    def planned(self, ids_U: Tensor | None) -> Iterator[None]:
        """A context in which lookups use only rows with these ids; any other row becomes NaN."""
        self._plan = ids_U
        try:
            yield
        finally:
            self._plan = self._planned = None

    def forward(self, ids_NC: Tensor) -> Tensor:
        """The rows [N, C, E] with these ids, on the device of the ids."""
        if torch.compiler.is_exporting():
            return F.embedding(ids_NC, self.weight)
        if not (self.weight.requires_grad and torch.is_grad_enabled()):
            return F.embedding(ids_NC.cpu(), self.weight).to(ids_NC.device)
        from ltrscale.models import uncompiled  # loads the compiler

        return uncompiled.call(self._lend, ids_NC)  # what is lent outlives the call

    def _lend(self, ids_NC: Tensor) -> Tensor:
        if self._plan is None:
            ids_U, place_NC = torch.unique(ids_NC.cpu(), return_inverse=True)
            return F.embedding(place_NC.to(ids_NC.device), self._copy(ids_U, ids_NC.device))
        if self._planned is None:  # several views of a batch share the rows
            self._planned = _sent(self._plan, ids_NC.device), self._copy(self._plan, ids_NC.device)
        there_U, rows_UE = self._planned
        place_NC = torch.searchsorted(there_U, ids_NC).clamp(max=len(there_U) - 1)
        found_NC = there_U[place_NC] == ids_NC
        return F.embedding(place_NC, rows_UE).where(found_NC[..., None], torch.nan)

    def _copy(self, ids_U: Tensor, device: torch.device) -> Tensor:
        rows_UE = _sent(self.weight.detach()[ids_U], device).requires_grad_()
        self.lent.append(Lent(ids_U, rows_UE))
        return rows_UE


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def keep_on_host(network: nn.Module, rows: int | None) -> None:
    """Keep embedding tables of a network with more than this many rows on the host; None keeps none there."""
    for module in network.modules() if rows is not None else ():
        table = module.table if isinstance(module, FeatureEmbedding) else None
        if isinstance(table, nn.Embedding) and table.num_embeddings > (rows or 0):
            module.table = HostTable(table.weight)


def host_tables(network: nn.Module) -> list[HostTable]:
    """The tables of a network that are kept on the host."""
    return [module for module in network.modules() if isinstance(module, HostTable)]


def device_of(network: nn.Module) -> torch.device:
    """The device of a network, apart from its host tables."""
    on_host = {id(table.weight) for table in host_tables(network)}
    return next(p.device for p in network.parameters() if id(p) not in on_host)
