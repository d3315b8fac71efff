"""A real S3 server (SeaweedFS) on this machine, for benchmarks and tests."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import s3fs

from ltrscale import storage
from ltrscale.storage.s3 import PatientS3

_BUCKET = "bench"
_KEYS = ("bench-key", "bench-secret")
_READY_S = 60
_PORTS = range(20_000, 22_700)
"""Above the ports of Ray's workers, and plus 10,000 (for gRPC) below those of outgoing connections."""


def seaweedfs() -> str | None:
    """Path of the server's program: beside this Python, or on the PATH; None if it is not installed."""
    local = Path(sys.executable).with_name("weed")
    return str(local) if local.is_file() else shutil.which("weed")


class SeaweedFS:
    """The server on loopback; it can be killed, and started again with its stored data.

    Args:
        program: path of the program, from `seaweedfs`.
        folder: an existing directory for data, keys and log.
        ports: from `free_ports(4)`; with existing data the same ports as before.
        keys: the id of an access key, and the key.
    """

    def __init__(self, program: str, folder: Path, ports: Sequence[int], keys: tuple[str, str] = _KEYS) -> None:
        self._program, self._folder, self._ports, self._keys = program, folder, ports, keys
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._server is not None
        return self._server.pid

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that give clients the endpoint and the keys."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._ports[3]}",
            "AWS_ACCESS_KEY_ID": self._keys[0],
            "AWS_SECRET_ACCESS_KEY": self._keys[1],
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Start the server, without waiting until it answers."""
        master, volume, filer, port = self._ports
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        keys = dict(zip(("accessKey", "secretKey"), self._keys, strict=True))
        identities = {"identities": [{"name": "bench", "credentials": [keys], "actions": actions}]}
        (self._folder / "s3.json").write_text(json.dumps(identities))
        command = [
            self._program, "server", f"-dir={self._folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            f"-master.port={master}", "-master.telemetry=false", "-master.volumeSizeLimitMB=256",
            "-master.electionTimeout=2s",  # a restart waits for the election, although there is only one server
            f"-volume.port={volume}", "-volume.max=100", "-volume.preStopSeconds=0", "-filer", f"-filer.port={filer}",
            "-s3", f"-s3.port={port}", "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-s3.autoCreateBucket=false", f"-s3.config={self._folder}/s3.json",
        ]  # fmt: skip
        with (self._folder / "server.log").open("a") as log:
            # the server would adopt AWS keys from its environment as its own identities
            others = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
            self._server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self._folder, env=others)

    def make_bucket(self, name: str) -> None:
        """Make a bucket, unless it exists, as soon as the server is ready; the environment must name the server."""
        assert self._server is not None
        deadline = time.monotonic() + _READY_S
        while True:
            assert self._server.poll() is None, "the S3 server ended"
            try:
                with socket.create_connection(("127.0.0.1", self._ports[3]), timeout=1):
                    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
                return
            except FileExistsError:
                return
            except OSError:
                assert time.monotonic() < deadline, "the S3 server does not answer"
                time.sleep(0.2)

    def kill(self) -> None:
        """Kill the server, because a graceful shutdown takes half a minute."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()


@contextmanager
def s3_server(program: str) -> Iterator[tuple[str, int]]:
    """Start SeaweedFS on loopback with a temporary folder; yields the URL of an empty bucket and the server's pid.

    Inside the block the environment names endpoint and keys. Workers of a Ray that is started inside inherit them.
    """
    with storage.scratch.directory() as folder:
        server = SeaweedFS(program, folder, free_ports(4))
        server.start()
        try:
            with environment(**server.environment):
                server.make_bucket(_BUCKET)
                yield f"s3://{_BUCKET}", server.pid
        finally:
            server.kill()


def free_ports(count: int) -> list[int]:
    """Free ports p for which p + 10,000 is free too: SeaweedFS uses it for gRPC."""

    def free(port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    candidates = (port for port in random.sample(_PORTS, 1_000) if free(port) and free(port + 10_000))
    return [next(candidates) for _ in range(count)]


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables while the block runs, for S3 clients too."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    PatientS3.clear_instance_cache()  # cached clients read the environment only once
    try:
        yield
    finally:
        PatientS3.clear_instance_cache()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
