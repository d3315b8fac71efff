"""Layers that the networks share, and what an encoder is: a module from features to embeddings, with its settings.

Embedding tables may stay in the host's memory: a device then gets only the rows of a batch, and their gradients.

Shapes: N documents, F features, P numeric and C categorical ones, E dimensions of an embedding, D of that of a
document, U different rows, R = N * members; S parts of a network, with A inputs and B outputs each.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, NamedTuple, Self, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ltrscale.batch import QueryGroups
from ltrscale.config import Config
from ltrscale.models.batch_norm import MicroBatchNorm

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Activation = Literal["relu", "gelu", "elu"]
Size = Annotated[int, Field(ge=1, le=1_000_000)]
"""Size of a layer or of a part of one."""
Layers = Annotated[int, Field(ge=1, le=1000)]
"""Number of layers; bounded, because each takes time to build."""
Sizes = Annotated[tuple[Size, ...], Field(min_length=1, max_length=1000)]
"""Sizes of consecutive layers."""


class Stack(nn.Module):
    """A part of an encoder whose children are layers, one after the other."""


class InputLayer(nn.Module):
    """A part of an encoder that reads features; all such parts together are the first layer."""


class Dropout(nn.Module):
    """Dropout; on a CPU its mask comes from random bytes, 2.5 times faster than torch's, but not in compiled code.

    There the probability is rounded to a multiple of 1/256, and outputs are scaled by the rounded rate. Randomness
    comes from torch's default generator.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.dropped = min(round(256 * probability), 255)

    def forward(self, x: Tensor) -> Tensor:
        """Drop entries in training."""
        if not self.training or self.probability == 0:
            return x
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.dropout(x, self.probability)
        # Whole 64-bit words over the full range: torch's default range leaves some bits of a word 0.
        words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(torch.iinfo(torch.int64).min, None)
        keep = words.view(torch.uint8)[: x.numel()].view(x.shape) >= self.dropped
        return x * keep.to(x.dtype).mul_(256 / (256 - self.dropped))


class FeatureEmbedding(InputLayer):
    """Numeric features unchanged, followed by an embedding of each categorical one.

    The embedding of the unknown category starts at 0, so it stays neutral if training never meets an unknown category.

    Args:
        numeric_F: True where a feature is numeric.
        cardinalities: rows for each categorical feature, the unknown included.
        dimensions: size of an embedding.
        bound: embeddings start uniformly between -bound and bound; `dimensions ** -0.5` by default.

    Example:
        >>> embedding = FeatureEmbedding(torch.tensor([False, True]), [3], dimensions=4)
        >>> embedding(torch.tensor([[0.0, 0.5]])).tolist()
        [[0.5, 0.0, 0.0, 0.0, 0.0]]
    """

    numeric: Tensor
    categorical: Tensor
    first_C: Tensor

    def __init__(
        self, numeric_F: Tensor, cardinalities: Sequence[int], dimensions: int, *, bound: float | None = None
    ) -> None:
        super().__init__()
        # All features share one table. The buffers follow from the transform, so they are not saved.
        first_C = torch.tensor([0, *cardinalities]).cumsum(0)[:-1]
        self.register_buffer("numeric", numeric_F.nonzero()[:, 0], persistent=False)
        self.register_buffer("categorical", (~numeric_F).nonzero()[:, 0], persistent=False)
        self.register_buffer("first_C", first_C, persistent=False)
        self.dimensions = dimensions
        self.table: nn.Module | None = nn.Embedding(sum(cardinalities), dimensions) if cardinalities else None
        self.width = len(self.numeric) + len(cardinalities) * dimensions
        if isinstance(self.table, nn.Embedding):
            bound = dimensions**-0.5 if bound is None else bound
            nn.init.uniform_(self.table.weight, -bound, bound)
            with torch.no_grad():
                self.table.weight[first_C] = 0.0

    def split(self, x_NF: Tensor) -> tuple[Tensor, Tensor]:
        """Map transformed features [N, F] to numeric values [N, P] and embeddings [N, C, E]."""
        if self.table is None:
            return x_NF, x_NF.new_zeros(len(x_NF), 0, self.dimensions)
        return x_NF[:, self.numeric], self.table(x_NF[:, self.categorical].long() + self.first_C)

    def forward(self, x_NF: Tensor) -> Tensor:
        """Transformed features [N, F] to [N, P + C * E]."""
        if self.table is None:
            return x_NF
        x_NP, embedded_NCE = self.split(x_NF)
        return torch.cat([x_NP, embedded_NCE.flatten(1)], dim=1)


