"""Kill a process before one of the changes that it makes below a folder, and compare what is there in the end."""

import hashlib
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"}
_TOKEN = re.compile(r"(?<=[0-9a-f]{8})-[0-9a-f]{8}(?=\W|$)")
"""A writer's token behind the hash in the name of a file: each run draws another one."""
_OF_THE_RUN = ("run/", "_run/")


def killed_before(change: int, folder: Path, run: Callable[[], object]) -> bool:
    """Run in a child process that is killed before it makes its nth change below the folder; whether it came so far.

    Raises:
        AssertionError: the process failed otherwise.
    """

    def child() -> None:
        die_before(change, str(folder))
        run()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode in (0, 9)
    return process.exitcode == 9


_JOB = """
import runpy, sys
from killing import die_before
die_before(int(sys.argv[1]), sys.argv[2])
sys.argv = sys.argv[3:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def job_killed_before(change: int, folder: Path, *words: str) -> bool:
    """As `killed_before`, of a command line such as `jobs.prepare`, `--config`, `prepare.yaml`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[:2]))}
    command = [sys.executable, "-c", _JOB, str(change), str(folder), *words]
    status = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert status.returncode in (0, 9), status.stderr
    return status.returncode == 9


def die_before(change: int, folder: str) -> None:
    """Kill this process before it makes its nth change below the folder."""
    left = [change]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _is_change(event, arguments, folder):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)

    sys.addaudithook(hook)


def _is_change(event: str, arguments: tuple[Any, ...], folder: str) -> bool:
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    return bool(event in _CHANGES or writes) and str(arguments[0]).startswith(folder)


def found_in(folder: Path) -> dict[str, str]:
    """The hashes of all files, and the folders, by name; of files that record a run, and of manifests, the names."""
    return dict(_found_in(folder))


def _found_in(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        of_the_run = any(f"/{part}" in f"/{name}" for part in _OF_THE_RUN) or path.name.endswith("manifest.json")
        content = "" if path.is_dir() or of_the_run else hashlib.sha256(path.read_bytes()).hexdigest()
        yield _TOKEN.sub("", name), content
