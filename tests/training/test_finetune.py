"""Finetuning strategies, from bundle to bundle: reused weights, trained parameters, and the epoch to keep."""

import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from dataset_changes import with_clicks
from small_trainers import Records, combine, finetuned, pretrain, splits

from ltrscale import bundle
from ltrscale.bundle import reference
from ltrscale.config import kind_of, members
from ltrscale.data.dataset.manifest import Feature, open_dataset
from ltrscale.data.dataset.selection import only_relevant, select
from ltrscale.data.stream import readers
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.models.ranker import AnyRanker, ConcatRanker, MeanRanker, Ranker
from ltrscale.pretext.choices import FeatureMethodConfig
from ltrscale.ranking.choices import metric_named
from ltrscale.ranking.metrics import ndcg
from ltrscale.training.best import validate_ranker
from ltrscale.training.combine import CombineConfig
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.pretrain import PretrainConfig
from ltrscale.training.ranking import LabelledData

NETWORK = {"encoder": {"width": 8, "blocks": 1}}
METHODS = [kind_of(cls) for cls in members(FeatureMethodConfig)]


def run_pretraining(data: str, out: Path, method: str = "simclr_rank", **settings: object) -> str:
    values = {"network": NETWORK, "epochs": 1, "stream": {"docs_per_batch": 1000, "streams": 2}}
    config = PretrainConfig.model_validate({**values, "method": {"kind": method, **settings}})
    pretrain(config, splits(data)[0], str(out), origin={}, report=lambda _: None)
    return str(out)


def run(data: str, out: Path, pretrained: str | None = None, **changes: object) -> Records:
    """Finetune a small network; returns the records of its epochs."""
    values = {"network": NETWORK, "head_epochs": 2, "epochs": 2, "stream": {"docs_per_batch": 500, "streams": 2}}
    config = FinetuneConfig.model_validate({**values, "optimizer": {"learning_rate": 1e-2}, **changes})
    return finetuned(data, out, config, pretrained)


def ranker(url: str | Path) -> Ranker:
    made = bundle.load(str(url)).ranker()
    assert isinstance(made, Ranker)
    return made


def check_scores(url: str | Path, data: str) -> None:
    """A bundle gives different, finite scores to the documents of the test split."""
    scorer = bundle.load(str(url)).scorer()
    groups = next(iterate(select(splits(data)[2], labelled=True)))
    scores_N = scorer(groups)
    assert scores_N.shape == (groups.n_documents,)
    assert scores_N.isfinite().all()
    assert scores_N.unique().numel() > 1


@pytest.fixture(scope="module")
def pretrained(synthetic_dataset: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An encoder with a projector of two hidden layers that are narrower than the encoder."""
    out = tmp_path_factory.mktemp("pretrained") / "model"
    return run_pretraining(synthetic_dataset, out, projector={"layers": 2, "width": 10})


@pytest.fixture(scope="module")
def clicks(synthetic_dataset: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The synthetic data set with clicks as labels, the positions of the clicks, and weights."""
    return with_clicks(synthetic_dataset, str(tmp_path_factory.mktemp("clicks") / "data"))


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 3])
def test_probing_leaves_the_encoder_bit_for_bit(
    synthetic_dataset: str, pretrained: str, tmp_path: Path, layers: int
) -> None:
    records = run(synthetic_dataset, tmp_path / "probe", pretrained, epochs=0, head={"layers": layers})
    assert [r["phase"] for r in records] == ["head", "head"]
    before, after = bundle.load(pretrained), ranker(tmp_path / "probe")
    for name, value in before.encoder().state_dict().items():  # running statistics too
        assert torch.equal(after.encoder.state_dict()[name], value), name
    check_scores(tmp_path / "probe", synthetic_dataset)


@pytest.mark.slow
def test_full_finetuning_moves_the_encoder(synthetic_dataset: str, pretrained: str, tmp_path: Path) -> None:
    records = run(synthetic_dataset, tmp_path / "full", pretrained, head_epochs=1, epochs=3)
    assert [r["phase"] for r in records] == ["head", "full", "full", "full"]
    assert bundle.load(str(tmp_path / "full")).metrics["phase"] == "full"
    before, after = bundle.load(pretrained).encoder(), ranker(tmp_path / "full").encoder
    assert not torch.equal(before.linear.weight, after.linear.weight)


