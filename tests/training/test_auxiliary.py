"""The auxiliary objective: its gradient, its stream and its independence of the workers."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import GroupStream
from ltrscale.data.stream.plan import run_here, step_seed
from ltrscale.draws import mix
from ltrscale.errors import InputError
from ltrscale.models.batch_norm import MicroBatchNorm
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.ranker import Architecture, HeadConfig, Ranker
from ltrscale.training.auxiliary import Auxiliary, AuxiliaryConfig, AuxiliaryObjective
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.fitting import fit
from ltrscale.training.loop import StepResult, Trainer
from ltrscale.training.ranking import RankingObjective
from ltrscale.training.settings import OptimizerConfig

WEEKS = ("2026-W01", "2026-W02")
SMALL = {"encoder": {"width": 8, "blocks": 1, "dropout": 0.0}}


class Doubled(torch.nn.Module):
    """An objective in float64, so that rounding does not hide a difference."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, groups: Any, generator: torch.Generator) -> tuple[Tensor, float]:
        changed = {"features_NF": groups.features_NF.double()}
        if groups.labels_N is not None:
            changed["labels_N"] = groups.labels_N.double()
        values: tuple[Tensor, float] = self.inner(
            type(groups)(**{name: getattr(groups, name) for name in groups.__dataclass_fields__} | changed), generator
        )
        return values


def make(data: str, auxiliary: dict[str, Any] | None, *, rank: int = 0, world: int = 1) -> Trainer:
    """A trainer with plain gradient descent, whose update is the gradient."""
    split = Split(data=(data,), periods=WEEKS)
    network, documents = NetworkConfig.model_validate(SMALL), select(split, labelled=False)
    transform = fit(documents, network)
    torch.manual_seed(0)
    made = Architecture(transform=transform.config, encoder=network.encoder, head=HeadConfig(layers=1))
    ranker = Ranker(made, transform)
    config = FinetuneConfig.model_validate(
        {"loss": {"kind": "softmax"}, "stream": {"docs_per_batch": 600, "streams": 3}}
    )
    beside = None
    if auxiliary is not None:
        stream = {"docs_per_batch": 2000, "streams": 3, "window": 2}
        settings = AuxiliaryConfig.model_validate({"stream": stream, **auxiliary})
        beside = AuxiliaryObjective(settings.groups(documents, transform, run=run_here), [ranker], None)
    objective = RankingObjective(ranker, config, None, beside).double()
    joined = None
    if beside is not None:
        stream = GroupStream(documents, beside.unlabelled.config.order("full", 0), rank=rank, world=world)
        joined = Auxiliary(beside, stream, torch.device("cpu"))
        joined.objective = Doubled(joined.objective)  # type: ignore[assignment]
    return Trainer(
        objective,
        Doubled(objective),
        GroupStream(select(split, labelled=True), config.stream, rank=rank, world=world),
        OptimizerConfig(kind="sgd", learning_rate=1.0, momentum=0.0),
        epochs=2,
        seed=0,
        auxiliary=joined,
    )


def first_moves(trainer: Trainer) -> dict[str, Tensor]:
    """What the first step changes, by name."""
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    steps = trainer.epoch()
    next(steps)
    steps.close()
    trainer.close()
    return {name: value.detach() - before[name] for name, value in trainer.model.named_parameters()}


@pytest.mark.slow
def test_a_step_adds_the_weighted_mean_gradient_of_the_pretext_loss(synthetic_dataset: str) -> None:
    trainer = make(synthetic_dataset, {"weight": 0.25})
    auxiliary = trainer.auxiliary
    assert auxiliary is not None
    first = next(GroupStream(auxiliary.stream.selection, auxiliary.stream.config).epoch(0))
    trainer.model.train()
    total, documents = torch.zeros((), dtype=torch.float64), 0.0
    for stream, groups in first.micro_batches.items():
        seed = step_seed(mix("auxiliary", 0), 0, stream)
        torch.manual_seed(seed)
        assert groups is not None
        loss, count = auxiliary.objective(groups, torch.Generator().manual_seed(seed))
        total, documents = total + loss, documents + count
    named = dict(trainer.model.named_parameters())
    gradients = torch.autograd.grad(total / documents, list(named.values()), allow_unused=True)
    for module in trainer.model.modules():
        if isinstance(module, MicroBatchNorm):
            module.seen = ()
    own = first_moves(make(synthetic_dataset, None))
    both = first_moves(trainer)
    moved = 0
    for (name, move), gradient in zip(both.items(), gradients, strict=True):
        added = torch.zeros_like(move) if gradient is None else -0.25 * gradient
        torch.testing.assert_close(move, own.get(name, torch.zeros_like(move)) + added, rtol=1e-6, atol=1e-12)
        moved += bool(added.any())
    assert moved > 5


