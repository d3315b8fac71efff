"""Teachers with known scores: bundles that score by linear functions of the features."""

from collections.abc import Sequence

import torch

from ltrscale.bundle import BundleFacts, save_ranker
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.models.encoders import IdentityConfig
from ltrscale.models.features import TransformConfig, fit_transform
from ltrscale.models.ranker import Architecture, HeadConfig, Ranker


def linear_teacher(url: str, data: str, weights: Sequence[float], leave_out: Sequence[str] = ()) -> str:
    """Commit a ranker that scores a document of numeric features by their weighted sum; returns its URL."""
    selection = select(Split(data=(data,), leave_out=tuple(leave_out)), labelled=False)
    config = TransformConfig(numeric="none")
    transform = fit_transform([torch.zeros(1, len(weights))], ["numeric"] * len(weights), config)
    ranker = Ranker(Architecture(transform=config, encoder=IdentityConfig(), head=HeadConfig(layers=1)), transform)
    for name, parameter in ranker.named_parameters():
        values = torch.tensor([weights]) if name.endswith("weight") else torch.zeros(1)
        assert parameter.shape == values.shape, name
        parameter.data.copy_(values)
    about = BundleFacts(config={}, features=selection.features, dataset_hash=selection.hash, metrics={}, made_by={})
    save_ranker(url, ranker.eval(), about)
    return url