def test_probing_needs_something_pretrained(synthetic_dataset: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="epochs is 0, which is probing, but there is nothing pretrained; name a"):
        run(synthetic_dataset, tmp_path / "probe", epochs=0)
    assert not (tmp_path / "probe").exists()


@pytest.mark.slow
def test_layers_of_the_projector_are_taken_over(synthetic_dataset: str, pretrained: str, tmp_path: Path) -> None:
    run(synthetic_dataset, tmp_path / "one", pretrained, projector_layers=1, epochs=0)
    made, weights = ranker(tmp_path / "one"), bundle.load(pretrained).weights()
    assert torch.equal(made.neck[0].weight, weights["projector.layers.0.weight"])
    assert made.head[0].in_features == 10
    # a finetuned ranker is something to start from too, with the layers that it kept
    run(synthetic_dataset, tmp_path / "again", str(tmp_path / "one"), projector_layers=1, epochs=0)
    assert torch.equal(ranker(tmp_path / "again").neck[0].weight, made.neck[0].weight)
    for start, there in ((pretrained, 2), (str(tmp_path / "one"), 1), (None, 0)):
        with pytest.raises(InputError, match=f"asks for 3 hidden layers of a pretrained projector that has {there}"):
            run(synthetic_dataset, tmp_path / "three", start, projector_layers=3)


@pytest.mark.slow
@pytest.mark.parametrize("context", [None, {"kind": "dasalc", "width": 8, "layers": 1}], ids=["alone", "in its list"])
def test_a_ranker_goes_on_from_another_with_its_head_and_context(
    synthetic_dataset: str, tmp_path: Path, context: dict[str, object] | None
) -> None:
    """After one epoch at a rate near 0 it scores as its start does; without the head it does not."""
    first, still = tmp_path / "first", {"learning_rate": 1e-12}
    run(synthetic_dataset, first, context=context)
    groups = next(iterate(select(splits(synthetic_dataset)[2], labelled=True)))
    for keep in (True, False):
        out = tmp_path / str(keep)
        settings: dict[str, Any] = {"keep_head": keep, "context": context, "optimizer": still}
        run(synthetic_dataset, out, str(first), head_epochs=1, epochs=0, **settings)
        assert torch.allclose(ranker(out)(groups), ranker(first)(groups), atol=1e-5) is keep


@pytest.mark.slow
def test_a_ranker_to_go_on_from_is_kept_where_training_makes_it_worse(synthetic_dataset: str, tmp_path: Path) -> None:
    run(synthetic_dataset, tmp_path / "first", epochs=4)
    wild = {"learning_rate": 1e3}
    run(synthetic_dataset, tmp_path / "out", str(tmp_path / "first"), keep_head=True, optimizer=wild)
    first, out = (bundle.load(str(tmp_path / name)) for name in ("first", "out"))
    assert (out.metrics["phase"], out.metrics["epoch"]) == ("start", 0)
    assert out.metrics["validation_ndcg@5"] == pytest.approx(first.metrics["validation_ndcg@5"])
    assert out.weights().keys() == first.weights().keys()
    assert all(torch.equal(value, first.weights()[name]) for name, value in out.weights().items())


