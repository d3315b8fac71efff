"""Cost of a pretraining step for every pretext objective and every encoder, against SimSiam on a ResNet."""

from collections.abc import Callable

import torch

from jobs.bench.measure import Row, mslr_lengths
from ltrscale.batch import QueryGroups, to_offsets
from ltrscale.config import members
from ltrscale.devices import cpu_seconds
from ltrscale.models.choices import FeatureEncoderConfig, NetworkConfig
from ltrscale.models.encoders import ResNetConfig
from ltrscale.models.features import TransformConfig, fit_transform
from ltrscale.models.layers import EncoderSettings
from ltrscale.pretext.augment import ZeroingConfig
from ltrscale.pretext.choices import FeatureMethodConfig
from ltrscale.pretext.objective import Objective, Pretrainer
from ltrscale.pretext.simsiam import SimSiamConfig

WIDTH = 136
GROUPS = 16  # about 2,000 documents; some objectives contrast all of them with each other
RESNET = ResNetConfig(width=WIDTH, blocks=3)


def bench_networks() -> list[Row]:
    """One row per objective and per encoder."""
    objectives = [measure_objective(cls) for cls in members(FeatureMethodConfig)]
    return [*objectives, *(measure_encoder(cls) for cls in members(FeatureEncoderConfig))]


def measure_objective(cls: type[Objective], groups: int = GROUPS) -> Row:
    """A step of an objective with its default settings, on the ResNet."""
    return _row(f"pretraining step, method {cls.model_fields['kind'].default}", cls(), RESNET, groups)


def measure_encoder(cls: type[EncoderSettings], groups: int = GROUPS) -> Row:
    """A step of SimSiam through an encoder with its default settings."""
    return _row(
        f"pretraining step, encoder {cls.model_fields['kind'].default}", SimSiamConfig(), cls.model_validate({}), groups
    )


def _row(name: str, method: Objective, encoder: EncoderSettings, groups: int) -> Row:
    offsets_Q1 = to_offsets(torch.from_numpy(mslr_lengths(groups, seed=0)))
    batch = QueryGroups(torch.randn(int(offsets_Q1[-1]), WIDTH, generator=_generator()), offsets_Q1)
    peer = step_work(batch, SimSiamConfig(), RESNET)
    seconds, peer_seconds = cpu_seconds(step_work(batch, method, encoder), peer, repeats=3)
    n = batch.n_documents
    return Row(
        name=f"{name}: cost, ours / SimSiam on a 3-block ResNet",
        ratio=seconds / peer_seconds,
        goal=None,
        at_least=False,
        ours=f"{seconds / n * 1e6:.1f} us/doc",
        peer=f"{peer_seconds / n * 1e6:.1f} us/doc",
        note=f"{n:,} documents; augmentation, network, loss, gradient and Adam",
    )


def step_work(groups: QueryGroups, method: Objective, encoder: EncoderSettings) -> Callable[[], None]:
    """A function that runs one pretraining step on these groups, with zeroing if the method does not make its views."""
    transform = fit_transform([groups.features_NF], ["numeric"] * WIDTH, TransformConfig())
    network = NetworkConfig.model_validate({"encoder": encoder.model_dump()})
    marginals_SF = transform(groups.features_NF, groups.offsets_Q1)
    model = Pretrainer(transform, network, method, ZeroingConfig(), marginals_SF)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    generator = _generator()

    def work() -> None:
        loss, count = model(groups, generator)
        optimizer.zero_grad()
        torch.autograd.backward(loss / count)
        optimizer.step()

    return work


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
