"""Each pretraining method of a config calls its function on its views with its parameters."""

import typing
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from config_variations import keys_without_effect
from pydantic import TypeAdapter
from torch import Tensor, nn

from ltrscale.batch import QueryGroups, joined
from ltrscale.config import kind_of, members
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.encoders import MLPConfig
from ltrscale.models.features import TransformConfig, fit_transform
from ltrscale.pretext.augment import ComposeConfig, Draw, GaussianConfig, MarginalConfig, MixupConfig, ZeroingConfig
from ltrscale.pretext.choices import FeatureMethodConfig
from ltrscale.pretext.contrast import scarf, simclr_rank
from ltrscale.pretext.objective import Objective, Pretrainer, simsiam
from ltrscale.pretext.reconstruct import SubTabConfig, _vime_corrupt, subtab, vime
from ltrscale.pretext.watch import Geometry, Sums, collapse_measures

OFFSETS = torch.tensor([0, 5, 11, 12])
AUGMENTATION = GaussianConfig(scale=0.7)
SUBTAB = {"subsets": 3, "overlap": 0.5, "rate": 0.6, "noise": "gaussian", "scale": 0.7}
SUBTAB |= {"temperature": 0.3, "contrast": 2.0, "distance": 0.5}


def method(kind: str, **parameters: object) -> FeatureMethodConfig:
    config: FeatureMethodConfig = TypeAdapter(FeatureMethodConfig).validate_python({"kind": kind, **parameters})
    return config


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def groups() -> QueryGroups:
    x_NF = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    x_NF[:, 4] = torch.arange(12) % 3
    return QueryGroups(x_NF, OFFSETS)


def pretrainer(config: FeatureMethodConfig) -> Pretrainer:
    """A pretrainer in evaluation mode, so that only the views are random."""
    torch.manual_seed(1)
    transform_config = TransformConfig(numeric="standard")
    kinds: list[typing.Literal["numeric", "categorical"]] = ["numeric"] * 4 + ["categorical"]
    transform = fit_transform([groups().features_NF], kinds, transform_config)
    network = NetworkConfig(transform=transform_config, encoder=MLPConfig(hidden=(8,)))
    marginals_SF = transform(groups().features_NF, OFFSETS)[:4]
    return Pretrainer(transform, network, config, AUGMENTATION, marginals_SF).eval()


class Parts:
    """The inputs of a micro-batch, and the pretrainer's outputs for a view."""

    def __init__(self, model: Pretrainer) -> None:
        self.model, self.draw = model, generator()
        self.x_NF = model.transform(groups().features_NF, OFFSETS)
        self.numeric_F, self.cardinalities = model.transform.numeric_F, model.transform.cardinalities
        assert model.marginals_SF is not None
        self.marginals_SF = model.marginals_SF

    def z(self, view_NF: Tensor) -> Tensor:
        assert self.model.projector is not None
        z_NP: Tensor = self.model.projector(self.model.encoder(view_NF))
        return z_NP

    def augmented(self) -> Tensor:
        return self.z(AUGMENTATION.view(self.x_NF, Draw(self.numeric_F, OFFSETS, self.draw)))

    def corrupted(self) -> Tensor:
        draw = Draw(self.numeric_F, OFFSETS, self.draw, self.marginals_SF)
        return self.z(MarginalConfig(probability=0.9).view(self.x_NF, draw))

    def mixed(self) -> Tensor:
        return self.z(MixupConfig(amount=0.8).view(self.x_NF, Draw(self.numeric_F, OFFSETS, self.draw)))


def simsiam_of(parts: Parts) -> Tensor:
    z0_NP, z1_NP = parts.augmented(), parts.augmented()
    return simsiam(parts.model.predictor(z0_NP), parts.model.predictor(z1_NP), z0_NP, z1_NP)


