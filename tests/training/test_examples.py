"""The stage that makes labelled groups a ranker, its bundle, and the network that comes with the package."""

import hashlib
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ltrscale import bundle
from ltrscale.batch import QueryGroups, standardise_by_group
from ltrscale.data.dataset.selection import only_relevant, select
from ltrscale.data.dataset.split import Splits
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.experiments.refit import RefitJob
from ltrscale.models.examples import InContextRanker, ReadingConfig, drawn_samples
from ltrscale.models.in_context import InContextSizes
from ltrscale.ranking.metrics import ndcg
from ltrscale.serving.export import ExportJob
from ltrscale.simulate.problems import ProblemsConfig, problems
from ltrscale.training import untrained
from ltrscale.training.combine import BlendConfig, BlendJob
from ltrscale.training.untrained import InContextConfig, InContextJob, _network, pretrained_network

WEIGHTS = "257585dee38d7db5f657f6485511c31bc699438842bd815e9e7167a5b88758e2"


@pytest.fixture(scope="module")
def splits(synthetic_dataset: str) -> Splits:
    values = {
        "train": {"data": synthetic_dataset, "periods": ["2026-W01"], "labelled_fraction": 0.3},
        "validation": {"data": synthetic_dataset, "periods": ["2026-W03"]},
    }
    return Splits.model_validate(values)


@pytest.fixture(scope="module")
def made(splits: Splits, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("in_context") / "model")
    assert InContextJob(out=out, splits=splits).run()
    return out


@pytest.mark.slow
def test_the_bundle_scores_by_numbers_alone_and_better_than_chance(made: str, splits: Splits) -> None:
    opened = bundle.load(made)
    assert opened.kind == "in_context"
    assert {feature.kind for feature in opened.features} == {"numeric"}
    judged = select(splits.validation, labelled=True)
    score = opened.scorer(features=judged.features)
    gains = []
    for groups in iterate(judged):
        assert groups.labels_N is not None
        scores_N, chance_N = score(groups), torch.zeros(groups.n_documents)
        of_scores, of_chance = (
            ndcg(values_N, groups.labels_N, groups.offsets_Q1, k=5) for values_N in (scores_N, chance_N)
        )
        gains.append(torch.stack([of_scores, of_chance]))
    mean, chance = torch.cat(gains, 1).nanmean(1).tolist()
    assert opened.metrics["validation_ndcg@5"] == pytest.approx(mean)
    assert mean > chance + 0.05


def test_it_is_up_to_date_until_what_it_reads_changes(made: str, splits: Splits) -> None:
    assert not InContextJob(out=made, splits=splits).run()
    fewer = InContextConfig.model_validate({"reading": {"documents": 500}})
    job = InContextJob(out=made, splits=splits)
    assert job.identity() != InContextJob(out=made, splits=splits, in_context=fewer).identity()


