"""The ranker: its parts together, and the start from a pretrained encoder."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ltrscale import bundle
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.manifest import Feature
from ltrscale.models.attention import DASALCConfig, RankFormerConfig
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.encoders import MLPConfig
from ltrscale.models.features import FeatureTransform, TransformConfig, fit_transform
from ltrscale.models.heads import HeadConfig, ProjectorConfig
from ltrscale.models.ranker import Architecture, Ranker
from ltrscale.pretext.augment import ZeroingConfig
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.pretext.objective import Pretrainer
from ltrscale.pretext.vime import VimeConfig

KINDS = ["numeric", "numeric", "numeric", "categorical"]


def documents() -> QueryGroups:
    generator = torch.Generator().manual_seed(0)
    x_NF = torch.randn(12, 4, generator=generator)
    x_NF[:, 3] = torch.randint(0, 3, (12,), generator=generator)
    return QueryGroups(x_NF, torch.tensor([0, 5, 6, 12]))


def transform() -> FeatureTransform:
    return fit_transform([documents().features_NF], KINDS, TransformConfig(numeric="standard"))  # type: ignore[list-item]


def architecture(**changes: object) -> Architecture:
    parts = {"transform": TransformConfig(numeric="standard"), "encoder": MLPConfig(hidden=(8,)), "head": HeadConfig()}
    return Architecture.model_validate({**parts, **changes})


def test_noise_moves_numbers_in_training_only() -> None:
    torch.manual_seed(0)
    seen: list[Tensor] = []
    ranker = Ranker(architecture(noise=0.5), transform())
    ranker.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    plain_NF = ranker.transform(documents().features_NF)
    ranker.eval()(documents())
    ranker.train()(documents())
    assert torch.equal(seen[0], plain_NF)
    assert torch.equal(seen[1][:, 3], plain_NF[:, 3])
    assert 0.2 < (seen[1] - plain_NF)[:, :3].std() < 0.8


def test_a_list_head_needs_a_context_that_embeds_lists() -> None:
    for context in (None, DASALCConfig(width=4, heads=2)):
        with pytest.raises(ValueError, match=r"set context\.kind to rankformer"):
            Ranker(architecture(context=context, grades=3), transform())
    ranker = Ranker(architecture(context=RankFormerConfig(), grades=3), transform()).eval()
    scores_N, grades_QC = ranker.score(documents())
    assert (scores_N.shape, grades_QC.shape) == ((12,), (3, 3))


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_pretrained_encoder_is_taken_over_with_layers_of_its_projector(layers: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = NetworkConfig(transform=TransformConfig(numeric="standard"), encoder=MLPConfig(hidden=(8,)))
    method = SimCLRRankConfig(projector=ProjectorConfig(layers=2, width=10, output=3))
    model = Pretrainer(transform(), network, method, ZeroingConfig()).eval()
    features = [Feature(name=str(i), kind=kind) for i, kind in enumerate(KINDS)]  # type: ignore[arg-type]
    about = {"config": {}, "features": features, "dataset_hash": "", "metrics": {}, "made_by": {}}
    bundle.save_pretrained(str(tmp_path / "out"), model, **about)  # type: ignore[arg-type]
    opened = bundle.load(str(tmp_path / "out"))
    made = architecture(projector=method.projector, projector_layers=layers)
    ranker = Ranker(made, opened.transform()).eval()
    opened.initialise(ranker)
    h_ND = model.encoder(model.transform(documents().features_NF))
    expected_ND = model.projector.first(layers)(h_ND)
    assert torch.equal(ranker.embed(documents()).documents_ND, expected_ND)
    assert expected_ND.shape[1] == (10 if layers else 8)
    with pytest.raises(ValueError, match="projector_layers is 3, the projector has 2 hidden layers"):
        architecture(projector=method.projector, projector_layers=3)


def test_a_method_without_a_projector_leaves_a_bundle_too(tmp_path: Path) -> None:
    network = NetworkConfig(transform=TransformConfig(numeric="standard"), encoder=MLPConfig(hidden=(8,)))
    model = Pretrainer(transform(), network, VimeConfig(), ZeroingConfig()).eval()
    features = [Feature(name=str(i), kind=kind) for i, kind in enumerate(KINDS)]  # type: ignore[arg-type]
    about = {"config": {}, "features": features, "dataset_hash": "", "metrics": {}, "made_by": {}}
    bundle.save_pretrained(str(tmp_path / "out"), model, **about)  # type: ignore[arg-type]
    opened = bundle.load(str(tmp_path / "out"))
    x_NF = opened.transform()(documents().features_NF)
    assert torch.equal(opened.encoder().eval()(x_NF), model.encoder(x_NF))