def vime_of(parts: Parts) -> Tensor:
    corrupted_NF, changed_NF = _vime_corrupt(parts.x_NF, rate=0.8, generator=parts.draw)
    decoded_NO, mask_logits_NF = parts.model.decoder(parts.model.encoder(corrupted_NF))
    return vime(decoded_NO, mask_logits_NF, parts.x_NF, changed_NF, parts.numeric_F, parts.cardinalities, alpha=3.0)


def subtab_of(parts: Parts, offsets_Q1: Tensor) -> Tensor:
    config = SubTabConfig.model_validate(SUBTAB)
    views = config.views(parts.x_NF, Draw(parts.numeric_F, OFFSETS, parts.draw))
    decoded_KNO = torch.stack([parts.model.decoder(parts.model.encoder(view_NF)) for view_NF in views])
    z_KNP = torch.stack([parts.z(view_NF) for view_NF in views])
    kinds = parts.numeric_F, parts.cardinalities
    return subtab(decoded_KNO, z_KNP, parts.x_NF, offsets_Q1, *kinds, temperature=0.3, contrast=2.0, distance=0.5)


def rank_of(parts: Parts) -> Tensor:
    return simclr_rank(parts.augmented(), parts.augmented(), OFFSETS, temperature=0.3)


CASES: dict[str, tuple[FeatureMethodConfig, Callable[[Parts], Tensor]]] = {
    "simclr_rank": (method("simclr_rank", temperature=0.3), rank_of),
    "simclr_sample": (method("simclr_sample", temperature=0.3), rank_of),
    "simclr": (
        method("simclr", temperature=0.3),
        lambda parts: simclr_rank(parts.augmented(), parts.augmented(), OFFSETS[[0, -1]], temperature=0.3),
    ),
    "simclr_rank without the positive": (
        method("simclr_rank", temperature=0.3, with_positive=False),
        lambda parts: simclr_rank(parts.augmented(), parts.augmented(), OFFSETS, temperature=0.3, with_positive=False),
    ),
    "simclr without the positive": (
        method("simclr", temperature=0.3, with_positive=False),
        lambda parts: simclr_rank(
            parts.augmented(), parts.augmented(), OFFSETS[[0, -1]], temperature=0.3, with_positive=False
        ),
    ),
    "simsiam": (method("simsiam", bottleneck=3), simsiam_of),
    "scarf": (
        method("scarf", temperature=0.3, rate=0.9, fixed_count=False),
        lambda parts: scarf(parts.z(parts.x_NF), parts.corrupted(), OFFSETS[[0, -1]], temperature=0.3),
    ),
    "simclr in lists of some documents": (
        method("simclr", temperature=0.3, contrast_documents=7),
        lambda parts: simclr_rank(parts.augmented(), parts.augmented(), joined(OFFSETS, 7), temperature=0.3),
    ),
    "scarf in lists of some documents": (
        method("scarf", temperature=0.3, rate=0.9, fixed_count=False, contrast_documents=7),
        lambda parts: scarf(parts.z(parts.x_NF), parts.corrupted(), joined(OFFSETS, 7), temperature=0.3),
    ),
    "dacl in lists of some documents": (
        method("dacl", temperature=0.3, amount=0.8, contrast_documents=7),
        lambda parts: simclr_rank(parts.mixed(), parts.mixed(), joined(OFFSETS, 7), temperature=0.3),
    ),
    "dacl": (
        method("dacl", temperature=0.3, amount=0.8),
        lambda parts: simclr_rank(parts.mixed(), parts.mixed(), OFFSETS[[0, -1]], temperature=0.3),
    ),
    "vime": (method("vime", rate=0.8, alpha=3.0), vime_of),
    "subtab": (method("subtab", **SUBTAB), lambda parts: subtab_of(parts, OFFSETS[[0, -1]])),
    "subtab in lists of some documents": (
        method("subtab", contrast_documents=7, **SUBTAB),
        lambda parts: subtab_of(parts, joined(OFFSETS, 7)),
    ),
    "subtab in groups": (
        method("subtab", within_groups=True, **SUBTAB),
        lambda parts: subtab_of(parts, OFFSETS),
    ),
}


