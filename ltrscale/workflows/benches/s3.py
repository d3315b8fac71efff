"""A real S3 server (SeaweedFS) on this machine, for as long as a benchmark needs one."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import s3fs

from ltrscale import storage

_BUCKET = "bench"
_KEYS = {"accessKey": "bench-key", "secretKey": "bench-secret"}
_READY_S = 60


def seaweedfs() -> str | None:
    """Path of the server's program: beside this Python, or on the path of the shell; None where it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.is_file() else shutil.which("weed")


@contextmanager
def s3_server(program: str) -> Iterator[tuple[str, int]]:
    """Start SeaweedFS on loopback with its data in a temporary folder; yields the URL of an empty bucket and its pid.

    The environment names endpoint and keys for so long, to Ray workers too where Ray is started inside.
    """
    master, volume, filer, port = free_ports(4)
    with storage.scratch.directory() as folder:
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identities = {"identities": [{"name": "bench", "credentials": [_KEYS], "actions": actions}]}
        Path(folder, "s3.json").write_text(json.dumps(identities))
        command = [
            program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={master}",
            "-master.telemetry=false", "-master.volumeSizeLimitMB=256", f"-volume.port={volume}", "-volume.max=100",
            "-volume.preStopSeconds=0", "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={port}",
            "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder}/s3.json",
        ]  # fmt: skip
        with (
            Path(folder, "server.log").open("w") as log,
            subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder) as server,
            _environment(
                AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
                AWS_ACCESS_KEY_ID=_KEYS["accessKey"],
                AWS_SECRET_ACCESS_KEY=_KEYS["secretKey"],
                AWS_DEFAULT_REGION="us-east-1",
            ),
        ):
            try:
                make_bucket(_BUCKET, port, server)
                yield f"s3://{_BUCKET}", server.pid
            finally:
                server.kill()  # a polite end takes half a minute, and the data is thrown away


def free_ports(count: int) -> list[int]:
    """Free ports whose number plus 10,000, where SeaweedFS speaks gRPC, is free too."""

    def free(port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    candidates = (port for port in random.sample(range(20_000, 30_000), 1_000) if free(port) and free(port + 10_000))
    return [next(candidates) for _ in range(count)]


def make_bucket(name: str, port: int, server: subprocess.Popen[bytes]) -> None:
    """Make a bucket as soon as the server takes one."""
    deadline = time.monotonic() + _READY_S
    while True:
        assert server.poll() is None, "the S3 server ended"
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
            return
        except OSError:
            assert time.monotonic() < deadline, "the S3 server does not answer"
            time.sleep(0.2)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
