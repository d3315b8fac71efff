"""Training of trees in which one worker is killed once; every worker process can import this module."""

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from ltrscale.runtime.workers import Work, WorkerContext


@dataclass(frozen=True)
class TreesWithKilledWorker:
    """A training of trees in which a rank dies the first time that it reaches a given tree.

    `then`: other trees that the same workers grow afterwards.
    """

    folder: str
    rank: int
    tree: int
    work: Work
    then: Work

    def __call__(self, context: WorkerContext) -> None:
        trees = 0

        def stopping() -> bool:  # called before each tree is counted
            nonlocal trees
            trees += 1
            if (dist.get_rank(), trees) == (self.rank, self.tree) and self._once():
                os.kill(os.getpid(), signal.SIGKILL)
            return context.stopping()

        self.work(replace(context, stopping=stopping))
        self.then(context)

    def _once(self) -> bool:
        try:
            (Path(self.folder) / "killed").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
