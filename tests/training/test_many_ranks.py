"""Laws of 256 workers: the order and weights of one, a checkpoint read once, requests that grow no faster than they."""

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.bench.many import (
    STEPS,
    STREAMS,
    LeastSquares,
    SmallTraining,
    on_paper,
    on_ranks,
    requests_of_a_beat,
    write_groups,
)
from ltrscale import storage
from ltrscale.data.stream import plan
from ltrscale.runtime.mailbox import Beat, Mailbox, Post, Running, WorkerJoined
from ltrscale.runtime.workers import WorkerProgress
from ltrscale.training.checkpoint import list_checkpoints, read_checkpoint

WORLD = 256
GROUPS = 4096


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("many") / "data")
    write_groups(url)
    return url


@pytest.fixture(scope="module")
def alone(data: str, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The weights of one worker."""
    (model,) = SmallTraining(data, str(tmp_path_factory.mktemp("alone"))).run(1)
    return model.weights_F.detach()


def times_seen(*models: LeastSquares) -> Counter[int]:
    return Counter(chain.from_iterable(model.seen for model in models))


@pytest.mark.nightly
def test_they_train_as_one_does_and_each_group_is_read_once(data: str, alone: torch.Tensor, tmp_path: Path) -> None:
    training = SmallTraining(data, str(tmp_path))
    models = training.run(WORLD)  # which raises unless the account closes
    assert training.records[-1]["groups"] == GROUPS
    assert len(training.records[-1]["workers"]) == WORLD  # type: ignore[arg-type]
    assert times_seen(*models) == Counter(range(GROUPS))
    for model in models:
        torch.testing.assert_close(model.weights_F.detach(), alone, rtol=1e-12, atol=0)
    files, row_groups = 64, training.row_groups["training"]
    assert training.row_groups["account"] == row_groups
    assert training.opened["account"] <= files + WORLD  # with row groups dealt in turn it would be one for each
    assert training.opened["account"] < row_groups / 2
    assert training.opened["training"] <= row_groups


@pytest.mark.nightly
@pytest.mark.parametrize("after", [1, 64, WORLD])
def test_one_of_them_stops_all_and_any_number_goes_on(
    data: str, alone: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    before = SmallTraining(data, str(tmp_path), stop_after=STEPS // 2).run(WORLD)
    (checkpoint,) = list_checkpoints(f"{tmp_path}/checkpoints")
    positions = read_checkpoint(checkpoint).state["positions"]
    assert sorted(map(int, positions)) == list(range(STREAMS))
    read, read_verified = list[str](), storage.read_verified

    def reading(directory: str, name: str, manifest: Mapping[str, Any]) -> bytes:
        read.append(name)
        return read_verified(directory, name, manifest)

    monkeypatch.setattr(storage, "read_verified", reading)
    resumed = SmallTraining(data, str(tmp_path)).run(after)
    assert [name.partition("-")[0] for name in read] == ["weights", "optimizer"]  # once for all workers
    assert times_seen(*before, *resumed) == Counter(range(GROUPS))
    torch.testing.assert_close(resumed[0].weights_F.detach(), alone, rtol=1e-12, atol=0)


@pytest.mark.nightly
def test_those_that_have_nothing_left_to_read_leave_the_positions_of_others_alone(
    data: str, alone: torch.Tensor, tmp_path: Path
) -> None:
    steps, world = 6, WORLD  # some of them have read all of their stream after four
    models = [SmallTraining(data, str(tmp_path), stop_after=n).run(world) for n in (steps - 2, 1)]
    models.append(SmallTraining(data, str(tmp_path)).run(world))
    assert times_seen(*chain.from_iterable(models)) == Counter(range(GROUPS))
    torch.testing.assert_close(models[-1][0].weights_F.detach(), alone, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_their_streams_are_dealt_evenly_and_each_to_one() -> None:
    documents = [row_group.documents for row_group in on_paper().row_groups]
    dealt = plan.canonical_streams(documents, seed=0, epoch=0, key="", streams=WORLD)
    assert sorted(chain.from_iterable(dealt)) == list(range(len(documents)))
    loads = [sum(documents[row_group] for row_group in stream) for stream in dealt]
    assert max(loads) - min(loads) <= max(documents)
    assert max(loads) < 1.002 * sum(loads) / WORLD  # the fullest stream makes the last steps of an epoch


def test_a_mailbox_that_nobody_empties_keeps_the_newest_beat_of_each() -> None:
    mailbox = Mailbox()
    for rank in range(WORLD):
        mailbox.post(WorkerJoined(rank, None))
    for beat in range(100):
        for rank in range(WORLD):
            mailbox.post(Beat(rank, WorkerProgress(beat, rank)))
    posts = mailbox.take()
    assert posts[:WORLD] == [WorkerJoined(rank, None) for rank in range(WORLD)]
    assert posts[WORLD:] == [Beat(rank, WorkerProgress(99, rank)) for rank in range(WORLD)]
    assert mailbox.take() == []


def test_a_beat_of_a_worker_that_is_gone_does_not_count_for_its_successor() -> None:
    mailbox = Mailbox()
    posts: list[Post] = [
        Running(1),
        WorkerJoined(0, None),
        Beat(0, WorkerProgress(7, 7)),
        Running(1),
        WorkerJoined(0, None),
    ]
    for post in posts:
        mailbox.post(post)
    assert mailbox.take() == [post for post in posts if not isinstance(post, Beat)]
    assert mailbox.standing().starts == 2


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, WORLD])
def test_a_beat_under_torchrun_makes_two_requests(world: int) -> None:
    assert requests_of_a_beat(world) == 2


def test_an_error_of_one_ends_all() -> None:
    def work(rank: int) -> None:
        if rank == 3:
            raise KeyError("rank 3")
        torch.distributed.barrier()

    with pytest.raises(KeyError, match="rank 3"):
        on_ranks(8, work)