@pytest.mark.slow
def test_a_head_to_keep_must_be_there(synthetic_dataset: str, pretrained: str, tmp_path: Path) -> None:
    run(synthetic_dataset, tmp_path / "first", epochs=1)
    for start, head in ((None, {}), (pretrained, {}), (str(tmp_path / "first"), {"layers": 2})):
        with pytest.raises(
            InputError, match=f"^{start or 'no'}.*: keep_head needs a finetuned ranker with the same head"
        ):
            run(synthetic_dataset, tmp_path / "out", start, keep_head=True, head=head)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The weights at each validation from now on."""
    states: list[dict[str, torch.Tensor]] = []

    def listening(model: AnyRanker, *rest: typing.Any) -> float:
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        return validate_ranker(model, *rest)

    monkeypatch.setattr("ltrscale.training.best.validate_ranker", listening)
    return states


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["mrr", "precision@1", "rbp(persistence=0.5)@3"])
def test_any_metric_chooses_the_epoch(
    synthetic_dataset: str, tmp_path: Path, validated: list[dict[str, torch.Tensor]], metric: str
) -> None:
    rate = {"learning_rate": 0.1}  # so high that the last epoch is not the best
    records = run(synthetic_dataset, tmp_path / "out", epochs=8, validation_metric=metric, optimizer=rate)
    values = [float(str(r[f"validation_{metric}"])) for r in records]
    best = values.index(max(values))
    assert best < 7
    made = bundle.load(str(tmp_path / "out"))
    assert (made.metrics[f"validation_{metric}"], made.metrics["epoch"]) == (values[best], best + 1)
    for name, value in made.weights().items():
        assert torch.equal(value, validated[best][name]), name
    scorer, measure = made.scorer(), metric_named(metric)
    value_Q = [
        measure.values(scorer(groups), groups.labels_N, groups.offsets_Q1)
        for groups in iterate(select(splits(synthetic_dataset)[1], labelled=True))
    ]
    assert float(torch.cat(value_Q).nanmean()) == pytest.approx(values[best], rel=1e-5)


def turned(url: str) -> list[Feature]:
    """The features of a data set in reverse order, with one more in front."""
    return [Feature(name="more"), *reversed(open_dataset(url).manifest.features)]


@pytest.mark.slow
def test_a_pretrained_encoder_reads_its_features_by_name(
    synthetic_dataset: str, pretrained: str, reorder: Any, tmp_path: Path
) -> None:
    wide, order = reorder(synthetic_dataset, turned(synthetic_dataset)), {"docs_per_batch": 500, "shuffle": False}
    for url, out in ((synthetic_dataset, "one"), (wide, "two")):
        run(url, tmp_path / out, pretrained, stream=order)
    one, two = (bundle.load(str(tmp_path / out)) for out in ("one", "two"))
    assert one.features == two.features
    for name, value in one.weights().items():
        assert torch.equal(value, two.weights()[name]), name
    narrow = reorder(synthetic_dataset, one.features[2:])
    with pytest.raises(InputError, match=rf"^{pretrained}: 2 of its \d+ features are not in the data"):
        run(narrow, tmp_path / "three", pretrained)


def test_validation_data_may_have_its_features_in_another_order(synthetic_dataset: str, reorder: Any) -> None:
    train, validation, _ = splits(synthetic_dataset)
    moved = validation.replace(data=reorder(synthetic_dataset, turned(synthetic_dataset)))
    served = []
    for split in (validation, moved):
        served.append(next(iterate(LabelledData.from_splits(train, split, without=()).validation)).features_NF)
    torch.testing.assert_close(*served, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["mean", "concat"])
def test_finetuned_rankers_are_combined(
    synthetic_dataset: str, pretrained: str, reorder: Any, tmp_path: Path, how: str
) -> None:
    parts = [str(tmp_path / name) for name in ("one", "two")]
    run(synthetic_dataset, tmp_path / "one", pretrained, epochs=0)
    run(synthetic_dataset, tmp_path / "two", epochs=1, head={"layers": 2, "width": 5})
    config = CombineConfig.model_validate(
        {"how": how, "epochs": 3, "stream": {"docs_per_batch": 500}, "optimizer": {"learning_rate": 1e-2}}
    )
    train, validation, test = splits(synthetic_dataset)
    out = str(tmp_path / "out")
    combine(config, parts, train, validation, out, origin={}, report=lambda _: None)
    check_scores(out, synthetic_dataset)
    made, groups = bundle.load(out).ranker(), next(iterate(select(test, labelled=True)))
    assert not isinstance(made, Ranker)
    for part, url in zip(made.parts, parts, strict=True):  # nothing of the parts is trained
        assert all(torch.equal(value, ranker(url).state_dict()[name]) for name, value in part.state_dict().items())
    if isinstance(made, ConcatRanker):
        assert made.head.in_features == 8 + 5
        assert made.norm.running_mean.any()
    else:
        expected_N = (ranker(parts[0])(groups) + ranker(parts[1])(groups)) / 2
        torch.testing.assert_close(made(groups), expected_N)
    records: Records = []
    for url, holds in ((out, "several rankers"), (pretrained, "a pretrained encoder")):
        with pytest.raises(InputError, match=f"holds {holds}; name the bundle of one network that scores, which jobs"):
            combine(config, [url], train, validation, str(tmp_path / "no"), origin={}, report=records.append)
    assert not records  # before the data are read
    wide = reorder(synthetic_dataset, turned(synthetic_dataset))
    config = config.replace(stream={"docs_per_batch": 500, "shuffle": False})
    for url, name in ((synthetic_dataset, "there"), (wide, "moved")):
        train, validation, _ = splits(url)
        combine(config, parts, train, validation, str(tmp_path / name), origin={}, report=lambda _: None)
    there, moved = (bundle.load(str(tmp_path / name)).weights() for name in ("there", "moved"))
    assert all(torch.equal(value, moved[name]) for name, value in there.items())
    run(wide, tmp_path / "wide", epochs=1)
    with pytest.raises(InputError, match=r"wide: its features are not those of \S+one in the same order"):
        combine(config, [*parts, str(tmp_path / "wide")], train, validation, out, origin={}, report=lambda _: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "context",
    [
        {"kind": "dasalc", "width": 8, "layers": 1},
        {"kind": "rankformer", "layers": 1, "feedforward": 8},
    ],
    ids=lambda context: context["kind"],
)
def test_a_list_context_goes_on_from_a_pretrained_encoder(
    synthetic_dataset: str, pretrained: str, tmp_path: Path, context: dict[str, object]
) -> None:
    listwise = {"alpha": 0.25} if context["kind"] == "rankformer" else None
    records = run(
        synthetic_dataset, tmp_path / "out", pretrained, context=context, list_loss=listwise, loss={"kind": "softmax"}
    )
    assert [r["phase"] for r in records] == ["head", "head", "full", "full"]
    check_scores(tmp_path / "out", synthetic_dataset)
    made = ranker(tmp_path / "out")
    groups = next(iterate(select(splits(synthetic_dataset)[2], labelled=True)))
    alone_N = made(groups.select(torch.tensor([0])))
    torch.testing.assert_close(made(groups)[: len(alone_N)], alone_N, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_pretraining_method_leaves_a_start(synthetic_dataset: str, tmp_path: Path, method: str) -> None:
    start = run_pretraining(synthetic_dataset, tmp_path / "pretrained", method)
    run(synthetic_dataset, tmp_path / "ranker", start, head_epochs=1, epochs=0)
    before, after = bundle.load(start).encoder().state_dict(), ranker(tmp_path / "ranker").encoder.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    check_scores(tmp_path / "ranker", synthetic_dataset)


@pytest.mark.slow
@pytest.mark.parametrize("debias", [{"kind": "weights", "clip": 3}, {"kind": "dla", "positions": 5}], ids=str)
def test_clicks_are_debiased(clicks: str, tmp_path: Path, debias: dict[str, object]) -> None:
    settings = {"loss": {"kind": "softmax"}, "epochs": 3}
    naive, debiased = (run(clicks, tmp_path / name, debias=d, **settings) for name, d in (("a", None), ("b", debias)))
    losses = [[r["loss"] for r in records] for records in (naive, debiased)]
    assert losses[0] != losses[1]
    assert bundle.load(str(tmp_path / "a")).content != bundle.load(str(tmp_path / "b")).content
    check_scores(tmp_path / "b", clicks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("debias", "message"),
    [("weights", "no `weights` column; write one with jobs.relabel"), ("dla", "no `positions` column; map one")],
)
def test_debiasing_without_its_column_is_an_error(
    synthetic_dataset: str, tmp_path: Path, debias: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(synthetic_dataset, tmp_path / "out", loss={"kind": "softmax"}, debias={"kind": debias})


@pytest.mark.slow
def test_weights_do_not_depend_on_what_is_kept_in_memory(
    synthetic_dataset: str, pretrained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(
        readers, "open_parquet", lambda url, real=readers.open_parquet: (opened.append(url), real(url))[1]
    )
    counts = {}
    for name, gigabytes in (("kept", 1.0), ("anew", 0.0)):
        opened.clear()
        reference._references.clear()  # which a run of the same groups would take from there
        stream = {"docs_per_batch": 500, "streams": 2, "memory_gb": gigabytes}
        run(synthetic_dataset, tmp_path / name, pretrained, stream=stream)
        counts[name] = len(opened)
    kept, anew = (bundle.load(str(tmp_path / name)) for name in counts)
    assert kept.content == anew.content
    assert kept.metrics == anew.metrics
    assert counts["anew"] == counts["kept"] + 3 * (2 + 1)  # three epochs over two weeks and the week of validation


@pytest.mark.slow
def test_a_best_epoch_that_is_the_last_one_is_a_warning(
    synthetic_dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, rate, epochs in (("rising", 3e-3, 3), ("over", 0.1, 8)):
        caplog.clear()
        records = run(synthetic_dataset, tmp_path / name, epochs=epochs, optimizer={"learning_rate": rate})
        values = [r["validation_ndcg@5"] for r in records]
        warnings = [message for message in caplog.messages if "is the best one" in message]
        last = values.index(max(values)) == epochs - 1  # type: ignore[type-var]
        assert last == (name == "rising")
        expected = f"finetuning (full): its last epoch, {epochs}, is the best one, so more may be better; raise epochs"
        assert warnings == ([expected] if last else [])


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 3, 5])
def test_it_ends_after_the_epoch_at_which_its_minutes_are_up_with_the_best_by_then(
    synthetic_dataset: str, pretrained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: int
) -> None:
    """Of two epochs of the head and four of all."""

    def losses(records: Records) -> list[object]:
        return [(record["phase"], record["loss"], record["validation_ndcg@5"]) for record in records]

    all_of_them = run(synthetic_dataset, tmp_path / "whole", pretrained, epochs=4)
    left = iter([False] * (epochs - 1) + [True])
    monkeypatch.setattr("ltrscale.training.phases.TimeSpent.is_all", lambda _: next(left))
    late = run(synthetic_dataset, tmp_path / "late", pretrained, epochs=4, minutes=1)
    assert losses(late) == losses(all_of_them)[:epochs]
    best = max(float(str(record["validation_ndcg@5"])) for record in all_of_them[:epochs])
    assert bundle.load(str(tmp_path / "late")).metrics["validation_ndcg@5"] == best


@pytest.mark.slow
def test_a_pretraining_ends_after_its_minutes_too(synthetic_dataset: str, tmp_path: Path) -> None:
    values = {"network": NETWORK, "stream": {"docs_per_batch": 1000, "streams": 2}, "epochs": 9, "minutes": 1e-9}
    records: Records = []
    config = PretrainConfig.model_validate(values)
    pretrain(config, splits(synthetic_dataset)[0], str(tmp_path), origin={}, report=records.append)
    assert [record["epoch"] for record in records if "epoch" in record] == [1]
    assert bundle.load(str(tmp_path)).metrics["loss"] == records[-1]["loss"]


@pytest.mark.slow
def test_a_network_that_has_diverged_is_named_by_its_validation(synthetic_dataset: str, tmp_path: Path) -> None:
    run(synthetic_dataset, tmp_path / "out", epochs=1)
    made = ranker(tmp_path / "out")
    for parameter in made.parameters():
        parameter.data.fill_(torch.nan)
    with pytest.raises(InputError, match="validation: a score is NaN, training has diverged; lower"):
        validate_ranker(made, select(splits(synthetic_dataset)[1], labelled=True), "ndcg@5")


@pytest.mark.slow
def test_every_layer_learns_at_its_own_rate(synthetic_dataset: str, pretrained: str, tmp_path: Path) -> None:
    """One step of plain gradient descent moves each weight by its factor times the same gradient."""
    moves = {}
    rates = {"encoder": 0.5, "layer_decay": 0.25}
    whole = {"docs_per_batch": 10**6, "streams": 1}
    for name, changes in (("even", {}), ("own", {"rates": rates})):
        sgd = {"kind": "sgd", "learning_rate": 10.0, "momentum": 0, "clip_norm": None}
        options = {"head_epochs": 0, "epochs": 1, "optimizer": sgd, "stream": whole, "projector_layers": 1}
        run(synthetic_dataset, tmp_path / name, pretrained, network={}, **options, **changes)
        made, before = ranker(tmp_path / name), bundle.load(pretrained).weights()
        new = dict(made.named_parameters())
        moves[name] = {
            key: (new[key] - before[key.replace("neck.", "projector.layers.")]).norm().item()
            for key in new
            if not key.startswith("head.")
        }
        moves[name]["head"] = made.head[-1].bias.item()
    decays = {"neck.0": 1, "encoder.norm": 2, "encoder.blocks.0": 2, "encoder.linear": 3}
    if any("encoder.features" in key for key in moves["even"]):
        decays["encoder.features"] = 4
    checked = set()
    for key, even in moves["even"].items():
        depth = next((d for layer, d in decays.items() if key.startswith(layer)), None)
        factor = 1.0 if depth is None else 0.5 * 0.25**depth
        assert (depth is None) == (key == "head")
        assert moves["own"][key] == pytest.approx(factor * even, rel=1e-2, abs=1e-6), key
        checked.add(depth)
    assert checked >= {None, 1, 2, 3}


@pytest.mark.slow
def test_the_head_has_its_own_rate_in_its_phase(synthetic_dataset: str, pretrained: str, tmp_path: Path) -> None:
    """The factor of the phase and the same factor of the rate are one."""
    for name, rate, factor in (("factor", 1e-3, 8.0), ("rate", 8e-3, 1.0)):
        changes = {"optimizer": {"learning_rate": rate}, "rates": {"head_phase": factor}}
        run(synthetic_dataset, tmp_path / name, pretrained, head_epochs=2, epochs=0, **changes)
    one, other = (ranker(tmp_path / name).state_dict() for name in ("factor", "rate"))
    assert all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.slow
def test_the_mean_of_several_heads_ranks(synthetic_dataset: str, pretrained: str, tmp_path: Path) -> None:
    records = run(synthetic_dataset, tmp_path / "out", pretrained, heads=3)
    made = bundle.load(str(tmp_path / "out")).ranker()
    assert isinstance(made, MeanRanker)
    for layer in ("head.0.weight", "encoder.linear.weight"):
        assert len({part.get_parameter(layer).sum().item() for part in made.parts}) == 3
    run(synthetic_dataset, tmp_path / "probe", pretrained, heads=2, epochs=0)
    probed, before = bundle.load(str(tmp_path / "probe")).ranker(), bundle.load(pretrained).encoder().state_dict()
    for part in probed.parts:
        assert all(torch.equal(value, before[name]) for name, value in part.encoder.state_dict().items())
    validation = next(iterate(select(splits(synthetic_dataset)[1], labelled=True), docs_per_batch=10**6))
    value_Q = ndcg(made(validation), validation.labels_N, validation.offsets_Q1, k=5)
    assert float(value_Q.nanmean()) == pytest.approx(max(r["validation_ndcg@5"] for r in records), rel=1e-5)
    check_scores(tmp_path / "out", synthetic_dataset)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["softmax", "lambdarank"])
def test_groups_without_a_relevant_document_teach_such_a_loss_nothing(
    synthetic_dataset: str, tmp_path: Path, loss: str
) -> None:
    encoder = {"kind": "mlp", "hidden": [8], "dropout": 0}  # no BatchNorm, whose statistics are of all groups
    once: dict[str, Any] = {"loss": {"kind": loss}, "network": {"encoder": encoder}, "epochs": 3}
    once |= {"stream": {"docs_per_batch": 10**6, "streams": 1}, "head_epochs": 0}  # all groups are one step
    once |= {"optimizer": {"kind": "sgd", "learning_rate": 0.1}}  # Adam would scale up what rounding leaves of 0
    labelled = select(splits(synthetic_dataset)[0], labelled=True)
    relevant = only_relevant(labelled)
    every = run(synthetic_dataset, tmp_path / "all", **once)
    some = run(synthetic_dataset, tmp_path / "relevant", relevant_only=True, **once)
    assert [record["groups"] for record in some] == [relevant.n_groups] * 3
    assert [record["groups"] for record in every] == [labelled.n_groups] * 3
    assert relevant.n_groups < labelled.n_groups
    for name, weight in ranker(tmp_path / "all").state_dict().items():
        torch.testing.assert_close(ranker(tmp_path / "relevant").state_dict()[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.nightly
def test_a_linear_probe_chooses_the_start(
    synthetic_dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ltrscale")
    start = str(tmp_path / "pretrained")
    values = {"network": NETWORK, "epochs": 3, "keep_every": 1, "stream": {"docs_per_batch": 300, "streams": 2}}
    config = PretrainConfig.model_validate({**values, "optimizer": {"learning_rate": 0.05}})
    pretrain(config, splits(synthetic_dataset)[0], start, origin={}, report=lambda _: None)
    candidates = [f"{start}/epochs/00001", f"{start}/epochs/00002", start]
    probed = {}
    for number, url in enumerate(candidates):
        probe = {"head": {"layers": 1}, "head_epochs": 3, "epochs": 0}
        records = run(synthetic_dataset, tmp_path / f"probe-{number}", url, **probe)
        probed[url] = max(r["validation_ndcg@5"] for r in records)  # type: ignore[type-var]
    best = max(candidates, key=probed.__getitem__)
    caplog.clear()
    run(synthetic_dataset, tmp_path / "out", start, probe_epochs=3, head_epochs=1)
    (line,) = [message for message in caplog.messages if message.startswith("starts from ")]
    assert line.startswith(f"starts from {best}: validation NDCG@5 {probed[best]:.4f}")
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if p.is_dir()) == ["preflight"]
    run(synthetic_dataset, tmp_path / "alone", best, head_epochs=1)
    assert bundle.load(str(tmp_path / "out")).content == bundle.load(str(tmp_path / "alone")).content


@pytest.mark.slow
@pytest.mark.parametrize("average", [0.999, 0.5])
def test_the_mean_of_the_weights_is_validated_with_its_own_statistics(
    synthetic_dataset: str, pretrained: str, tmp_path: Path, validated: list[dict[str, torch.Tensor]], average: float
) -> None:
    options = {"head_epochs": 0, "epochs": 4}
    run(synthetic_dataset, tmp_path / "last", pretrained, **options)
    last = validated.copy()
    validated.clear()
    records = run(synthetic_dataset, tmp_path / "mean", pretrained, average=average, **options)
    parameters = [name for name, _ in ranker(tmp_path / "mean").named_parameters()]
    for name in parameters:
        mean = last[0][name]
        for epoch, state in enumerate(last[1:], start=2):
            mean = mean + max(1 / epoch, 1 - average) * (state[name] - mean)
            torch.testing.assert_close(validated[epoch - 1][name], mean, rtol=1e-5, atol=1e-6)
        if average > 0.9:
            plain = torch.stack([state[name] for state in last]).mean(0)
            torch.testing.assert_close(validated[-1][name], plain, rtol=1e-4, atol=1e-5)
    values = [r["validation_ndcg@5"] for r in records]
    best = values.index(max(values))  # type: ignore[type-var]
    made = ranker(tmp_path / "mean")
    assert all(torch.equal(value, validated[best][name]) for name, value in made.state_dict().items())
    batches = list(iterate(select(splits(synthetic_dataset)[0], labelled=True)))
    x_NF = torch.cat([made.transform(g.features_NF, g.offsets_Q1) for g in batches])
    inputs_ND = made.encoder.linear(made.encoder.features(x_NF))
    norm = made.encoder.blocks[0].norm
    torch.testing.assert_close(norm.running_mean, inputs_ND.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.running_var, inputs_ND.var(0), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_averaging_leaves_a_frozen_encoder_as_it_is(synthetic_dataset: str, pretrained: str, tmp_path: Path) -> None:
    run(synthetic_dataset, tmp_path / "probe", pretrained, head_epochs=3, epochs=0, average=0.9)
    before, after = bundle.load(pretrained).encoder(), ranker(tmp_path / "probe").encoder
    assert all(torch.equal(after.state_dict()[name], value) for name, value in before.state_dict().items())


@pytest.mark.slow
def test_rankers_that_nothing_has_trained_yet_have_no_mean_of_weights(synthetic_dataset: str, tmp_path: Path) -> None:
    first, out = str(tmp_path / "first"), str(tmp_path / "out")
    run(synthetic_dataset, tmp_path / "first", epochs=1)
    run(synthetic_dataset, tmp_path / "on", first, keep_head=True, head_epochs=1, epochs=0, average=0.9)
    train, validation, _ = splits(synthetic_dataset)
    combine(CombineConfig(average=0.9), [first, first], train, validation, out, origin={}, report=lambda _: None)
    values = [bundle.load(url).metrics["validation_ndcg@5"] for url in (first, out)]
    assert values[0] == pytest.approx(values[1])
