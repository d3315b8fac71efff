"""Presets of whole methods: equal inputs for all methods of a comparison; what a method says stands over its preset.

The configs of the papers have the settings that their texts name, for each data set.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ltrscale import bundle
from ltrscale import config as configs
from ltrscale.config import kind_of, members
from ltrscale.errors import InputError
from ltrscale.experiments.methods.single import GBDTMethod, NeuralMethod, SemiMethod
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.models.encoders import ResNetConfig
from ltrscale.models.ranker import Architecture
from ltrscale.pretext.choices import FeatureMethodConfig
from ltrscale.pretext.contrast import Contrastive
from ltrscale.ranking.losses import attention_allocation
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig

CONFIGS = Path(__file__).resolve().parents[2] / "jobs" / "configs" / "papers"
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
    finetune.check_start(
        made.pretrain and made.pretrain.method.projector_layers
    )  # the projector has the layers that are kept
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


def comparison(methods: dict[str, Any], **values: Any) -> PipelineJob:
    weeks = {"train": "2026-W01..2026-W02", "validation": "2026-W03", "test": "2026-W04"}
    given = {
        "out": "out",
        "data": "data",
        "splits": {name: {"periods": periods} for name, periods in weeks.items()},
        "methods": methods,
        "evaluate": {"baseline": None, "resamples": 100},
    }
    return configs.validate(PipelineJob, given | values, "comparison")


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


@pytest.mark.nightly
def test_a_comparison_under_one_preset_runs(synthetic_dataset: str, tmp_path: Path) -> None:
    small = {"network": {"encoder": {"width": 8, "blocks": 1}}, "epochs": 1, "stream": {"docs_per_batch": 800}}
    tune = {"head_epochs": 1, "epochs": 1}
    methods = {
        "trees": {"kind": "gbdt", "gbdt": {"num_trees": 3, "num_threads": 1}},
        "scratch": {"kind": "neural", "finetune": {**tune, "network": small["network"]}},
        "rank": {"kind": "neural", "pretrain": {**small, "method": {"projector": {"width": 8}}}, "finetune": tune},
        "siam": {"kind": "neural", "pretrain": {**small, "method": {"kind": "simsiam"}}, "finetune": tune},
    }
    comparison(methods, preset="hou24", data=synthetic_dataset, out=str(tmp_path)).run()
    made = {name: bundle.load(str(tmp_path / "seed-0" / name / "model")) for name in methods}
    assert made["trees"].held.per_query
    for name in ("scratch", "rank", "siam"):
        architecture = made[name].held
        assert isinstance(architecture, Architecture)
        assert (architecture.transform.per_query, architecture.transform.numeric) == (True, "none")
        assert architecture.projector_layers == (name == "rank")


# The configs of the papers, against their texts.


def shipped(*names: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The methods of a paper's config, and of those that are laid over it."""
    return configs.load(PipelineJob, [str(CONFIGS / f"{name}.yaml") for name in names], overrides).methods


