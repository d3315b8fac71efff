"""Directories that git tracks, and that something writes while they are read."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def a_writer(folder: Path) -> Iterator[None]:
    """Something that changes, makes and removes files and directories all the time."""
    ended, begun = threading.Event(), threading.Event()

    def go_on() -> None:
        n = 0
        while not ended.is_set():
            (folder / "jobs" / "growing.log").write_text("line\n" * (n := n + 1))
            (folder / "jobs" / f"part{n % 7}").mkdir(exist_ok=True)
            (folder / "jobs" / f"part{n % 7}" / "x").write_text("")
            shutil.rmtree(folder / "jobs" / f"part{(n + 1) % 7}", ignore_errors=True)
            begun.set()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        ended.set()
        thread.join()


def by_git(folder: Path) -> None:
    """Make a directory a repository that tracks its files."""
    for words in (("init", "-q"), ("add", "."), ("-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "x")):
        subprocess.run(("git", "-C", folder, *words), check=True)
