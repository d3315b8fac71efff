"""Laws of reading ahead: same steps, same order, bounded memory, errors at their step, no thread left behind."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from jobs.bench.measure import apart
from ltrscale.batch import QueryGroups
from ltrscale.data.stream.batches import MicroBatches
from ltrscale.data.stream.windows import Position
from ltrscale.training.feed import Account, checksum, read_ahead

CPU = torch.device("cpu")


class Source:
    """A source of steps that counts the requests."""

    def __init__(self, steps: int, fails_at: int = -1) -> None:
        self.steps, self.fails_at, self.asked, self.closed = steps, fails_at, 0, False

    def __call__(self) -> Iterator[MicroBatches]:
        try:
            for i in range(self.steps):
                self.asked += 1
                if i == self.fails_at:
                    raise OSError("gone")
                groups = QueryGroups(torch.full((2, 3), float(i)), torch.tensor([0, 2]), ids_Q=torch.tensor([i]))
                yield MicroBatches({0: groups, 1: None}, {0: Position(0, i)})
        finally:
            self.closed = True


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "read-ahead"]


@pytest.mark.parametrize("depth", [0, 1, 3, 50])
def test_the_same_steps_in_the_same_order(depth: int) -> None:
    found = list(read_ahead(Source(20)(), depth=depth, device=CPU))
    assert [step.positions[0].group for step in found] == list(range(20))
    for i, step in enumerate(found):
        assert step.micro_batches[1] is None
        assert step.micro_batches[0] is not None
        assert bool((step.micro_batches[0].features_NF == i).all())
        assert step.account == (1, 2, checksum(np.array([i])))
    assert not threads()


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_no_more_than_depth_steps_wait_beside_the_one_in_hand(depth: int) -> None:
    source = Source(30)
    steps = read_ahead(source(), depth=depth, device=CPU)
    for taken in range(1, 11):
        next(steps)
        time.sleep(0.02)
        assert source.asked <= taken + depth + (depth > 0)  # one that is read and waits for its place
    steps.close()
    assert not threads()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_comes_in_its_place(depth: int) -> None:
    steps = read_ahead(Source(9, fails_at=4)(), depth=depth, device=CPU)
    assert [next(steps).positions[0].group for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(OSError, match="gone"):
        next(steps)
    assert not threads()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closing_ends_the_thread_and_the_source(taken: int) -> None:
    source = Source(1000)
    steps = read_ahead(source(), depth=2, device=CPU)
    for _ in range(taken):
        next(steps)
    steps.close()
    assert not threads()
    assert source.closed or taken == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to a GPU need one")
def test_micro_batches_come_on_the_gpu() -> None:
    apart(_come_on_the_gpu)  # in a process in which no device has pretended, for it would pin no memory


def _come_on_the_gpu() -> None:
    for i, step in enumerate(read_ahead(Source(20)(), depth=2, device=torch.device("cuda"))):
        groups = step.micro_batches[0]
        assert groups is not None
        assert groups.features_NF.is_cuda
        assert bool((groups.features_NF == i).all())


@pytest.mark.parametrize(
    ("read", "missed", "repeated"),
    [
        (Account(5, 60, 77), 0, 0),
        (Account(3, 40, 50), 2, 0),
        (Account(6, 70, 99), 0, 1),
        (Account(5, 60, 78), 1, 1),  # another group in the place of one
        (Account(5, 61, 77), 1, 1),
    ],
)
def test_an_account_says_how_much_was_missed_and_repeated_at_least(read: Account, missed: int, repeated: int) -> None:
    expected = Account(5, 60, 77)
    assert read.gaps(expected) == {"missed": missed, "repeated": repeated}
    assert read.agrees_with(expected) is (missed == repeated == 0)
