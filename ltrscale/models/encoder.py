"""What an encoder is: a module from features to embeddings, its settings, and its parameters by layer.

Shapes: N documents, F features, D dimensions; R = N * members.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from ltrscale.batch import QueryGroups
from ltrscale.config import Config
from ltrscale.models.batch_norm import MicroBatchNorm
from ltrscale.models.layers import InputLayer, Size, Stack


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
        >>> from ltrscale.models.layers import hidden_layers
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
