"""Bundles of the order of one feature.

Shapes: N documents.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.bundle.contents import BundleKind, FeatureOrder
from ltrscale.bundle.opened import Bundle, Computing, Scorer
from ltrscale.errors import InputError


@dataclass(frozen=True, kw_only=True)
class OrderBundle(Bundle):
    """The order of documents by one feature; it holds no model."""

    kind: ClassVar[BundleKind] = "feature"
    holds: ClassVar = "the order of a feature"
    held: FeatureOrder

    def scoring(self, computing: Computing) -> Scorer:  # noqa: ARG002
        """The function that scores a batch of this bundle's features."""
        if [feature.name for feature in self.features] != [self.held.feature]:
            raise InputError(f"{self.url}: its features are not the one that orders, {self.held.feature!r}")
        return order_scorer(self.held)


def order_scorer(order: FeatureOrder) -> Scorer:
    """The function that scores a batch of one feature [N, 1]: by its value, or the negative of it.

    A document without a value has the lowest float32 number, whatever else is in its list.

    Example:
        >>> price = QueryGroups(torch.tensor([[3.0], [torch.nan], [2.0]]), torch.tensor([0, 3]))
        >>> order_scorer(FeatureOrder(feature="price", ascending=True))(price).tolist()
        [-3.0, -3.4028234663852886e+38, -2.0]
    """

    def score(groups: QueryGroups) -> Tensor:
        (values_N,) = groups.features_NF.cpu().double().T
        scores_N = -values_N if order.ascending else values_N
        ordered_N: Tensor = scores_N.where(~values_N.isnan(), torch.finfo(torch.float32).min)
        return ordered_N

    return score
