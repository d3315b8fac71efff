"""Growing trees on workers of which one is killed once; can be imported in every worker process."""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ltrscale.launch.workers import Context
from ltrscale.trees.gbdt import gbdt_worker


@dataclass(frozen=True)
class Felled:
    """The training function of trees; the first time that a rank comes to a tree, it dies.

    `then`: other arguments with which the same workers grow trees once more.
    """

    folder: str
    rank: int
    tree: int
    then: Mapping[str, Any]

    def __call__(self, arguments: Mapping[str, Any], context: Context) -> None:
        trees = 0

        def stopping() -> bool:  # is asked before each tree is taken note of
            nonlocal trees
            trees += 1
            if (dist.get_rank(), trees) == (self.rank, self.tree) and self._once():
                os.kill(os.getpid(), signal.SIGKILL)
            return context.stopping()

        gbdt_worker(arguments, replace(context, stopping=stopping))
        gbdt_worker({**arguments, **self.then}, context)

    def _once(self) -> bool:
        try:
            (Path(self.folder) / "killed").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
