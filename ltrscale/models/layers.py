"""Layers that the networks share: batch norm, dropout, embeddings of categories, hidden layers, activations.

Shapes: N documents, D columns, P numeric features, C categorical features, E dimensions of an embedding; S
parts of a network, with A inputs and B outputs each.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ltrscale.batch import QueryGroups
from ltrscale.config import Config
from ltrscale.layout import send

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Activation = Literal["relu", "gelu", "elu"]
Size = Annotated[int, Field(ge=1, le=1_000_000)]
"""Size of a layer or of a part of one."""
Layers = Annotated[int, Field(ge=1, le=1000)]
"""Number of layers; bounded, because each takes time to build."""
Sizes = Annotated[tuple[Size, ...], Field(min_length=1, max_length=1000)]
"""Sizes of consecutive layers."""


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
        h_ND: Tensor = self(x_NF)
        return h_ND

    @property
    def member_width(self) -> int:
        """Size of a member's part of the embedding."""
        return self.width // self.members

    def each(self, layers: nn.Module, h_ND: Tensor) -> Tensor:
        """Apply shared layers to each member's part of the embeddings, [N, width] to [N, members * D']."""
        if self.members == 1:
            shared_ND: Tensor = layers(h_ND)
            return shared_ND
        members_RD: Tensor = layers(h_ND.view(-1, self.member_width))
        return members_RD.view(-1, self.members * members_RD.shape[1])


class Stack(nn.Module):
    """A part of an encoder whose children are layers, one after the other."""


class InputLayer(nn.Module):
    """A part of an encoder that reads features; all such parts together are the first layer."""


class EncoderSettings(Config):
    """The base of the configs of encoders."""

    kind: str
    embedding: Size = 8
    """Dimensions of the embedding of each categorical feature."""

    @property
    def reads_tokens(self) -> TokenFields:
        """The token fields that it reads; only an encoder of text has some."""
        return TokenFields()

    def build(self, numeric_F: Tensor, cardinalities: Sequence[int]) -> Encoder:
        """An encoder with fresh weights."""
        raise NotImplementedError


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


