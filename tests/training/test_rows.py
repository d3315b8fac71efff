"""Laws of tables on the host: their rows learn as those of a dense table, over any workers and after any stop."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small_trainers import finetuned, make_trainer, run_epochs
from torch import Tensor, nn

from jobs.bench import device as bench
from jobs.bench.pretend import counting, pretending
from ltrscale import bundle
from ltrscale.batch import QueryGroups
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.features import FeatureKind, FeatureTransform, TransformConfig, fit_transform
from ltrscale.models.layers import FeatureEmbedding, HostTable, device_of, host_tables, keep_on_host
from ltrscale.pretext.augment import MarginalConfig, SwapInGroupConfig
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.pretext.objective import Pretrainer
from ltrscale.training.checkpoint import Buffers, Progress, restore, take
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.loop import Trainer
from ltrscale.training.reduce import update_rows
from ltrscale.training.settings import OptimizerConfig, build_optimizer

ON_HOST = {"host_rows": 0}
PLAIN_SGD: dict[str, Any] = {"kind": "sgd", "momentum": 0.0}
KINDS = ["adam", "adamw", "adagrad", "sgd"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_step_learn_as_in_a_dense_table_and_the_others_stay(kind: str) -> None:
    config = OptimizerConfig.model_validate({"kind": kind, "learning_rate": 0.1, "weight_decay": 0.01})
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(9, 3, generator=generator))
    ids_U = torch.tensor([1, 4, 8])
    dense, before = nn.Parameter(weight.detach()[ids_U]), weight.detach().clone()
    ours, theirs = build_optimizer([weight], config), build_optimizer([dense], config)
    for _ in range(5):
        gradient_UE = torch.randn(3, 3, generator=generator)
        update_rows(ours, weight, ids_U, gradient_UE.clone())
        dense.grad = gradient_UE
        theirs.step()
    assert torch.equal(weight[ids_U], dense)
    others = [row for row in range(9) if row not in ids_U]
    assert torch.equal(weight[others], before[others])
    for key, value in theirs.state[dense].items():
        assert torch.equal(ours.state[weight][key][ids_U] if value.ndim else ours.state[weight][key], value)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["simclr_rank", "scarf"])
def test_plain_sgd_is_that_of_a_dense_table(synthetic_dataset: str, method: str) -> None:
    on_host = make_trainer(synthetic_dataset, method, transform=ON_HOST, **PLAIN_SGD)
    on_device = make_trainer(synthetic_dataset, method, **PLAIN_SGD)
    (table,) = host_tables(on_host.model)
    start = table.weight.detach().clone()
    results, expected = run_epochs(on_host), run_epochs(on_device)
    assert [r.loss for r in results] == pytest.approx([r.loss for r in expected], rel=1e-9)
    assert [r.gradient_norm for r in results] == pytest.approx([r.gradient_norm for r in expected], rel=1e-9)
    assert not torch.equal(table.weight, start)
    for name, value in on_device.model.state_dict().items():
        torch.testing.assert_close(on_host.model.state_dict()[name], value, rtol=1e-9, atol=1e-12, msg=name)


def worker(rank: int, world: int, data: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{world}", rank=rank, world_size=world)
    trainer = make_trainer(data, "simclr_rank", rank=rank, world=world, transform=ON_HOST)
    results = [(result.loss, result.gradient_norm) for result in run_epochs(trainer)]
    torch.save((results, trainer.model.state_dict()), f"{folder}/result-{world}-{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.nightly
def test_one_worker_equals_several(synthetic_dataset: str, tmp_path: Path) -> None:
    multiprocessing.set_forkserver_preload(["ltrscale.training.pretrain", "pytest"])
    alone = make_trainer(synthetic_dataset, "simclr_rank", transform=ON_HOST)
    expected = [(result.loss, result.gradient_norm) for result in run_epochs(alone)]
    assert len(expected) > 6
    for world in (2, 3):
        arguments = (world, synthetic_dataset, str(tmp_path))
        mp.start_processes(worker, args=arguments, nprocs=world, start_method="forkserver")
        for rank in range(world):
            results, weights = torch.load(tmp_path / f"result-{world}-{rank}.pt", weights_only=True)
            assert results == [pytest.approx(each, rel=1e-9) for each in expected]
            for name, value in alone.model.state_dict().items():
                torch.testing.assert_close(weights[name], value, rtol=1e-7, atol=1e-10, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_bit_equal_to_never_stopped(synthetic_dataset: str, kind: str) -> None:
    def trainer() -> Trainer:
        return make_trainer(synthetic_dataset, "simclr_rank", transform=ON_HOST, kind=kind, weight_decay=0.01)

    whole, first, second = trainer(), trainer(), trainer()
    expected, steps = run_epochs(whole), first.epoch()
    done = [next(steps) for _ in range(3)]
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.zero_()  # all must come from the checkpoint
    snapshot = take(first, Progress(), Buffers())
    assert snapshot is not None
    table = host_tables(first.model)[0]
    rows = [value for value in snapshot.tensors["optimizer"].values() if value.shape == table.weight.shape]
    assert len(rows) == {"adam": 2, "adamw": 2}.get(kind, 1)
    restore(second, snapshot)
    done += [result for _ in range(2) for result in second.epoch()]
    assert done == expected
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


@pytest.mark.slow
def test_finetuning_with_an_auxiliary_loss_and_frozen_phases_learns_the_same(
    synthetic_dataset: str, tmp_path: Path
) -> None:
    weights = []
    for name, transform in (("host", ON_HOST), ("device", {})):
        config = FinetuneConfig.model_validate(
            {
                "epochs": 1,
                "head_epochs": 1,
                "stream": {"docs_per_batch": 1600, "streams": 2},
                "optimizer": {**PLAIN_SGD, "learning_rate": 0.01},
                "network": {"encoder": {"kind": "mlp", "hidden": [8]}, "transform": transform},
                "auxiliary": {"stream": {"docs_per_batch": 800}},
            }
        )
        finetuned(synthetic_dataset, tmp_path / name, config)
        weights.append(bundle.load(str(tmp_path / name)).weights())
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, rtol=1e-4, atol=1e-5, msg=name)


def categorical_lists() -> tuple[QueryGroups, FeatureTransform]:
    """Lists in which the last two features are categories, and a transform that keeps their tables on the host."""
    groups = bench.lists(6)
    x_NF = groups.features_NF[:, :5].clone()
    x_NF[:, 3:] = torch.randint(0, 300, (len(x_NF), 2), generator=torch.Generator().manual_seed(0)).float()
    kinds: list[FeatureKind] = ["numeric"] * 3 + ["categorical"] * 2
    transform = fit_transform([x_NF], kinds, TransformConfig(max_vocabulary=100, hash_rows=1000, host_rows=1000))
    return QueryGroups(x_NF, groups.offsets_Q1, ids_Q=groups.ids_Q), transform


@pytest.mark.slow
@pytest.mark.parametrize("augmentation", [SwapInGroupConfig(), MarginalConfig()])
def test_the_table_stays_off_the_device_and_a_step_waits_once(
    augmentation: SwapInGroupConfig | MarginalConfig,
) -> None:
    def two_steps(device: torch.device) -> tuple[list[float], Tensor, list[int]]:
        torch.manual_seed(0)
        groups, transform = categorical_lists()
        network = NetworkConfig.model_validate({"encoder": {"kind": "mlp", "hidden": [8], "dropout": 0.0}})
        marginals_SF = transform(groups.features_NF[:50])
        model = Pretrainer(transform, network, SimCLRRankConfig(), augmentation, marginals_SF).to(device)
        (table,) = host_tables(model)
        assert (table.weight.device.type, device_of(model)) == ("cpu", device_of(model.encoder))
        trainer = Trainer(model, model, bench.Repeated(groups), OptimizerConfig(kind="sgd"), epochs=1, seed=0)  # type: ignore[arg-type]
        steps, waits, losses = trainer.epoch(), [], []
        for _ in range(2):
            with counting() as counted:
                losses.append(next(steps).loss)
            waits.append(counted.counts.waits.total())
        return losses, table.weight.detach(), waits

    losses, weight, _ = two_steps(torch.device("cpu"))
    with pretending() as device:
        others, other_weight, waits = two_steps(device)
    assert waits == [1, 1]
    assert others == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(other_weight, weight, rtol=1e-4, atol=1e-6)


def test_only_large_tables_are_kept_and_a_row_outside_the_plan_is_nan() -> None:
    numeric_F = torch.tensor([True, False, False])
    network = nn.Sequential(FeatureEmbedding(numeric_F, [3, 4], 2), FeatureEmbedding(numeric_F, [3, 5], 2))
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    keep_on_host(network, 7)
    (table,) = host_tables(network)
    assert network[1].table is table
    assert network.state_dict().keys() == weights.keys()
    with table.planned(torch.tensor([0, 3])):
        found = table(torch.tensor([[0, 3], [5, 7]]))
    assert torch.equal(found[0], table.weight[[0, 3]])
    assert found[1].isnan().all()
    with torch.no_grad():
        assert torch.equal(table(torch.tensor([5])), table.weight[[5]])
    assert len(table.lent) == 1
    assert isinstance(table, HostTable)
