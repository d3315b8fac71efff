"""Synthetic problems as a stream of steps, drawn by other processes while the network learns.

Shapes: B problems, N documents and Q lists of one problem, F features.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ltrscale.batch import QueryGroups, repeated
from ltrscale.data.stream.batches import MicroBatches, StreamConfig
from ltrscale.data.stream.windows import Position
from ltrscale.draws import mix
from ltrscale.processor import cores
from ltrscale.simulate.problems import Problems, ProblemsConfig, problems

_MOST_PROCESSES = 8
_AHEAD = 2
"""Draws that each process makes ahead."""


def as_groups(made: Problems) -> QueryGroups:
    """The lists of all problems, one problem after the other; the id of a list is the number of its problem."""
    n_problems, n_lists = len(made.labels_BN), len(made.offsets_Q1) - 1
    return QueryGroups(
        made.features_BNF.flatten(0, 1),
        repeated(made.offsets_Q1, n_problems),
        made.labels_BN.flatten(),
        ids_Q=torch.arange(n_problems).repeat_interleave(n_lists),
    )


class _Steps(Dataset[Problems]):
    """The problems of each step."""

    def __init__(self, config: ProblemsConfig, seed: int) -> None:
        self.config, self.seed = config, seed

    def __getitem__(self, step: int) -> Problems:
        return problems(self.config, seed=mix("step", self.seed), number=step)


class ProblemStream:
    """The problems of each step, drawn ahead by other processes; an epoch lasts until the next validation.

    Args:
        config: the problems.
        seed: of the problems.
        steps: of the whole training.
        epoch_steps: steps of an epoch.
        processes: that draw ahead; None for one fewer than there are CPUs, and at most 8.
        is_over: whether the training ends before the next step.
    """

    def __init__(
        self,
        config: ProblemsConfig,
        *,
        seed: int,
        steps: int,
        epoch_steps: int,
        processes: int | None,
        is_over: Callable[[], bool],
    ) -> None:
        self.config, self.streams = StreamConfig(docs_per_batch=1, prefetch=0), [0]
        self.groups_per_epoch = 1  # unknown: the schedule counts steps
        self._problems, self._steps, self._epoch_steps = _Steps(config, seed), steps, epoch_steps
        self._processes = min(_MOST_PROCESSES, cores() - 1) if processes is None else processes
        self._is_over = is_over
        self._drawn: Iterator[Problems] | None = None
        """The problems of the coming steps, once the first is asked for."""

    def epoch(self, epoch: int, start: Mapping[int, Position] | None = None) -> Iterator[MicroBatches]:
        """The rest of the steps of an epoch; the position is the number of steps before."""
        length, done = self._epoch_steps, start[0].group if start else 0
        end = min(length, self._steps - epoch * length)
        if self._drawn is None:
            self._drawn = iter(self._loader(first=epoch * length + done))
        while done < end and not self._is_over():
            done += 1
            yield MicroBatches({0: as_groups(next(self._drawn))}, {0: Position(0, done)})

    def close(self) -> None:
        """End the processes that draw."""
        self._drawn = None

    def _loader(self, first: int) -> DataLoader[Problems]:
        several: dict[str, Any] = {"multiprocessing_context": "spawn", "prefetch_factor": _AHEAD}
        return DataLoader(
            self._problems,
            batch_size=None,
            sampler=range(first, self._steps),
            num_workers=self._processes,
            worker_init_fn=_obey_parent,
            **(several if self._processes else {}),
        )


def _obey_parent(_: int) -> None:
    """Ignore stop signals, which a terminal sends to all processes, and end with the parent."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    """End this process with its parent; torch misses a parent that was killed while this process started."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