def refuse_batch_norm(model: nn.Module) -> None:
    """Refuse a model that contains torch's own BatchNorm.

    Its running statistics would silently be those of a single worker's micro-batches.

    Raises:
        ValueError: a layer is torch's BatchNorm; names the layer.

    Example:
        >>> refuse_batch_norm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        Traceback (most recent call last):
        ValueError: 1: torch's BatchNorm1d makes weights depend on the number of workers; take MicroBatchNorm
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            kind = type(module).__name__
            raise ValueError(
                f"{name}: torch's {kind} makes weights depend on the number of workers; take MicroBatchNorm"
            )


class MicroBatchNorm(nn.Module):
    """BatchNorm that is exact under gradient accumulation and over workers.

    In training it normalises by the current micro-batch and remembers its mean and variance; once a step, `moments` and
    `update_running_statistics` move the running statistics of all norms, as if all documents had been one batch. It
    uses the running statistics at inference, and for a micro-batch of one document, which has no variance.

    Args:
        width: features D.
        affine: learn a scale and a shift.
        momentum: weight of the new statistics in the running ones.
        eps: added to the variance.

    Example:
        >>> norm = MicroBatchNorm(1, momentum=1.0)
        >>> _ = norm(torch.tensor([[0.0], [2.0]])), norm(torch.tensor([[4.0]]))
        >>> update_running_statistics([norm], moments([norm]))
        >>> norm.running_mean.item(), norm.running_var.item()
        (2.0, 4.0)
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, *, affine: bool = True, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if affine else None
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.seen: list[tuple[int, Tensor]] = []
        """Documents of each micro-batch since the last update, with its mean and unbiased variance [2, D]."""

    def forward(self, x_ND: Tensor) -> Tensor:
        """Normalise each column."""
        if not self.training or len(x_ND) < 2:
            if self.training and len(x_ND) == 1:
                only_D = x_ND.detach()[0].to(self.running_mean.dtype)
                self._remember(1, torch.stack([only_D, torch.zeros_like(only_D)]))
            return F.batch_norm(x_ND, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        # With momentum 1, the fused kernel writes the micro-batch's mean and unbiased variance to these.
        statistics_2D = self.running_mean.new_zeros(2, len(self.running_mean))
        mean_D, var_D = statistics_2D.unbind()
        y_ND = F.batch_norm(x_ND, mean_D, var_D, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)
        self._remember(len(x_ND), statistics_2D)
        return y_ND

    def _remember(self, count: int, statistics_2D: Tensor) -> None:
        from ltrscale.models import uncompiled  # loads the compiler

        # compiled code would depend on how many micro-batches were seen
        uncompiled.call(self._keep, count, statistics_2D)

    def _keep(self, count: int, statistics_2D: Tensor) -> None:
        self.seen.append((count, statistics_2D))


def moments(norms: Sequence[MicroBatchNorm]) -> Tensor:
    """What the norms have seen since the last call, as sums that can be added over workers.

    All norms share a few operations, because on a GPU each costs the same however short its vectors are.

    Returns:
        float64, for n norms of total width D: n numbers of documents, D sums, and D sums of squares.
    """
    device = norms[0].running_mean.device
    counts = send(np.array([sum(n for n, _ in norm.seen) for norm in norms], np.float64), device)
    of_norms = {norm: norm.seen or [(0, norm.running_mean.new_zeros(2, len(norm.running_mean)))] for norm in norms}
    seen = [statistics for of_norm in of_norms.values() for statistics in of_norm]
    # in float32, the sum of squares minus the squared mean would cancel
    stacked_2D = torch.cat([statistics_2D for _, statistics_2D in seen], 1).double()
    widths = [statistics_2D.shape[1] for _, statistics_2D in seen]
    means, variances = (torch.split(row_D, widths) for row_D in stacked_2D)
    sums = torch._foreach_mul(means, [float(n) for n, _ in seen])
    squares = torch._foreach_mul(variances, [float(max(0, n - 1)) for n, _ in seen])
    torch._foreach_addcmul_(squares, means, sums)
    firsts = [0, *accumulate(len(of_norm) for of_norm in of_norms.values())][:-1]
    for first, of_norm in zip(firsts, of_norms.values(), strict=True):
        for later in range(first + 1, first + len(of_norm)):  # each further micro-batch is added to the first
            for values in (sums, squares):
                values[first].add_(values[later])
    for norm in norms:
        norm.seen = []
    return torch.cat([counts, *(values[i] for values in (sums, squares) for i in firsts)])


def update_running_statistics(norms: Sequence[MicroBatchNorm], sums: Tensor, *, momentum: float | None = None) -> None:
    """Move the running statistics of norms towards the moments of a step.

    The variance is the unbiased one, as in `torch.nn.BatchNorm1d`. A single document has no variance and moves only the
    mean; a step without documents changes nothing.

    Args:
        norms: in the order of `sums`.
        sums: of all documents of a step: a result of `moments`, or a sum of results.
        momentum: used instead of the norms' own; 1 sets the statistics.
    """
    widths, device = [len(norm.running_mean) for norm in norms], sums.device
    norm_D = send(np.arange(len(norms)).repeat(widths), device)
    count_D, sums_2D = sums[: len(norms)][norm_D], sums[len(norms) :].view(2, -1)
    mean_D, square_D = (sums_2D / count_D.clamp(min=1)).unbind()
    var_D = (square_D - mean_D.square()).clamp(min=0) * count_D / (count_D - 1).clamp(min=1)
    own = [norm.momentum if momentum is None else momentum for norm in norms]
    weight_D = send(np.array(own, np.float64).repeat(widths), device)
    running = [norm.running_mean for norm in norms], [norm.running_var for norm in norms]
    for buffers, new_D, least in zip(running, (mean_D, var_D), (1, 2), strict=True):
        old_D = torch.cat(buffers)
        moved_D = old_D.lerp(new_D.to(old_D.dtype), (weight_D * (count_D >= least)).to(old_D.dtype))
        torch._foreach_copy_(buffers, list(torch.split(moved_D, widths)))


class Dropout(nn.Module):
    """Dropout; on a CPU its mask comes from random bytes, 2.5 times faster than torch's.

    On a CPU the probability is rounded to a multiple of 1/256, and outputs are scaled by the rounded rate. Randomness
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
        if x.device.type != "cpu":
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
    match name:
        case "relu":
            return nn.ReLU()
        case "gelu":
            return nn.GELU()
        case "elu":
            return nn.ELU()