@pytest.mark.parametrize(
    ("names", "numeric", "but"),
    [
        (("buyl23",), "quantile_normal", {}),  # section 6.2: "For WEB30k and Istella, we use a quantile transform"
        (("buyl23", "buyl23-yahoo"), "standard", {}),  # "we just apply a standard transformation"
        (("qin21",), "log1p", {"dnn": "none", "ranksvm": "log1p_standard"}),  # section 4.2.1, equation 6
        (("qin21", "qin21-yahoo"), "none", {}),  # section 4.2.1: "(we leave it not-transformed)"
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
def test_the_inputs_of_networks_are_those_that_the_text_names_for_the_data(
    names: tuple[str, ...], numeric: str, but: dict[str, str]
) -> None:
    networks = {name: method for name, method in shipped(*names).items() if isinstance(method, NeuralMethod)}
    assert len(networks) >= 4
    found = {name: method.finetune.network.transform.numeric for name, method in networks.items()}
    assert found == {name: but.get(name, numeric) for name in networks}


@pytest.mark.parametrize("paper", ["buyl23", "qin21"])
def test_a_config_for_another_data_set_changes_the_inputs_alone(paper: str) -> None:
    one, other = shipped(paper), shipped(paper, f"{paper}-yahoo")
    assert list(one) == list(other)
    for name, method in one.items():
        if isinstance(method, NeuralMethod):
            transform = other[name].finetune.network.transform
            network = method.finetune.network.replace(transform=transform)
            assert other[name] == method.replace(finetune=method.finetune.replace(network=network))
        else:
            assert other[name] == method


def test_the_command_for_qin21_on_yahoo_leaves_out_what_has_no_meaning_there() -> None:
    """On MSLR-WEB30K feature 110 is BM25."""
    removed = re.findall(r"--set (methods\.\w+=null)", (CONFIGS / "qin21-yahoo.yaml").read_text())
    left = shipped("qin21", "qin21-yahoo", overrides=removed)
    assert not {"dnn_log1p", "setrank_re", "dlcm"} & set(left)
    assert "initial_rank='feature'" not in str(left)
    assert "initial_rank='feature'" in str(shipped("qin21"))


@pytest.mark.parametrize(
    ("paper", "trees"),
    [
        ("hou24", 100),  # A.2.3: "letting the rest of the parameters be the default in lightgbm"
        ("hou24-binary", 100),
        ("hou24-industrial", 100),  # A.2.5: "We used default values of the library for the other hyperparameters"
        ("qin21", 1000),  # appendix A: numbers of trees are a part of the grid
    ],
)
def test_trees_of_a_number_that_the_text_names_do_not_stop_early(paper: str, trees: int) -> None:
    gbdt = shipped(paper)["gbdt"].gbdt
    assert isinstance(gbdt, LightGBMConfig)
    assert (gbdt.num_trees, gbdt.early_stopping_rounds) == (trees, None)
    named = {"num_trees", "num_leaves", "min_data_in_leaf", "learning_rate", "early_stopping_rounds", "relevant_only"}
    assert gbdt.model_dump(exclude=named) == LightGBMConfig().model_dump(exclude=named)


@pytest.mark.parametrize("paper", ["hou24-binary", "hou24-industrial"])
def test_groups_without_a_positive_label_are_pretrained_on_and_nothing_else(paper: str) -> None:
    """HOU24, table 11: labelled groups "have at least one item with y = 1"; section 4.2: trained on them alone."""
    methods = shipped(paper)
    settings = {name: method.gbdt if name == "gbdt" else method.finetune for name, method in methods.items()}
    assert {name: found.relevant_only for name, found in settings.items()} == dict.fromkeys(methods, True)
    assert any(method.pretrain is not None for method in methods.values() if isinstance(method, NeuralMethod))


@pytest.mark.parametrize(
    ("paper", "raw"), [("sun23", ["naive", "features", "mlm"]), ("sun23-features", ["naive", "click_ratio"])]
)
def test_clicks_are_learned_by_equation_1_and_labels_that_sum_to_1_by_softmax(paper: str, raw: list[str]) -> None:
    methods = shipped(paper)
    assert {methods[name].finetune.loss.kind for name in raw} == {"attention_allocation"}
    for name, method in methods.items():
        if isinstance(method, NeuralMethod) and (method.learns_from or "").startswith("refined"):
            assert method.finetune.loss.kind == "softmax", name
    negatives = methods["finetuned" if paper == "sun23" else "negatives"].finetune.loss
    assert negatives.kind == "softmax_negatives"  # equation 4


def test_attention_allocation_is_equation_1_of_clicks_that_share_one_label() -> None:
    """With the logarithm that the printed one lacks: `- sum_j y_j log(exp(x_j) / sum_k exp(x_k))`."""
    generator = torch.Generator().manual_seed(0)
    for clicks in (1, 3):
        labels_N = (torch.arange(10) < clicks).double()
        scores_N = torch.randn(10, generator=generator, dtype=torch.float64)
        expected = -(labels_N / clicks * torch.log_softmax(scores_N, 0)).sum()
        found = attention_allocation(scores_N, labels_N, torch.tensor([0, 10]))
        torch.testing.assert_close(found, expected[None])


def test_the_repetition_of_head_queries_that_sun23_describes_is_a_setting() -> None:
    (text,) = re.findall(r"--set '(methods\.finetuned\S* .*)'$", (CONFIGS / "sun23.yaml").read_text(), re.MULTILINE)
    assert shipped("sun23")["finetuned"].finetune.stream.repeat is None  # NFCorpus has no frequencies
    repeat = shipped("sun23", overrides=[text])["finetuned"].finetune.stream.repeat
    assert (repeat.by, repeat.times) == ("meta_frequency", {"high": 2.0})


@pytest.mark.parametrize("paper", ["hou23", "hou24", "hou24-binary"])
def test_the_gap_of_outliers_is_named_for_each_data_set(paper: str) -> None:
    """HOU23, section 4; HOU24, A.2.2."""
    (line,) = [line for line in (CONFIGS / f"{paper}.yaml").read_text().splitlines() if "gap:" in line]
    assert "{gap: 5}" in line
    assert line.endswith("# 5 on MSLR-WEB30K, 20 on Yahoo, 32 on Istella-S")