def test_other_shipped_make_another_bundle(splits: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
    before = InContextJob(out="unused", splits=splits).inputs()
    monkeypatch.setattr(untrained, "_shipped", lambda: b"others")
    assert InContextJob(out="unused", splits=splits).inputs() != before


def test_data_without_numbers_are_refused(splits: Splits, tmp_path: Path) -> None:
    names = [f.name for f in select(splits.train, labelled=True).features if f.kind == "numeric"]
    job = InContextJob(out=str(tmp_path / "model"), splits=splits.leaving_out(tuple(names)))
    with pytest.raises(InputError, match="reads numbers alone"):
        job.run()


def test_scores_are_no_labels_to_read(splits: Splits, tmp_path: Path) -> None:
    scored = splits.replace(train={**splits.train.model_dump(), "scores": str(tmp_path)})
    with pytest.raises(InputError, match=r"splits\.train\.scores: examples are read with labels, not scores"):
        InContextJob(out=str(tmp_path / "model"), splits=scored).run()


@pytest.mark.parametrize("header", [b"[]", b'{"__metadata__": null}', b"{", b""])
def test_what_is_no_file_of_weights_is_refused(header: bytes) -> None:
    with pytest.raises(InputError, match=r"w: (not the weights of an in-context network|.*missing)"):
        _network(len(header).to_bytes(8, "little") + header, "w")


def test_heads_divide_the_token() -> None:
    with pytest.raises(ValueError, match="token 64 is no multiple of heads 3"):
        InContextSizes(heads=3)


def test_the_shipped_are_those_that_were_measured() -> None:
    assert hashlib.sha256(untrained._shipped()).hexdigest() == WEIGHTS


@pytest.mark.slow
def test_the_network_ranks_problems_that_it_has_never_seen() -> None:
    network, gains = pretrained_network(), []
    config = ProblemsConfig(examples=(24, 24), features=(10, 20))
    for number in range(4):
        made = problems(config, seed=12345, number=number)
        read, read_offsets, asked = made.n_read, made.offsets_Q1[:25], made.offsets_Q1[24:] - made.n_read
        with torch.no_grad():
            reading = network.read(made.features_BNF[:, :read], made.labels_BN[:, :read], read_offsets)
            scores_BN = network(reading, made.features_BNF[:, read:], asked)[-1]
        for scores_N, labels_N in zip(scores_BN, made.labels_BN[:, read:], strict=True):
            by_network, by_chance = (ndcg(s_N, labels_N, asked, k=5) for s_N in (scores_N, torch.zeros_like(scores_N)))
            gains.append((by_network - by_chance).nanmean())
    assert torch.stack(gains).mean() > 0.15


def test_lists_without_a_relevant_document_are_not_read(made: str, splits: Splits) -> None:
    examples = safetensors.torch.load_file(Path(made) / "examples.safetensors")
    for number in range(4):
        labels_N, offsets_Q1 = examples[f"{number}.labels"], examples[f"{number}.offsets"]
        assert all(part.max() > 0 for part in labels_N.split(offsets_Q1.diff().tolist()))
    assert only_relevant(select(splits.train, labelled=True)).n_groups < select(splits.train, labelled=True).n_groups


@pytest.mark.slow
def test_wide_data_and_long_lists_are_ranked() -> None:
    """More features than it was pretrained on, and lists longer than those of a sample."""
    generator = torch.Generator().manual_seed(0)
    x_NF = torch.randn(900, 200, generator=generator)
    labels_N = (x_NF[:, 0] > 1.2).float()
    examples = QueryGroups(x_NF, torch.tensor([0, 300, 600, 900]), labels_N)
    samples = drawn_samples(examples, ReadingConfig())
    assert all(part.lengths_Q.max() <= 40 for part in samples)
    lists = QueryGroups(torch.randn(700, 200, generator=generator), torch.tensor([0, 699, 700]))
    scores_N = InContextRanker(pretrained_network(), samples)(lists)
    assert scores_N.isfinite().all()
    assert len(scores_N) == 700


@pytest.mark.slow
def test_a_refit_reads_the_validation_groups_too(splits: Splits, tmp_path: Path) -> None:
    made, out = str(tmp_path / "made"), str(tmp_path / "again")
    splits = splits.model_copy(update={"train": splits.train.replace(labelled_fraction=1.0)})
    assert InContextJob(out=made, splits=splits).run()
    assert RefitJob(out=out, bundle=made).run()
    assert not RefitJob(out=out, bundle=made).run()
    before, after = (safetensors.torch.load_file(Path(url) / "examples.safetensors") for url in (made, out))
    validation = QueryGroups.concat(list(iterate(select(splits.validation, labelled=True))))
    numbers = {tuple(row) for row in validation.features_NF[:, :2].tolist()}
    seen = [{tuple(row) for row in part["0.features"][:, :2].tolist()} for part in (before, after)]
    assert not seen[0] & numbers
    assert seen[1] & numbers


@pytest.mark.slow
def test_it_is_blended_and_onnx_refuses_it(made: str, splits: Splits, tmp_path: Path) -> None:
    out = str(tmp_path / "blend")
    assert BlendJob(out=out, splits=splits, bundles={"a": made, "b": made}, blend=BlendConfig(weights="equal")).run()
    lists = next(iter(iterate(select(splits.validation, labelled=True))))
    features = select(splits.validation, labelled=True).features
    one, mean = (bundle.load(url).scorer(features=features)(lists) for url in (made, out))
    alike = (standardise_by_group(scores_N.double(), lists.offsets_Q1) for scores_N in (one, mean))
    torch.testing.assert_close(*alike, atol=1e-5, rtol=0)
    student = "onnx takes finetuned networks only; export a student that jobs.distill trains from it"
    for url, holds in ((made, "examples and the network that reads them"), (out, "a blend of rankers")):
        with pytest.raises(InputError, match=f"holds {holds}, and {student}"):
            ExportJob(out=str(tmp_path / "x"), bundle=url, to="onnx", data=splits.validation.data[0]).run()
