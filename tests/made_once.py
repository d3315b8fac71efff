"""Directories that the processes of the tests share."""

import fcntl
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MadeOnce:
    """Makes a directory, by its name, in the first process that asks for it; the others wait, and read it."""

    base: Path

    def __call__(self, name: str, make: Callable[[Path], None]) -> Path:
        folder, done = self.base / name, self.base / f"{name}.done"
        with (self.base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder
