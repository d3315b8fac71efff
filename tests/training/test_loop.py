"""Laws of the loop: an update does not depend on the workers, and a resumed run continues as if never stopped."""

import math
import multiprocessing
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nightly import nightly
from small_trainers import WEEKS, make_trainer, run_epochs
from torch import Tensor

from jobs.bench.pretend import counting, pretending
from ltrscale.batch import QueryGroups
from ltrscale.config import kind_of, members
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import MicroBatches, StreamConfig
from ltrscale.models.batch_norm import MicroBatchNorm
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.ranker import Architecture, Ranker
from ltrscale.pretext.choices import FeatureMethodConfig
from ltrscale.training import reduce
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.fitting import fit
from ltrscale.training.loop import Trainer
from ltrscale.training.ranking import RankingObjective
from ltrscale.training.settings import OptimizerConfig

EVERY_METHOD = [kind_of(cls) for cls in members(FeatureMethodConfig)]


def worker(rank: int, world: int, data: str, method: str, folder: str) -> None:
    torch.set_num_threads(1)
    reduce.BUCKET_BYTES = 1000  # several buckets, which start to travel during backward
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{world}", rank=rank, world_size=world)
    trainer = make_trainer(data, method, rank=rank, world=world)
    results = [vars(result) for result in run_epochs(trainer)]
    if rank == 0:
        torch.save((results, trainer.model.state_dict()), f"{folder}/result-{world}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "world"),
    [
        *((m, 3) if m == "simclr_rank" else nightly(m, 3) for m in EVERY_METHOD),
        *(nightly("simclr_rank of tabm", 3), ("simsiam of tabm with graphs", 3)),
        *(nightly("simclr_rank", 2), nightly("simclr_rank", 4)),  # of 4 streams: even loads
    ],
)
def test_one_worker_equals_several(synthetic_dataset: str, tmp_path: Path, method: str, world: int) -> None:
    multiprocessing.set_forkserver_preload(["ltrscale.training.pretrain", "pytest"])
    alone = make_trainer(synthetic_dataset, method)
    expected = run_epochs(alone)
    assert len(expected) > 6
    arguments = (world, synthetic_dataset, method, str(tmp_path))
    mp.start_processes(worker, args=arguments, nprocs=world, start_method="forkserver")  # imports once for all
    results, weights = torch.load(tmp_path / f"result-{world}.pt", weights_only=True)
    assert [r["groups"] for r in results] == [r.groups for r in expected]
    assert [r["documents"] for r in results] == [r.documents for r in expected]
    for name in ("loss", "gradient_norm"):
        torch.testing.assert_close(
            torch.tensor([r[name] for r in results]),
            torch.tensor([getattr(r, name) for r in expected]),
            rtol=1e-6,
            atol=0.0,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("method", EVERY_METHOD)
def test_every_group_is_read_once_an_epoch(synthetic_dataset: str, method: str) -> None:
    trainer = make_trainer(synthetic_dataset, method)
    first, second = run_epochs(trainer, 1), run_epochs(trainer, 1)
    n = select(Split(data=(synthetic_dataset,), periods=WEEKS), labelled=False).n_groups
    assert sum(r.groups for r in first) == sum(r.groups for r in second) == n == 240
    assert (trainer.state.epoch, trainer.state.positions) == (2, {})


class Fixed:
    """A stream of given micro-batches."""

    config = StreamConfig(prefetch=0)
    groups_per_epoch = 2

    def __init__(self, steps: Sequence[dict[int, QueryGroups | None]]) -> None:
        self.steps = steps

    def epoch(self, *_: object) -> Iterator[MicroBatches]:
        return (MicroBatches(micro_batches, {}) for micro_batches in self.steps)


def uneven_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    reduce.BUCKET_BYTES = 100  # several buckets, which start to travel during backward
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
    groups = QueryGroups(torch.randn(3, 8), torch.tensor([0, 3]), ids_Q=torch.tensor([7]))
    trainer = Trainer(
        model,
        lambda given, _: (model(given.features_NF).square().sum(), float(given.n_documents)),
        Fixed([{rank: groups}] * (2 - rank)),  # type: ignore[arg-type]
        OptimizerConfig(),
        epochs=1,
        seed=0,
    )
    assert [step.documents for step in trainer.epoch()] == [6, 3]
    dist.destroy_process_group()


@pytest.mark.nightly
def test_a_worker_whose_streams_have_run_out_sums_the_buckets_of_a_large_network_too(tmp_path: Path) -> None:
    multiprocessing.set_forkserver_preload(["ltrscale.training.pretrain", "pytest"])
    mp.start_processes(uneven_worker, args=(str(tmp_path),), nprocs=2, start_method="forkserver")


def test_a_step_waits_for_the_device_once_with_many_micro_batches_as_with_one() -> None:
    groups = QueryGroups(torch.randn(3, 2), torch.tensor([0, 3]), ids_Q=torch.tensor([7]))
    counts = []
    with pretending() as device:
        model = torch.nn.Linear(2, 1).to(device)
        for streams in (1, 4):
            trainer = Trainer(
                model,
                lambda given, _: (model(given.features_NF).square().sum(), float(given.n_documents)),
                Fixed([dict.fromkeys(range(streams), groups)]),  # type: ignore[arg-type]
                OptimizerConfig(),
                epochs=1,
                seed=0,
            )
            steps = trainer.epoch()
            with counting() as counted:
                step = next(steps)
            assert step.groups == streams
            counts.append(counted.counts.waits)
    assert counts[0] == counts[1]
    assert counts[0].total() == 1


@pytest.mark.slow
def test_every_micro_batch_has_randomness_of_its_own(synthetic_dataset: str) -> None:
    def draws(trainer: Trainer) -> list[tuple[float, float]]:
        drawn: list[tuple[float, float]] = []
        objective = trainer.objective

        def listening(groups: QueryGroups, generator: torch.Generator) -> tuple[Tensor, float]:
            drawn.append((torch.rand(1).item(), torch.rand(1, generator=generator).item()))
            return objective(groups, generator)

        trainer.objective = listening
        run_epochs(trainer, 1)
        return drawn

    first = draws(make_trainer(synthetic_dataset, "simclr_rank"))
    assert len(set(first)) == len(first) > 8  # other streams and other steps draw other numbers
    assert first == draws(make_trainer(synthetic_dataset, "simclr_rank"))
    assert not set(first) & set(draws(make_trainer(synthetic_dataset, "simclr_rank", seed=1)))


def test_a_step_with_nothing_to_average_makes_no_update(synthetic_dataset: str) -> None:
    config = FinetuneConfig(network=NetworkConfig())
    split = Split(data=(synthetic_dataset,), periods=WEEKS)
    transform = fit(select(split, labelled=False), config.network)
    network = Architecture(transform=transform.config, encoder=config.network.encoder, head=config.head)
    model = Ranker(network, transform)
    objective = RankingObjective(model, config)
    n = len(transform.numeric_F)
    flat = QueryGroups(torch.zeros(3, n), torch.tensor([0, 3]), torch.tensor([1.0, 1.0, 1.0]))
    useful = QueryGroups(torch.randn(3, n), torch.tensor([0, 3]), torch.tensor([1.0, 0.0, 2.0]))
    trainer = Trainer(
        objective,
        objective,
        Fixed([{0: flat}, {0: useful, 1: None}]),  # type: ignore[arg-type]
        OptimizerConfig(),
        epochs=1,
        seed=0,
    )
    before = {name: value.clone() for name, value in model.named_parameters()}
    steps = trainer.epoch()
    result = next(steps)
    assert (result.groups, result.count) == (1, 0)
    assert math.isnan(result.loss)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert all(not m.seen for m in model.modules() if isinstance(m, MicroBatchNorm))
    assert next(steps).count == 1
    assert any(not torch.equal(value, before[name]) for name, value in model.named_parameters())
