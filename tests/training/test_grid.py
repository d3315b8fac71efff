"""Every objective with every encoder, and every loss with every encoder and context, chosen by config only."""

import typing

import pytest
import torch
from nightly import nightly
from pydantic import BaseModel
from token_batches import text_config, text_groups, text_transform

from ltrscale.batch import QueryGroups
from ltrscale.models.choices import ContextConfig, FeatureEncoderConfig, NetworkConfig
from ltrscale.models.features import FeatureTransform, fit_transform
from ltrscale.models.ranker import Architecture, Ranker
from ltrscale.pretext.choices import FeatureMethodConfig
from ltrscale.pretext.objective import Pretrainer
from ltrscale.pretext.reconstruct import MaskedLanguageConfig
from ltrscale.ranking.loss_choices import LossConfig
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.pretrain import PretrainConfig
from ltrscale.training.ranking import RankingObjective

SMALL: dict[str, dict[str, object]] = {
    "resnet": {"width": 8, "blocks": 1},
    "mlp": {"hidden": [8]},
    "industrial_mlp": {"width": 16},
    "deepfm": {"hidden": [8]},
    "dcnv2": {"hidden": [16]},
    "tabm": {"hidden": [8], "members": 2},
    "dasalc": {"width": 8, "layers": 1},
    "rankformer": {"layers": 1, "feedforward": 8},
    "setrank": {"width": 8, "heads": 2, "blocks": 1},
    "dlcm": {"state": 8, "initial_rank": "feature", "feature": 0},
    "gsf": {"hidden": [16], "width": 16},
}


def kinds(annotation: object) -> list[str]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation.model_fields["kind"].default]
    return [kind for part in typing.get_args(annotation) for kind in kinds(part)]


def batch() -> QueryGroups:
    generator = torch.Generator().manual_seed(0)
    x_NF = torch.randn(40, 5, generator=generator)
    x_NF[:, 4] = torch.randint(0, 3, (40,), generator=generator)
    labels_N = torch.randint(0, 3, (40,), generator=generator).float()
    return QueryGroups(x_NF, torch.tensor([0, 12, 13, 25, 40]), labels_N)


def transform(config: PretrainConfig | FinetuneConfig) -> FeatureTransform:
    numbers = ["numeric"] * 4
    return fit_transform([batch().features_NF], [*numbers, "categorical"], config.network.transform)  # type: ignore[list-item]


def network(encoder: str) -> dict[str, object]:
    return {"encoder": {"kind": encoder, **SMALL.get(encoder, {})}}


def check_trains(model: torch.nn.Module, loss: torch.Tensor, count: float) -> None:
    assert loss.isfinite()
    assert count > 0
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.any() for gradient in gradients)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", kinds(FeatureEncoderConfig))
@pytest.mark.parametrize("method", kinds(FeatureMethodConfig))
def test_objective_and_encoder(method: str, encoder: str) -> None:
    torch.manual_seed(0)
    config = PretrainConfig.model_validate({"method": {"kind": method}, "network": network(encoder)})
    fitted = transform(config)
    draws = config.method.needs_marginals(config.augment)
    marginals_SF = fitted(batch().features_NF) if draws else None
    model = Pretrainer(fitted, config.network, config.method, config.augment, marginals_SF)
    check_trains(model, *model(batch(), torch.Generator().manual_seed(0)))


ENCODERS, CONTEXTS = kinds(FeatureEncoderConfig), [None, *kinds(ContextConfig)]


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, nightly(1)])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("encoder", ENCODERS)
def test_encoder_context_and_loss(encoder: str, context: str | None, every: int) -> None:
    """By day every third loss, of which each encoder and each context meets all."""
    first = -(ENCODERS.index(encoder) + CONTEXTS.index(context)) % every
    for loss in kinds(LossConfig)[first::every]:
        torch.manual_seed(0)
        values: dict[str, object] = {"loss": {"kind": loss}, "network": network(encoder)}
        if context is not None:
            values["context"] = {"kind": context, **SMALL.get(context, {})}
        config = FinetuneConfig.model_validate(values)
        parts = {"encoder": config.network.encoder, "context": config.context, "head": config.head}
        ranker = Ranker(Architecture(transform=config.network.transform, **parts), transform(config))
        model = RankingObjective(ranker, config)
        check_trains(model, *model(batch(), torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("context", [None, *kinds(ContextConfig)])
def test_encoder_of_text_with_context_and_auxiliary_objective(context: str | None) -> None:
    torch.manual_seed(0)
    fitted, config = text_transform(), text_config()
    values: dict[str, object] = {"transform": fitted.config, "encoder": config, "head": {"layers": 2}}
    if context is not None:
        values["context"] = {"kind": context, **SMALL.get(context, {})}
    ranker = Ranker(Architecture.model_validate(values), fitted)
    model = RankingObjective(ranker, FinetuneConfig.model_validate({"loss": {"kind": "softmax"}}))
    check_trains(model, *model(text_groups(), torch.Generator().manual_seed(0)))


def test_half_precision_is_close_to_full_precision_on_text() -> None:
    torch.manual_seed(0)
    fitted = text_transform()
    network = NetworkConfig(transform=fitted.config, encoder=text_config())
    model = Pretrainer(fitted, network, MaskedLanguageConfig(rate=0.5), PretrainConfig().augment)
    (loss, count), draw = model(text_groups(), torch.Generator().manual_seed(0)), torch.Generator().manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        half, same = model(text_groups(), draw)
    assert same == count
    torch.testing.assert_close(half, loss, rtol=0.02, atol=0)