@pytest.mark.parametrize("cls", members(FeatureMethodConfig), ids=kind_of)
def test_an_objective_has_a_loss_for_each_document_that_its_views_decide(cls: type[Objective]) -> None:
    model = pretrainer(cls())
    (total, count), (same, _) = (model(groups(), generator()) for _ in range(2))
    other, _ = model(groups(), torch.Generator().manual_seed(6))
    assert count == 12
    assert total.isfinite()
    assert total == same
    assert total != other
    empty, none = model(QueryGroups(torch.zeros(0, 5), torch.tensor([0])), generator())
    assert (empty, none) == (0, 0)
    total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert cls().projector_layers == (model.projector.config.layers if model.projector else 0)


@pytest.mark.slow
@pytest.mark.parametrize("cls", members(FeatureMethodConfig), ids=kind_of)
def test_every_key_of_a_config_means_something(cls: type[Objective]) -> None:
    def trace(config: Objective) -> Tensor:
        model = pretrainer(config).train()
        torch.manual_seed(0)
        total, _ = model(groups(), generator())
        return total.detach()

    configs = [config for config, _ in CASES.values() if isinstance(config, cls)]
    assert keys_without_effect([cls(), *configs], trace) == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_method_is_its_function_on_its_views(name: str) -> None:
    config, function = CASES[name]
    model = pretrainer(config)
    total, count = model(groups(), generator())
    expected_N = function(Parts(model))
    assert count == 12
    assert expected_N.shape == (12,)
    torch.testing.assert_close(total, expected_N.sum())
    other, _ = model(groups(), torch.Generator().manual_seed(6))
    assert other != total


@pytest.mark.parametrize("within_groups", [False, True])
def test_all_pairs_of_subtabs_subsets_are_watched_in_training(within_groups: bool) -> None:
    model = pretrainer(method("subtab", within_groups=within_groups, **SUBTAB))
    assert model.projector is not None
    seen: list[Tensor] = []
    model.projector.register_forward_hook(lambda _, __, z_NP: seen.append(z_NP.detach()))
    model(groups(), generator())
    assert not model.watch.take().any()  # not in training
    seen.clear()
    model.train()(groups(), generator())
    assert len(seen) == 3
    among_Q1 = OFFSETS if within_groups else OFFSETS[[0, -1]]
    found = model.watch.take()
    expected = torch.stack([collapse_measures(a_NP, b_NP, among_Q1) for a_NP, b_NP in combinations(seen, 2)]).sum(0)
    torch.testing.assert_close(found[:6], expected)
    assert found[0] == 3 * 12  # a document's views in each pair of subsets
    assert Geometry.from_sums(Sums(*found.tolist())).loss_left is None


def test_without_its_contrast_subtab_is_not_watched() -> None:
    model = pretrainer(method("subtab", **{**SUBTAB, "contrast": 0})).train()
    model(groups(), generator())
    assert not model.watch.take().any()


def test_the_bottleneck_is_that_of_the_predictor() -> None:
    model = pretrainer(method("simsiam", bottleneck=3, projector={"output": 6}))
    assert isinstance(model.predictor, nn.Sequential)
    sizes = [tuple(layer.weight.shape) for layer in model.predictor if isinstance(layer, nn.Linear)]
    assert sizes == [(3, 6), (6, 3)]


def test_which_methods_draw_from_the_marginals() -> None:
    drawing, still = ComposeConfig(steps=(GaussianConfig(), MarginalConfig())), ZeroingConfig()
    assert {config.kind for config, _ in CASES.values() if config.needs_marginals(still)} == {"scarf"}
    needed = {config.kind for config, _ in CASES.values() if config.needs_marginals(drawing)}
    assert needed == {"simclr_rank", "simclr_sample", "simclr", "simsiam", "scarf"}
