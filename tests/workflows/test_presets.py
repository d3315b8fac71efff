"""Presets of whole methods: equal inputs for all methods of a comparison; what a method says stands over its preset."""

from pathlib import Path
from typing import Any

import pytest

from ltrscale import bundle
from ltrscale import config as configs
from ltrscale.config import kind_of, members
from ltrscale.errors import InputError
from ltrscale.models.encoders import ResNetConfig
from ltrscale.models.ranker import Architecture
from ltrscale.pretext.choices import FeatureMethodConfig
from ltrscale.pretext.contrast import Contrastive
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.workflows.methods import GBDTMethod, NeuralMethod, SemiMethod
from ltrscale.workflows.pipeline import PipelineConfig, run_pipeline

PRETEXTS = {kind_of(cls): cls for cls in members(FeatureMethodConfig)}
TREES = [kind_of(cls) for cls in members(GBDTConfig)]
both_presets = pytest.mark.parametrize("preset", ["paper", "hou24"])


def neural(**values: Any) -> NeuralMethod:
    return configs.validate(NeuralMethod, values, "method")


def trees(preset: str, **values: Any) -> GBDTMethod:
    return configs.validate(GBDTMethod, {"preset": preset, **values}, "method")


@both_presets
@pytest.mark.parametrize("kind", PRETEXTS)
def test_networks_and_trees_have_the_same_inputs_with_pretraining_or_without(preset: str, kind: str) -> None:
    plain, tuned = neural(preset=preset), neural(preset=preset, pretrain={"method": {"kind": kind}})
    assert plain.pretrain is None
    assert tuned.pretrain is not None
    assert tuned.pretrain.network == plain.finetune.network
    assert tuned.pretrain.preset == preset
    per_query = tuned.pretrain.network.transform.per_query
    assert {trees(preset, gbdt={"kind": library}).gbdt.per_query for library in TREES} == {per_query}
    assert per_query == (preset == "hou24")
    semi = SemiMethod.model_validate({"preset": preset, "semi": {"pca": 2, "pseudo_labels": {}, "first": {}}}).semi
    assert semi.first is not None
    assert {semi.gbdt.per_query, semi.first.per_query} == {per_query}


@both_presets
@pytest.mark.parametrize("kind", PRETEXTS)
def test_finetuning_is_the_papers_and_keeps_what_the_code_keeps(preset: str, kind: str) -> None:
    made = neural(preset=preset, pretrain={"method": {"kind": kind}})
    finetune = made.finetune
    assert (finetune.head.layers, finetune.head_epochs, finetune.epochs, finetune.patience) == (3, 100, 100, 100)
    assert (finetune.loss.kind, finetune.stream.docs_per_batch, finetune.head.dropout) == ("lambdarank", 1000, 0)
    assert finetune.optimizer.model_dump(include={"kind", "learning_rate", "weight_decay", "clip_norm"}) == {
        "kind": "adam", "learning_rate": 5e-5, "weight_decay": 0.0, "clip_norm": None,
    }  # fmt: skip
    contrastive = issubclass(PRETEXTS[kind], Contrastive)
    assert finetune.projector_layers == int(preset == "hou24" and contrastive)
    finetune.check_start(made.projector_layers())  # the projector has the layers that are kept
    assert neural(**made.model_dump()) == made


def test_the_baseline_of_the_authors_code_ends_in_one_linear_layer() -> None:
    paper, code = (neural(preset=preset).finetune for preset in ("paper", "hou24"))
    assert (paper.head.layers, code.head.layers) == (3, 1)
    assert (paper.optimizer.weight_decay, code.optimizer.weight_decay) == (0, 1e-3)
    for made in (paper, code):
        assert (made.epochs, made.patience, made.optimizer.learning_rate) == (300, 300, 1e-3)
    encoder = code.network.encoder
    assert isinstance(encoder, ResNetConfig)
    assert (encoder.activation, encoder.last_activation, encoder.input_bias) == ("gelu", "relu", False)


def test_trees_of_the_authors_code() -> None:
    code = trees("hou24").gbdt
    assert isinstance(code, LightGBMConfig)
    assert (code.num_trees, code.num_leaves, code.min_data_in_leaf, code.learning_rate) == (100, 31, 20, 0.1)
    assert (code.early_stopping_rounds, code.truncation, code.objective) == (20, 30, "lambdarank")
    given = {"pca": 5, "pseudo_labels": {}}
    paper, semi = (SemiMethod.model_validate({"preset": p, "semi": given}).semi for p in ("paper", "hou24"))
    assert paper.pseudo_labels is not None
    assert semi.pseudo_labels is not None
    assert (paper.pseudo_labels.grades, semi.pseudo_labels.grades, semi.pseudo_labels.bins) == (31, 5, "even")
    assert (paper.pca_scaled, semi.pca_scaled, semi.pca) == (True, False, 5)
    assert SemiMethod.model_validate({"preset": "hou24", "semi": {"pca": 5}}).semi.pseudo_labels is None