class SeparateLinear(nn.Module):
    """A separate linear layer for each of S parts (features, members), [N, S, A] to [N, S, B]."""

    def __init__(self, parts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(parts, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(parts, outputs).uniform_(-bound, bound))

    def forward(self, x_NSA: Tensor) -> Tensor:
        """Apply each part's layer."""
        return torch.einsum("nsa,sab->nsb", x_NSA, self.weight) + self.bias


def hidden_layers(
    width: int, hidden: Sequence[int], *, activate: Activation, dropout: float = 0.0, batch_norm: bool = False
) -> nn.Sequential:
    """Layers `dropout(activation(norm(linear(x))))` of the given sizes, on inputs [N, width]."""
    layers: list[nn.Module] = []
    for a, b in pairwise([width, *hidden]):
        norm = [MicroBatchNorm(b)] if batch_norm else []
        layers += [nn.Linear(a, b), *norm, activation(activate), Dropout(dropout)]
    return nn.Sequential(*layers)


def activation(name: Activation) -> nn.Module:
    """The non-linearity of this name."""
    return {"relu": nn.ReLU, "gelu": nn.GELU, "elu": nn.ELU}[name]()


class TokenFields(NamedTuple):
    """Names of token fields of queries and of documents."""

    query: tuple[str, ...] = ()
    document: tuple[str, ...] = ()


class Encoder(nn.Module):
    """The base of encoders, which map transformed features [N, F] to embeddings [N, width], document by document.

    An encoder is built from its config, the mask `numeric_F` of the numeric features, and the rows of each categorical
    feature's embedding.
    """

    config: Config
    width: int
    members: int = 1
    """Networks side by side in this one: each has an equal part of the embedding, and its own head and loss."""

    def embed(self, x_NF: Tensor, groups: QueryGroups) -> Tensor:  # noqa: ARG002
        """Embeddings [N, width] of a batch's documents."""
        return self(x_NF)

    @property
    def member_width(self) -> int:
        """Size of a member's part of the embedding."""
        return self.width // self.members

    def each(self, layers: nn.Module, h_ND: Tensor) -> Tensor:
        """Apply shared layers to each member's part of the embeddings, [N, width] to [N, members * D']."""
        if self.members == 1:
            return layers(h_ND)
        members_RD: Tensor = layers(h_ND.view(-1, self.member_width))
        return members_RD.view(-1, self.members * members_RD.shape[1])


class EncoderSettings(Config):
    """The base of the configs of encoders."""

    kind: str
    encoder: ClassVar[Callable[..., Encoder]]
    """Its encoder."""
    embedding: Size = 8
    """Dimensions of the embedding of each categorical feature."""

    @property
    def reads_tokens(self) -> TokenFields:
        """The token fields that it reads; only an encoder of text has some."""
        return TokenFields()

    def build(self, numeric_F: Tensor, cardinalities: Sequence[int]) -> Encoder:
        """The encoder with fresh weights."""
        return self.encoder(self, numeric_F, cardinalities)


def depths(encoder: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of an encoder by layer, starting at the input.

    Embeddings of features are the first layer. A residual block is one layer; a norm belongs to the layer before it.

    Example:
        >>> [len(layer) for layer in depths(hidden_layers(6, [5, 4], activate="relu", batch_norm=True))]
        [4, 4]
    """
    encoders = [module for module in encoder.modules() if isinstance(module, Encoder)]
    inputs = [parameter for module in encoders for parameter in module.parameters(recurse=False)]
    layers = [inputs]
    for module in _in_sequence(encoder):
        parameters = list(module.parameters())
        if isinstance(module, InputLayer | nn.Embedding):
            inputs += parameters
        elif isinstance(module, MicroBatchNorm | nn.LayerNorm):
            layers[-1] += parameters
        else:
            layers.append(parameters)
    return [layer for layer in layers if layer]


def _in_sequence(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList | Stack | Encoder):
            yield from _in_sequence(child)
        else:
            yield child


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
