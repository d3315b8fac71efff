"""The directory of the code that goes to a cluster, as a copy that nothing changes.

Ray reads it twice, for its hash and for its content, and fails if a file changes in between.
"""

import shutil
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ltrscale import storage
from ltrscale.progress import log
from ltrscale.runtime import ray_internals

_PACKAGES = ("jobs", "ltrscale")
"""Directories where new files are sent before git tracks them."""


@dataclass(frozen=True)
class SentCopy:
    """A copy of what is sent."""

    folder: Path
    """Directory of the copy."""
    sent: dict[str, int]
    """The files that Ray takes from it, and their bytes."""
    rule: str
    """The rule that selected them, in words."""


@contextmanager
def sent_copy(folder: Path, configs: Collection[str]) -> Iterator[SentCopy]:
    """Copy a directory while the block runs: what git tracks there, or else all that is not ignored.

    Data sets and other outputs of jobs are left out, with a warning. `configs` are sent even if git does not track
    them.
    """
    names = {*_git(folder, "--cached")}
    if any(name.startswith("jobs/") for name in names):  # otherwise the repository is another project's
        rule = "what git tracks and .rayignore does not name"
        names |= {*_git(folder, "--others", "--exclude-standard", "--", *_PACKAGES), *configs}
    else:
        rule = "all but what .gitignore and .rayignore name"
        names = {*ray_internals.working_directory(folder)}
    outputs = [name.rpartition("/")[0] for name in sorted(names) if _is_manifest(name)]
    for output in outputs:
        log.warning("not sent: %s, as it is the output of a job; give it a place that every node sees", folder / output)
    with storage.scratch.directory() as copy:
        _copy(folder, copy, [name for name in names if not any(name.startswith(f"{output}/") for output in outputs)])
        yield SentCopy(copy, ray_internals.working_directory(copy), rule)


def _git(folder: Path, *options: str) -> list[str]:
    """Files of a directory, relative to it, from `git ls-files`; none without git."""
    command = ("git", "-C", str(folder), "ls-files", "-z", *options)
    try:
        done = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [name for name in done.stdout.decode(errors="surrogateescape").split("\0") if name]


def _is_manifest(name: str) -> bool:
    path = PurePosixPath(name)
    return path.name in (storage.MANIFEST, storage.HIDDEN_MANIFEST) and len(path.parts) > 1


def _copy(folder: Path, copy: Path, names: Collection[str]) -> None:
    """Copy files that still exist: git tracks a deleted file until the deletion is committed."""
    for name in names:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            if (folder / name).is_dir():  # a submodule, or a link to a directory
                shutil.copytree(folder / name, target, dirs_exist_ok=True)
            else:
                shutil.copy2(folder / name, target)
