"""Training on text, from data set to bundle and scores: vocabulary, initial weights, workers, pretraining."""

import json
import multiprocessing
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nightly import nightly
from small_trainers import Records, finetuned, pretrain, splits
from text_log import ENCODER, SIZE, SPECIAL, STREAM, add_text
from token_batches import text_config, text_encoder, text_groups, text_transform

from ltrscale import bundle, storage
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.stream.batches import GroupStream, StreamConfig, iterate
from ltrscale.errors import InputError
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.cross_encoder import CrossEncoder, CrossEncoderConfig
from ltrscale.models.ranker import Architecture, Ranker
from ltrscale.pretext.objective import Pretrainer
from ltrscale.pretext.reconstruct import MaskedLanguageConfig
from ltrscale.ranking.clicks import with_negatives
from ltrscale.runtime.workers import ONE, WorkersConfig
from ltrscale.scoring.score import ScoreJob
from ltrscale.training.checkpoint import Progress, restore
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.fitting import fit, fitted_to, load_initial, with_tokens
from ltrscale.training.loop import Trainer
from ltrscale.training.pretrain import PretrainConfig
from ltrscale.training.ranking import RankingObjective
from ltrscale.training.resumption import Checkpoints
from ltrscale.training.settings import OptimizerConfig

OBJECTIVES = ("ranking", "clicks", "masked_language")
CLICKS = {"debias": {"kind": "dla", "positions": 5}, "negatives": 3}
"""Learning from clicks, beside random negatives."""


def run(
    data: str, out: Path | str, pretrained: str | None = None, *, workers: WorkersConfig = ONE, **changes: Any
) -> Records:
    """Finetune a small cross-encoder; returns the records of its epochs."""
    encoder = {**ENCODER, **changes.pop("encoder", {})}
    network = {"encoder": encoder, **changes.pop("network", {})}
    values = {"network": network, "head": {"layers": 1}, "head_epochs": 1, "epochs": 2, "stream": STREAM}
    config = FinetuneConfig.model_validate({**values, "optimizer": {"learning_rate": 1e-2}, **changes})
    return finetuned(data, out, config, pretrained, workers=workers)


def run_pretraining(data: str, out: Path | str, **changes: Any) -> str:
    values = {"network": {"encoder": ENCODER}, "method": {"kind": "masked_language"}, "epochs": 1, "stream": STREAM}
    config = PretrainConfig.model_validate({**values, **changes})
    pretrain(config, splits(data)[0], str(out), origin={}, report=lambda _: None)
    return str(out)


def groups_of(data: str, opened: bundle.Bundle) -> QueryGroups:
    return next(iterate(bundle.with_tokens_of(select(splits(data)[2], labelled=True), [opened])))