def test_a_method_stands_over_its_preset_key_by_key() -> None:
    made = neural(
        preset="hou24",
        pretrain={"method": {"kind": "simsiam"}, "epochs": 3, "optimizer": {"learning_rate": 0.5}},
        finetune={"head": {"layers": 1}, "optimizer": {"kind": "sgd"}, "projector_layers": 2},
    )
    assert made.pretrain is not None
    assert (made.pretrain.epochs, made.pretrain.optimizer.learning_rate) == (3, 0.5)
    assert made.pretrain.optimizer.weight_decay == 2e-4
    assert (made.finetune.head.layers, made.finetune.head_epochs, made.finetune.projector_layers) == (1, 100, 2)
    assert made.finetune.optimizer.kind == "sgd"
    assert trees("hou24", gbdt={"num_leaves": 96}).gbdt.per_query
    other = neural(preset="hou24", pretrain={"preset": "paper"})
    assert other.pretrain is not None
    assert other.pretrain.network.transform.per_query is False


def test_without_a_preset_nothing_changes() -> None:
    plain = NeuralMethod()
    assert (neural(), neural(preset=None)) == (plain, plain)
    assert GBDTMethod().gbdt == LightGBMConfig()


def comparison(methods: dict[str, Any], **values: Any) -> PipelineConfig:
    weeks = {"train": "2026-W01..2026-W02", "validation": "2026-W03", "test": "2026-W04"}
    given = {
        "out": "out",
        "data": "data",
        "splits": {name: {"periods": periods} for name, periods in weeks.items()},
        "methods": methods,
        "evaluate": {"baseline": None, "resamples": 100},
    }
    return configs.validate(PipelineConfig, given | values, "comparison")


METHODS: dict[str, Any] = {
    "trees": {"kind": "gbdt"},
    "scratch": {"kind": "neural"},
    "rank": {"kind": "neural", "pretrain": {}},
    "siam": {"kind": "neural", "pretrain": {"method": {"kind": "simsiam"}}},
    "rank_probe": {"kind": "neural", "pretrained_as": "rank", "finetune": {"epochs": 0}},
    "siam_probe": {"kind": "neural", "pretrained_as": "siam", "finetune": {"epochs": 0}},
    "text": {"kind": "neural", "preset": "paper"},
    "mean": {"kind": "combined", "parts": ["rank", "siam"]},
}


def test_one_preset_for_all_methods_of_a_comparison() -> None:
    made = comparison(METHODS, preset="hou24").methods
    assert [getattr(method, "preset", None) for method in made.values()] == [*["hou24"] * 6, "paper", None]
    kept = {name: made[name].finetune.projector_layers for name in ("rank", "siam", "rank_probe", "siam_probe")}
    assert kept == {"rank": 1, "siam": 0, "rank_probe": 1, "siam_probe": 0}
    assert made["rank_probe"].finetune.epochs == 0
    assert comparison(METHODS).methods["rank"].preset is None


def test_what_a_preset_cannot_know_must_be_stated() -> None:
    probe = {"preset": "hou24", "pretrained_as": "rank"}
    with pytest.raises(InputError, match=r"set finetune\.projector_layers beside pretrained_as"):
        neural(**probe)
    assert neural(**probe, finetune={"projector_layers": 1}).finetune.projector_layers == 1
    assert neural(preset="paper", pretrained_as="rank").finetune.projector_layers == 0
    for make in (neural, comparison):
        with pytest.raises(InputError, match="'paper' or 'hou24'"):
            make(**({"methods": METHODS} if make is comparison else {}), preset="hou23")


@pytest.mark.slow
def test_a_comparison_under_one_preset_runs(synthetic_dataset: str, tmp_path: Path) -> None:
    small = {"network": {"encoder": {"width": 8, "blocks": 1}}, "epochs": 1, "stream": {"docs_per_batch": 800}}
    tune = {"head_epochs": 1, "epochs": 1}
    methods = {
        "trees": {"kind": "gbdt", "gbdt": {"num_trees": 3, "num_threads": 1}},
        "scratch": {"kind": "neural", "finetune": {**tune, "network": small["network"]}},
        "rank": {"kind": "neural", "pretrain": {**small, "method": {"projector": {"width": 8}}}, "finetune": tune},
        "siam": {"kind": "neural", "pretrain": {**small, "method": {"kind": "simsiam"}}, "finetune": tune},
    }
    run_pipeline(comparison(methods, preset="hou24", data=synthetic_dataset, out=str(tmp_path)))
    made = {name: bundle.load(str(tmp_path / "seed-0" / name / "model")) for name in methods}
    assert made["trees"].trees is not None
    assert made["trees"].trees.per_query
    for name in ("scratch", "rank", "siam"):
        architecture = made[name].architecture
        assert isinstance(architecture, Architecture)
        assert (architecture.transform.per_query, architecture.transform.numeric) == (True, "none")
        assert architecture.projector_layers == (name == "rank")
