"""Steps of the same shapes: padding changes neither loss nor gradient, and no step asks anything else or waits."""

from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from jobs.bench.measure import mslr_offsets
from ltrscale.batch import QueryGroups
from ltrscale.lengths import Frame, frame_of
from ltrscale.models.batch_norm import MicroBatchNorm, moments
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.features import FeatureTransform
from ltrscale.pretext.augment import Augmentation, Draw
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.pretext.objective import Objective, Pretrainer
from ltrscale.pretext.siamese import SimSiamConfig

FEATURES = 6
FRAME = Frame(40, ((3, 4), (3, 10), (1, 16)))
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet": {"encoder": {"width": 8, "blocks": 2, "dropout": 0.0}, "transform": {"numeric": "none"}},
    "tabm": {
        # without kinks: lists of one document have values of exactly 0
        "encoder": {
            "kind": "tabm",
            "members": 3,
            "hidden": [8],
            "batch_norm": True,
            "activation": "gelu",
            "dropout": 0.0,
        },
        "numbers": {"kind": "plain", "within_lists": True},
        "transform": {"per_query": True},
    },
}
METHODS: list[Objective] = [
    SimCLRRankConfig(),
    SimCLRRankConfig(temperature=0.01),
    SimCLRRankConfig(with_positive=False),
    SimSiamConfig(),
]
every_network = pytest.mark.parametrize("network", NETWORKS)


class Columns(Augmentation):
    """Hides the same features of every document, so that its draws do not depend on the number of documents."""

    kind: Literal["columns"] = "columns"

    def view(self, x_NF: Tensor, draw: Draw) -> Tensor:
        return x_NF * (torch.rand(FEATURES, generator=draw.generator) < 0.7)


def lists(*lengths: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> QueryGroups:
    """Lists of random documents of these lengths."""
    draws = torch.Generator().manual_seed(seed)
    features_NF = torch.randn(sum(lengths), FEATURES, generator=draws, dtype=dtype)
    return QueryGroups(features_NF, torch.tensor([0, *lengths]).cumsum(0))


def pretrainer(method: Objective, network: str, augmentation: Augmentation) -> Pretrainer:
    config = NetworkConfig.model_validate(NETWORKS[network])
    torch.manual_seed(0)
    transform = FeatureTransform(config.transform, ["numeric"] * FEATURES, [])
    return Pretrainer(transform, config, method, augmentation)


def differentiated(net: Pretrainer, groups: QueryGroups) -> list[Tensor]:
    """Loss, count, gradients, moments of the norms and what is watched of a micro-batch."""
    net.zero_grad()
    loss, count = net(groups, torch.Generator().manual_seed(1))
    loss.backward()
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    norms = [module for module in net.modules() if isinstance(module, MicroBatchNorm)]
    watched = net.watch.take()
    return [loss.detach(), torch.as_tensor(count, dtype=torch.float64), *gradients, moments(norms), watched]


@every_network
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_padding_changes_neither_loss_nor_gradient_nor_statistics(method: Objective, network: str) -> None:
    net = pretrainer(method, network, Columns()).double()
    with torch.no_grad():
        for parameter in net.parameters():  # so that documents of zeros have an embedding
            parameter += 0.1 * torch.randn_like(parameter)
    for lengths in ((3, 9, 1, 4, 16, 2), (2,), (10, 10, 9, 11)):
        groups = lists(*lengths)
        padded = groups.padded(FRAME)
        assert padded is not None
        assert (padded.n_documents, padded.n_groups) == (40, 8)
        for value, expected in zip(differentiated(net, padded), differentiated(net, groups), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)


def test_groups_that_do_not_fit_a_frame_are_not_padded() -> None:
    for lengths in ((17,), (1,), (16, 16), (10, 10, 10, 10, 10), (1,) * 8, (11, 11)):
        assert lists(*lengths).padded(FRAME) is None, lengths


def test_nearly_all_batches_of_a_log_fit_the_frame_of_its_first_lists_with_little_padding() -> None:
    lengths_Q = np.diff(mslr_offsets(6000).numpy())
    for documents, most in ((65_536, 2.0), (8_192, 4.2)):
        frame = frame_of(lengths_Q[: 4 * documents // 120], documents=documents, longest=734, entries=10**9)
        fitting, needed = [], []
        ends = np.flatnonzero(np.diff(lengths_Q.cumsum() // documents)) + 1
        for batch in np.split(lengths_Q, ends)[1:-1]:
            fitting.append(frame.dealt(batch) is not None)
            needed.append((batch**2).sum())
        assert np.mean(fitting) > 0.98
        assert sum(m * length**2 for m, length in frame.shapes) < most * np.mean(needed)