@pytest.mark.slow
def test_a_ranker_reads_the_text_and_its_bundle_scores(texts: str, tmp_path: Path) -> None:
    records = run(texts, tmp_path / "text", epochs=6)
    blind = run(
        texts,
        tmp_path / "features",
        network={"encoder": {"kind": "mlp", "hidden": [16]}},
        epochs=6,
        stream={"docs_per_batch": 300},
    )
    best, without = (max(r["validation_ndcg@5"] for r in of) for of in (records, blind))
    assert best > without + 0.1  # the titles name the relevant documents
    opened = bundle.load(str(tmp_path / "text"))
    (encoder,) = opened.encoders
    assert isinstance(encoder, CrossEncoderConfig)
    assert encoder.vocabulary is not None
    assert encoder.vocabulary.model_dump() == {"size": SIZE, "sha256": ""} | {
        n: SPECIAL[n] for n in ("cls", "sep", "mask")
    }
    groups = groups_of(texts, opened)
    scores_N = opened.scorer()(groups)
    ranker = opened.ranker()
    assert torch.equal(ranker(groups).detach(), scores_N)
    ScoreJob(data=texts, bundle=opened.url, periods=("2026-W04",), out=str(tmp_path / "scores")).run()
    rescored = select(splits(texts)[2].with_scores(str(tmp_path / "scores")), labelled=True)
    found = torch.cat([part.labels_N for part in iterate(rescored) if part.labels_N is not None])
    whole = bundle.with_tokens_of(select(splits(texts)[2], labelled=False), [opened])
    torch.testing.assert_close(
        found, torch.cat([opened.scorer()(part) for part in iterate(whole)]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
def test_a_pretrained_encoder_is_finetuned_and_finetuned_again(texts: str, tmp_path: Path) -> None:
    start = run_pretraining(texts, tmp_path / "pretrained")
    assert bundle.load(start).kind == "pretrained"
    run(texts, tmp_path / "probe", start, epochs=0)
    before, after = bundle.load(start).encoder(), bundle.load(str(tmp_path / "probe")).encoder()
    for name, value in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], value), name
    head = bundle.load(str(tmp_path / "probe")).weights()["head.0.weight"]
    run(
        texts,
        tmp_path / "again",
        str(tmp_path / "probe"),
        keep_head=True,
        head_epochs=0,
        optimizer={"learning_rate": 1e-9},
    )
    torch.testing.assert_close(bundle.load(str(tmp_path / "again")).weights()["head.0.weight"], head, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_masked_language_modelling_may_run_beside_a_ranking_loss(texts: str, tmp_path: Path) -> None:
    beside = {"method": {"kind": "masked_language"}, "stream": {"docs_per_batch": 200}, "every": 2}
    records = run(texts, tmp_path / "both", auxiliary=beside, epochs=1)
    assert records[-1]["loss"] > 0
    with pytest.raises(InputError, match="method simclr_rank learns from features, and encoder cross_encoder does not"):
        run(texts, tmp_path / "other", auxiliary={"method": {"kind": "simclr_rank"}})


@pytest.mark.slow
@pytest.mark.parametrize("pooler", ["cls", "tanh"])
def test_initial_weights_come_from_a_directory(texts: str, tmp_path: Path, pooler: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": SIZE + 3, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=12, max_position_embeddings=20)
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path / "bert")
    encoder = {**ENCODER, "bert": {"dropout": 0.0, "pooler": pooler}, "features": None}
    network = NetworkConfig.model_validate({"encoder": encoder, "initial": str(tmp_path / "bert")})
    fitted = fitted_to(network, select(splits(texts)[0], labelled=False))
    made = fitted.encoder
    assert isinstance(made, CrossEncoderConfig)
    assert made.vocabulary is not None
    assert (made.bert.width, made.bert.feedforward, made.bert.positions, made.vocabulary.size) == (8, 12, 20, SIZE + 3)
    ours = made.build(torch.ones(1, dtype=torch.bool), [])
    assert isinstance(ours, CrossEncoder)
    load_initial(ours, fitted.initial)
    pairs = torch.tensor([2, 7, 3, 8, 3]), torch.tensor([0, 0, 0, 1, 1])
    expected = model.eval()(pairs[0][None], token_type_ids=pairs[1][None])
    h_TD = ours.eval().bert(*pairs, torch.tensor([0, 5]))
    torch.testing.assert_close(h_TD, expected.last_hidden_state[0], rtol=1e-5, atol=1e-5)
    pooled = expected.pooler_output if pooler == "tanh" else expected.last_hidden_state[:, 0]
    torch.testing.assert_close(ours.bert.pool(h_TD, torch.tensor([0, 5])), pooled, rtol=1e-5, atol=1e-5)
    run(
        texts,
        tmp_path / "ranker",
        network={"initial": str(tmp_path / "bert")},
        epochs=1,
        optimizer={"learning_rate": 1e-9},
    )
    trained = bundle.load(str(tmp_path / "ranker")).weights()["encoder.bert.tokens.weight"]
    torch.testing.assert_close(trained, model.embeddings.word_embeddings.weight.detach(), rtol=0, atol=1e-6)


def test_initial_weights_that_do_not_fit_are_refused(texts: str, tmp_path: Path) -> None:
    train = select(splits(texts)[0], labelled=False)
    values = {"model_type": "bert", "hidden_act": "gelu", "type_vocab_size": 2, "layer_norm_eps": 1e-12}
    values |= {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    network = NetworkConfig.model_validate({"encoder": ENCODER, "initial": str(tmp_path)})
    for change, message in (
        ({"vocab_size": 39, "max_position_embeddings": 20}, "has 39 tokens, and that of the data 40"),
        ({"vocab_size": 40, "max_position_embeddings": 15}, "has 15 positions, and network.encoder.max_tokens is 16"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(InputError, match=message):
            fitted_to(network, train)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"config\.json: no JSON object"):
        fitted_to(network, train)
    (tmp_path / "config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json"):
        fitted_to(network, train)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"model\.safetensors: no safetensors"):
        load_initial(text_encoder(), str(tmp_path))


@pytest.mark.parametrize("debias", [None, {"kind": "dla"}, {"kind": "weights"}])
def test_negatives_join_the_lists_in_training_alone(debias: dict[str, object] | None) -> None:
    """The loss is that of the batch with negatives drawn by the same generator; scores outside of it stay."""
    transform, groups = text_transform(), text_groups((5, 4, 6))
    architecture = Architecture(transform=transform.config, encoder=text_config(), head={"layers": 1})
    torch.manual_seed(0)
    ranker = Ranker(architecture, transform)
    settings = {"loss": {"kind": "softmax"}, "debias": debias}
    plain, drawing = (
        RankingObjective(ranker, FinetuneConfig.model_validate({**settings, "negatives": n})) for n in (0, 3)
    )
    if plain.propensity is not None and drawing.propensity is not None:
        with torch.no_grad():
            for model in (plain.propensity, drawing.propensity):
                model.later.copy_(torch.linspace(-0.1, -2, 9))
    loss, count = drawing(groups, torch.Generator().manual_seed(7))
    more = with_negatives(groups, 3, torch.Generator().manual_seed(7))
    expected, number = plain(more, torch.Generator().manual_seed(7))
    assert count == number
    torch.testing.assert_close(loss, expected)
    assert not torch.isclose(loss, plain(groups, torch.Generator().manual_seed(7))[0])


@pytest.mark.slow
def test_data_without_text_or_with_another_vocabulary_are_refused(
    texts: str, synthetic_dataset: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="no tokens 'query' of each query"):
        run(synthetic_dataset, tmp_path / "none")
    with pytest.raises(InputError, match="no tokens 'abstract' of each document"):
        run(texts, tmp_path / "none", encoder={"document": ["abstract"]})
    run(texts, tmp_path / "ranker", epochs=1)
    shutil.copytree(synthetic_dataset, tmp_path / "other")
    add_text(str(tmp_path / "other"), sha256="0" * 64)
    opened = bundle.load(str(tmp_path / "ranker"))
    with pytest.raises(InputError, match="reads tokens of another vocabulary"):
        bundle.with_tokens_of(select(splits(str(tmp_path / "other"))[2], labelled=True), [opened])
    with pytest.raises(InputError, match="no tokens 'query' of each query"):
        ScoreJob(data=synthetic_dataset, bundle=opened.url, out=str(tmp_path / "scores")).run()


def test_a_budget_of_tokens_bounds_micro_batches_and_needs_tokens(texts: str) -> None:
    train = select(splits(texts)[0], labelled=False)
    encoder = CrossEncoderConfig.model_validate(ENCODER)
    config = StreamConfig(docs_per_batch=300, tokens_per_batch=400, streams=2)
    with pytest.raises(InputError, match="tokens_per_batch counts tokens, and the model reads none"):
        GroupStream(train, config)
    read = with_tokens(train, encoder)
    batches = [b for step in GroupStream(read, config).epoch(0) for b in step.micro_batches.values() if b is not None]
    assert sum(batch.n_groups for batch in batches) == train.n_groups
    sizes = [tokens_in(batch) for batch in batches]
    assert all(size <= 200 or batch.n_groups == 1 for size, batch in zip(sizes, batches, strict=True))
    assert sorted(sizes)[len(sizes) // 2] > 100  # a fuller batch would not hold the next group
    loose = StreamConfig(docs_per_batch=300, tokens_per_batch=10**9, streams=2)
    same = StreamConfig(docs_per_batch=300, streams=2)
    for one, other in zip(GroupStream(read, loose).epoch(0), GroupStream(read, same).epoch(0), strict=True):
        assert one.positions == other.positions


def tokens_in(batch: QueryGroups) -> int:
    """Tokens of a batch as pairs, by a loop."""
    total = 0
    for q, length in enumerate(batch.lengths_Q.tolist()):
        total += length * int(batch.query_tokens["query"].lengths_R[q])
    return total + sum(len(tokens.ids_T) for tokens in batch.document_tokens.values())


def trainer(data: str, objective: str, *, rank: int = 0, world: int = 1) -> Trainer:
    """A float64 trainer of a cross-encoder, so that rounding does not hide a difference."""
    selection = select(splits(data)[0], labelled=objective != "masked_language")
    network = fitted_to(NetworkConfig.model_validate({"encoder": ENCODER}), selection)
    torch.manual_seed(0)
    transform = fit(select(splits(data)[0], labelled=False), network)
    model: torch.nn.Module
    if objective != "masked_language":
        values = {"network": network, "loss": {"kind": "softmax"}, **(CLICKS if objective == "clicks" else {})}
        config = FinetuneConfig.model_validate(values)
        architecture = Architecture(transform=transform.config, encoder=network.encoder, head=config.head)
        model = RankingObjective(Ranker(architecture, transform), config).double()
    else:
        model = Pretrainer(transform, network, MaskedLanguageConfig(), PretrainConfig().augment).double()
    read: Selection = with_tokens(selection, network.encoder)
    stream = GroupStream(read, StreamConfig.model_validate({**STREAM, "streams": 4}), rank=rank, world=world)

    def loss(groups: QueryGroups, generator: torch.Generator) -> tuple[torch.Tensor, float]:
        doubled = groups.map(lambda values: values.double() if values.is_floating_point() else values)
        total, count = model(doubled, generator)
        return total, count

    return Trainer(model, loss, stream, OptimizerConfig(learning_rate=1e-3, clip_norm=2.0), epochs=1, seed=0)


def worker(rank: int, world: int, data: str, objective: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    made = trainer(data, objective, rank=rank, world=world)
    losses = [result.loss for result in made.epoch()]
    if rank == 0:
        torch.save((losses, made.model.state_dict()), f"{folder}/result.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["ranking", *map(nightly, OBJECTIVES[1:])])
def test_two_workers_make_the_same_updates(clicked_texts: str, tmp_path: Path, objective: str) -> None:
    multiprocessing.set_forkserver_preload(["ltrscale.training.pretrain", "pytest"])
    alone = trainer(clicked_texts, objective)
    expected = [result.loss for result in alone.epoch()]
    assert len(expected) > 2
    mp.start_processes(worker, args=(2, clicked_texts, objective, str(tmp_path)), nprocs=2, start_method="forkserver")
    losses, weights = torch.load(tmp_path / "result.pt", weights_only=True)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0.0)
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_resumed_run_is_bit_equal(clicked_texts: str, tmp_path: Path, objective: str) -> None:
    whole = trainer(clicked_texts, objective)
    expected = list(whole.epoch())
    first, done = trainer(clicked_texts, objective), []
    with Checkpoints(str(tmp_path), origin={}, data="", every_s=3600) as saver:
        for result in first.epoch():
            done.append(result)
            if len(done) == 2:
                saver.after(replace(result, checkpoint_due=True), first, Progress())
                saver._wait()
                break
    second = trainer(clicked_texts, objective)
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.zero_()  # all must come from the checkpoint
    with Checkpoints(str(tmp_path), origin={}, data="", every_s=3600) as saver:
        snapshot = saver.newest()
        assert snapshot is not None
        restore(second, snapshot)
    assert done + list(second.epoch()) == expected
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.slow
def test_two_workers_under_ray_train_on_text(texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(texts).parent)  # Ray uploads the working directory
    losses = {n: run(texts, tmp_path / f"{n}", epochs=1, workers=WorkersConfig(number=n)) for n in (1, 2)}
    assert [len(of[0]["workers"]) for of in losses.values()] == [1, 2]
    for one, two in zip(losses[1], losses[2], strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)


@pytest.mark.nightly
@pytest.mark.s3
@pytest.mark.slow
def test_text_streams_from_s3(clicked_texts: str, s3: str, tmp_path: Path) -> None:
    there = storage.join(s3, tmp_path.name)
    storage.filesystem(there)[0].put(clicked_texts + "/", storage.join(there, "data"), recursive=True)
    outs = {str(tmp_path): clicked_texts, there: storage.join(there, "data")}
    for out, data in outs.items():
        start = run_pretraining(data, storage.join(out, "pretrained"))
        run(data, storage.join(out, "clicks"), start, loss={"kind": "softmax"}, head_epochs=0, epochs=1, **CLICKS)
    for name in ("pretrained", "clicks"):
        one, other = (bundle.load(storage.join(out, name)) for out in outs)
        assert one.content == other.content
        assert one.dataset_hash == other.dataset_hash
