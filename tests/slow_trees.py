"""Training of trees that takes its time; every worker process can import this module."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from ltrscale.runtime.workers import Context
from ltrscale.trees.gbdt import TreeGrowing


@dataclass(frozen=True)
class SlowTrees:
    """A training of trees, with a pause before each; rank 0 touches a file at the first."""

    work: TreeGrowing
    begun: str
    every_tree_s: float

    def __call__(self, context: Context) -> None:
        def stopping() -> bool:  # called before each tree is counted
            if dist.get_rank() == 0:
                Path(self.begun).touch()
            time.sleep(self.every_tree_s)
            return context.stopping()

        self.work(replace(context, stopping=stopping))