@pytest.mark.slow
def test_a_batch_without_a_hidden_token_adds_nothing(synthetic_dataset: str) -> None:
    trainer = make(synthetic_dataset, {"weight": 0.25})
    auxiliary = trainer.auxiliary
    assert auxiliary is not None
    objective = auxiliary.objective

    def nothing_hidden(groups: Any, generator: torch.Generator) -> tuple[Tensor, float]:
        loss, _ = objective(groups, generator)
        return loss * 0, 0.0

    auxiliary.objective = nothing_hidden  # type: ignore[assignment]
    moved, own = first_moves(trainer), first_moves(make(synthetic_dataset, None))
    assert trainer.auxiliary_loss == 0
    for name, move in moved.items():
        torch.testing.assert_close(move, own.get(name, torch.zeros_like(move)), rtol=1e-6, atol=1e-12)


def test_the_mask_that_is_wrong_is_named_by_its_place(synthetic_dataset: str) -> None:
    with pytest.raises(InputError, match=r"^finetune\.auxiliary\.mask\.columns: no feature is or matches 'q_none'"):
        make(synthetic_dataset, {"mask": {"columns": {"q_none": 0.5}}})


@pytest.mark.slow
def test_running_statistics_are_those_of_the_labelled_documents(synthetic_dataset: str) -> None:
    plain, beside = make(synthetic_dataset, None), make(synthetic_dataset, {"weight": 1.0})
    first_moves(plain)
    first_moves(beside)
    for name, value in plain.model.named_buffers():
        assert torch.equal(value, beside.model.get_buffer(name)), name
    assert any(name.endswith("running_mean") for name, _ in plain.model.named_buffers())


@pytest.mark.slow
def test_the_unlabelled_groups_are_read_epoch_after_epoch_in_every_nth_step(synthetic_dataset: str) -> None:
    trainer = make(synthetic_dataset, {"every": 3})
    auxiliary = trainer.auxiliary
    assert auxiliary is not None
    seen: list[tuple[int, int, list[int]]] = []
    objective = auxiliary.objective

    def listening(groups: Any, generator: torch.Generator) -> tuple[Tensor, float]:
        seen.append((trainer.state.step, auxiliary.epoch, groups.ids_Q.tolist()))
        return objective(groups, generator)  # type: ignore[no-any-return]

    auxiliary.objective = listening  # type: ignore[assignment]
    while auxiliary.epoch < 2:
        for _ in trainer.epoch():
            pass
    trainer.close()
    assert {step % 3 for step, *_ in seen} == {0}
    everything = select(Split(data=(synthetic_dataset,), periods=WEEKS), labelled=False).n_groups
    for epoch in (0, 1):
        served = [gid for _, of_epoch, ids in seen for gid in ids if of_epoch == epoch]
        assert len(served) == len(set(served)) == everything


def results(trainer: Trainer) -> list[StepResult]:
    steps = [result for _ in range(2) for result in trainer.epoch()]
    trainer.close()
    return steps


def worker(rank: int, world: int, data: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{world}", rank=rank, world_size=world)
    trainer = make(data, {"weight": 0.3}, rank=rank, world=world)
    losses = [result.loss for result in results(trainer)]
    if rank == 0:
        torch.save((losses, trainer.model.state_dict()), f"{folder}/result-{world}.pt")
    dist.destroy_process_group()


@pytest.mark.nightly
def test_one_worker_equals_several(synthetic_dataset: str, tmp_path: Path) -> None:
    multiprocessing.set_forkserver_preload(["ltrscale.training.finetune", "pytest"])
    alone = make(synthetic_dataset, {"weight": 0.3})
    expected = [result.loss for result in results(alone)]
    assert alone.auxiliary is not None
    assert alone.auxiliary.epoch > 0  # the unlabelled groups began anew
    for world in (2, 3):
        mp.start_processes(
            worker, args=(world, synthetic_dataset, str(tmp_path)), nprocs=world, start_method="forkserver"
        )
        losses, weights = torch.load(tmp_path / f"result-{world}.pt", weights_only=True)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=0.0)
        for name, value in alone.model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-9)
