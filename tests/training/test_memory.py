"""What a training takes is known before it begins: what has no room is refused, and foreseeing changes nothing."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainers import finetuned, pretrain, splits
from text_log import ENCODER

from ltrscale import bundle
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.selection import select
from ltrscale.data.stream.batches import GroupStream, StreamConfig, iterate
from ltrscale.draws import mix
from ltrscale.errors import InputError
from ltrscale.models.features import FeatureTransform, TransformConfig
from ltrscale.models.ranker import Architecture, HeadConfig, Ranker
from ltrscale.training import memory
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.loop import Trainer
from ltrscale.training.pretrain import PretrainConfig
from ltrscale.training.pretrain_in_context import InContextPretrainConfig, Learner
from ltrscale.training.ranking import RankingConfig, RankingObjective

STREAM = {"docs_per_batch": 500, "streams": 2}
FINETUNE = {
    "network": {"encoder": {"width": 8, "blocks": 1}, "transform": {"host_rows": 0}},
    "epochs": 1,
    "stream": STREAM,
}
PRETRAIN = {"network": FINETUNE["network"], "epochs": 1, "stream": STREAM}
HUGE = {"encoder": {"width": 1_000_000}}


def finetune(data: str, out: Path, **changes: Any) -> str:
    finetuned(data, out, FinetuneConfig.model_validate({**FINETUNE, **changes}))
    return str(out)


def pretrained(data: str, out: Path, **changes: Any) -> str:
    config = PretrainConfig.model_validate({**PRETRAIN, **changes})
    pretrain(config, splits(data)[0], str(out), origin={}, report=lambda _: None)
    return str(out)


@pytest.mark.parametrize("train", [finetune, pretrained])
def test_a_network_without_room_is_refused_before_it_is_built(
    train: Any, synthetic_dataset: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"the network has \d+,\d{3},\d{3},\d{3},\d{3} parameters, .* lower the sizes"):
        train(synthetic_dataset, tmp_path / "out", network=HUGE)


@pytest.mark.slow
def test_so_is_an_in_context_network_and_one_of_many_heads(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = InContextPretrainConfig.model_validate({"network": {"token": 1_000_000, "layers": 2}})
    with pytest.raises(InputError, match="lower the sizes"):
        Learner(wide, torch.device("cpu"))
    monkeypatch.setattr(memory, "memory_of", lambda _: 100_000)  # of one small network, not of 100
    finetune(synthetic_dataset, tmp_path / "one")
    with pytest.raises(InputError, match=r"and cpu has 0\.0 GB; lower"):
        finetune(synthetic_dataset, tmp_path / "many", heads=100)


def test_an_outline_draws_no_random_number() -> None:
    torch.manual_seed(0)
    alone = torch.nn.Linear(3, 3).weight
    torch.manual_seed(0)
    made = memory.built(lambda: torch.nn.Linear(3, 3), None, device=torch.device("cpu"))
    assert torch.equal(made.weight, alone)


@pytest.mark.slow
@pytest.mark.parametrize("train", [finetune, pretrained])
def test_what_the_longest_list_takes_is_said_and_changes_no_weight(
    train: Any,
    synthetic_dataset: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    plain = train(synthetic_dataset, tmp_path / "plain")
    assert "the longest group" not in caplog.text
    monkeypatch.setattr(memory, "_LONG", 10)
    monkeypatch.setattr(memory, "_LARGEST", 256)
    foreseen = train(synthetic_dataset, tmp_path / "foreseen")
    longest = select(splits(synthetic_dataset)[0], labelled=False).longest
    assert f"a step of the longest group, {longest} documents, takes about 0.0 GB of " in caplog.text
    weights, others = (bundle.load(url, bundle.EncoderBundle).weights() for url in (plain, foreseen))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert weights.keys() == others.keys()


@pytest.mark.slow
def test_a_list_of_texts_is_foreseen_too(
    texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(memory, "_LONG", 10)
    monkeypatch.setattr(memory, "_LARGEST", 256)
    finetune(texts, tmp_path / "out", network={"encoder": ENCODER}, head={"layers": 1})
    assert "documents, takes about 0.0 GB" in caplog.text


@pytest.mark.slow
def test_a_list_without_room_is_refused_only_if_it_is_certainly_served(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train = splits(synthetic_dataset)[0]
    assert select(train, labelled=False).serves_longest
    few = select(train.replace(labelled_fraction=0.3), labelled=True)
    assert not few.serves_longest
    monkeypatch.setattr(memory, "_LONG", 10)
    monkeypatch.setattr(memory, "_LARGEST", 256)
    monkeypatch.setattr(memory, "extrapolated", lambda *_: memory.Taken(1e15, 1e15, 1.0))
    with pytest.raises(InputError, match=r"takes about 1,000,000.0 GB, and cpu has .*; prepare .*max_group, or"):
        pretrained(synthetic_dataset, tmp_path / "refused")
    monkeypatch.setattr("ltrscale.data.dataset.selection.Selection.serves_longest", False)
    finetune(synthetic_dataset, tmp_path / "said")
    (line,) = [record for record in caplog.records if "the longest group" in record.getMessage()]
    assert line.levelno == logging.WARNING


def trainer(data: str, **settings: Any) -> Trainer:
    """A trainer of a ranker of 8 features without categories."""
    config = RankingConfig.model_validate(settings.pop("config", {}))
    torch.manual_seed(0)
    transform = FeatureTransform(TransformConfig(), ["numeric"] * 8, [])
    parts = {"encoder": {"kind": "resnet", "width": 16, "blocks": 1}, "head": HeadConfig(layers=1)}
    ranker = Ranker(Architecture.model_validate({"transform": transform.config, **parts, **settings}), transform)
    stream = GroupStream(select(splits(data)[0], labelled=True), StreamConfig())
    objective = RankingObjective(ranker, config).train()
    return Trainer(objective, objective, stream, config.optimizer, epochs=1, seed=mix("test", 0))


def one_list(length: int) -> QueryGroups:
    generator = torch.Generator().manual_seed(0)
    x_NF = torch.randn(length, 8, generator=generator)
    return QueryGroups(x_NF, torch.tensor([0, length]), torch.arange(length) % 5 * 1.0)


QUADRATIC = {"kind": "lambdarank"}
SOFTMAX = {"config": {"loss": {"kind": "softmax"}}}
CASES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "all pairs": ({"config": {"loss": QUADRATIC}}, False, True),
    "truncated": ({"config": {"loss": {**QUADRATIC, "truncation": 10}}}, False, False),
    "softmax": (SOFTMAX, False, False),
    "neural sort": ({"config": {"loss": {"kind": "neural_sort_ndcg"}}}, False, True),
    "attention": (
        {"context": {"kind": "rankformer", "feedforward": 8}, "config": {"loss": {"kind": "softmax"}}},
        True,
        True,
    ),
}
"""Settings, and whether memory and work grow with the square of a list's length."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_lists_of_some_hundred_documents_tell_what_a_longer_one_takes(name: str, synthetic_dataset: str) -> None:
    settings, of_memory, of_work = CASES[name]
    made = trainer(synthetic_dataset, **dict(settings))
    measured = {size: memory._costs(made, one_list(size)) for size in (256, 512, 1024)}
    expected, true = memory.extrapolated(measured, 6000), memory._costs(made, one_list(6000))
    assert expected.bytes == pytest.approx(true.bytes, rel=0.05)
    assert expected.work == pytest.approx(true.work, rel=0.2)
    proportional = [6000 / 1024 * measured[1024][i] for i in (0, 1)]
    assert (expected.bytes > 2 * proportional[0], expected.work > 2 * proportional[1]) == (of_memory, of_work)


def test_a_list_is_made_of_a_batch_whole(synthetic_dataset: str) -> None:
    some = next(iterate(select(splits(synthetic_dataset)[0], labelled=True), docs_per_batch=50))
    made = memory._one_list(some, 120).checked()
    assert (made.n_groups, made.n_documents) == (1, 120)
    assert made.labels_N is not None
    assert some.labels_N is not None
    assert torch.equal(made.labels_N[: some.n_documents], some.labels_N)
    assert torch.equal(made.features_NF[some.n_documents].nan_to_num(), some.features_NF[0].nan_to_num())
