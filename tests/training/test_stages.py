"""Pretraining and finetuning from a data set to a bundle, in one process and under Ray."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from nightly import nightly
from shared_cluster import SharedCluster
from small_trainers import finetune, pretrain, splits

from ltrscale import bundle
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.ranking.metrics import ndcg
from ltrscale.runtime.workers import WorkersConfig
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.pretrain import PretrainConfig

NETWORK = {"encoder": {"width": 16, "blocks": 2}}
Records = list[dict[str, object]]


def pretrain_config(method: str = "simclr_rank", epochs: int = 2) -> PretrainConfig:
    return PretrainConfig.model_validate(
        {
            "method": {"kind": method},
            "augment": {"kind": "zeroing", "probability": 0.3},
            "network": NETWORK,
            "epochs": epochs,
            "stream": {"docs_per_batch": 1000, "streams": 2},
        }
    )


def finetune_config(**changes: object) -> FinetuneConfig:
    values = {"network": NETWORK, "head_epochs": 2, "epochs": 4, "stream": {"docs_per_batch": 500, "streams": 2}}
    values["optimizer"] = {"learning_rate": 1e-3}
    return FinetuneConfig.model_validate({**values, **changes})


def ndcg_on(url: str, test: Split) -> float:
    scorer = bundle.load(url).scorer()
    values = [
        ndcg(scorer(groups), groups.labels_N, groups.offsets_Q1, k=5)
        for groups in iterate(select(test, labelled=True))
        if groups.labels_N is not None
    ]
    return float(torch.cat(values).nanmean())


def random_ndcg(test: Split) -> float:
    generator = torch.Generator().manual_seed(0)
    values = [
        ndcg(torch.rand(groups.n_documents, generator=generator), groups.labels_N, groups.offsets_Q1, k=5)
        for groups in iterate(select(test, labelled=True))
        if groups.labels_N is not None
        for _ in range(20)
    ]
    return float(torch.cat(values).nanmean())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["simclr_rank", nightly("simsiam")])
def test_from_pretraining_to_a_ranker(synthetic_dataset: str, tmp_path: Path, method: str) -> None:
    train, validation, test = splits(synthetic_dataset)
    records: Records = []
    pretrained, ranker = str(tmp_path / "pretrained"), str(tmp_path / "ranker")
    pretrain(pretrain_config(method, 6), train, pretrained, origin={}, report=lambda r: records.append(dict(r)))
    means = [float(str(r["loss"])) for r in records if "epoch" in r]
    assert len(means) == 6
    assert means[-1] < means[0]
    with pytest.raises(InputError, match="cannot score"):
        bundle.load(pretrained).scorer()
    config = finetune_config(head_epochs=10, epochs=20, optimizer={"learning_rate": 3e-3})
    finetune(config, train, validation, ranker, pretrained=pretrained, origin={}, report=lambda _: None)
    assert ndcg_on(ranker, test) > random_ndcg(test) + 0.08


@pytest.mark.slow
def test_training_twice_gives_the_same_bytes(synthetic_dataset: str, tmp_path: Path) -> None:
    train, validation, _ = splits(synthetic_dataset)
    for name in ("a", "b"):
        pretrain(pretrain_config(), train, str(tmp_path / name), origin={}, report=lambda _: None)
        finetune(
            finetune_config(),
            train,
            validation,
            str(tmp_path / f"{name}-ranker"),
            pretrained=str(tmp_path / name),
            origin={},
            report=lambda _: None,
        )
    for stage in ("", "-ranker"):
        contents = {(tmp_path / f"{name}{stage}" / "weights.safetensors").read_bytes() for name in ("a", "b")}
        assert len(contents) == 1


def test_the_head_phase_leaves_the_encoder_alone(synthetic_dataset: str, tmp_path: Path) -> None:
    train, validation, _ = splits(synthetic_dataset)
    pretrained, ranker = str(tmp_path / "pretrained"), str(tmp_path / "ranker")
    pretrain(pretrain_config(), train, pretrained, origin={}, report=lambda _: None)
    still = {"learning_rate": 1e-30}  # the second phase changes nothing that float32 can hold
    config = finetune_config(optimizer=still, head_epochs=1, epochs=1)
    finetune(config, train, validation, ranker, pretrained=pretrained, origin={}, report=lambda _: None)
    before = bundle.load(pretrained).encoder()
    after = bundle.load(ranker).encoder()
    for (name, a), (_, b) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_validation_split_without_relevant_documents_is_an_error(
    write_dataset: Callable[..., str], tmp_path: Path
) -> None:
    features = np.arange(6, dtype=np.float32).reshape(3, 2)
    some, none = np.array([0, 1, 2], np.float32), np.zeros(3, np.float32)
    data = write_dataset(
        {"train": [(features, some)], "validation": [(features, none)]}, [Feature(name="a"), Feature(name="b")]
    )
    train, validation = (Split(data=(data,), periods=(period,)) for period in ("train", "validation"))
    with pytest.raises(InputError, match="validation: all labels of its 1 labelled groups are 0"):
        finetune(
            finetune_config(stream={"docs_per_batch": 10, "streams": 1}),
            train,
            validation,
            str(tmp_path / "r"),
            pretrained=None,
            origin={},
            report=lambda _: None,
        )


def test_a_diverged_run_stops_and_commits_nothing(synthetic_dataset: str, tmp_path: Path) -> None:
    train, _, _ = splits(synthetic_dataset)
    config = pretrain_config(epochs=4).replace(optimizer={"learning_rate": 1e30, "clip_norm": None})
    with pytest.raises(InputError, match=r"training has diverged; lower optimizer.learning_rate"):
        pretrain(config, train, str(tmp_path / "p"), origin={}, report=lambda _: None)
    assert not (tmp_path / "p" / "manifest.json").exists()


def test_more_workers_than_streams_is_an_error(synthetic_dataset: str, tmp_path: Path) -> None:
    train, _, _ = splits(synthetic_dataset)
    config = pretrain_config().replace(stream={"docs_per_batch": 1000, "streams": 1})
    with pytest.raises(InputError, match="streams"):
        pretrain(config, train, str(tmp_path / "r"), origin={}, report=lambda _: None, workers=WorkersConfig(number=2))


@pytest.mark.ray
@pytest.mark.nightly
def test_two_workers_under_ray_take_the_steps_of_one_process(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_cluster: SharedCluster
) -> None:
    """In a cluster of their own, which starts in the working directory."""
    shared_cluster.stop()
    train, validation, _ = splits(synthetic_dataset)
    monkeypatch.chdir(Path(synthetic_dataset).parent)
    train, validation = (split.replace(data=(Path(synthetic_dataset).name,)) for split in (train, validation))
    tuned: dict[int, Records] = {1: [], 2: []}
    for workers in (1, 2):
        finetune(
            finetune_config(epochs=2),
            train,
            validation,
            str(tmp_path / f"ranker-{workers}"),
            pretrained=None,
            origin={},
            report=lambda r, kept=tuned[workers]: kept.append(dict(r)),
            workers=WorkersConfig(number=workers),
        )
    steps = {workers: [r for r in records if "step" in r] for workers, records in tuned.items()}
    assert [r["documents"] for r in steps[1]] == [r["documents"] for r in steps[2]]
    assert len(steps[1]) > 4
    epochs = {workers: [r for r in records if "epoch" in r] for workers, records in tuned.items()}
    assert [len(of_epoch["workers"]) for of_epoch in epochs[2]] == [2] * 2
    for one, two in zip(epochs[1], epochs[2], strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
