"""The S3 server for development: it keeps its data and keys, and stops on request."""

import os
import signal
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest
import s3fs
from cluster_scripts import error_line, exported_environment, run_script
from waiting import wait_until

OTHERS = {"AWS_ACCESS_KEY_ID": "of-someone", "AWS_SECRET_ACCESS_KEY": "else"}
"""Keys in the user's shell; the server must not take them for its own."""


def client(environment: dict[str, str]) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(
        key=environment["AWS_ACCESS_KEY_ID"],
        secret=environment["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        skip_instance_cache=True,
        use_listings_cache=False,
    )


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def port() -> int:
    return next(
        p for p in range(24_000, 30_000, 4) if not any(listening(p + i + j) for i in range(4) for j in (0, 10_000))
    )


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.s3
def test_data_outlives_the_server(tmp_path: Path, port: int) -> None:
    options = (f"--folder={tmp_path}", f"--port={port}")
    try:
        first = run_script("dev_s3.py", "start", *options, environment=OTHERS)
        assert first.returncode == 0, first.stderr
        environment = exported_environment(first.stdout)
        assert environment["AWS_ENDPOINT_URL"] == f"http://127.0.0.1:{port}"
        client(environment).pipe_file("ltrscale/some/object", b"content")
        with pytest.raises(PermissionError):
            client({**environment, **OTHERS}).ls("ltrscale")
        again = run_script("dev_s3.py", "start", *options)
        assert (again.returncode, again.stdout) == (0, first.stdout), "it runs already"
        secret_files = [path for path in tmp_path.iterdir() if environment["AWS_SECRET_ACCESS_KEY"] in readable(path)]
        assert secret_files
        assert all(path.stat().st_mode & 0o077 == 0 for path in secret_files)

        os.kill(int((tmp_path / "server.pid").read_text().split()[0]), signal.SIGKILL)
        wait_until(lambda: not listening(port))
        assert "no server runs here" in error_line(run_script("dev_s3.py", "status", *options))
        assert exported_environment(run_script("dev_s3.py", "start", *options).stdout) == environment
        assert client(environment).cat_file("ltrscale/some/object") == b"content"
    finally:
        assert run_script("dev_s3.py", "stop", *options).returncode == 0
    assert not any(listening(p + grpc) for p in range(port, port + 4) for grpc in (0, 10_000))


def readable(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


@pytest.mark.slow
def test_a_taken_port_is_named(tmp_path: Path, port: int) -> None:
    with socket.create_server(("127.0.0.1", port + 2)):
        line = error_line(run_script("dev_s3.py", "start", f"--folder={tmp_path}", f"--port={port}"))
    assert f"port {port + 2}" in line
    assert "--port" in line


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.s3
def test_without_a_port_it_takes_free_ones(tmp_path: Path) -> None:
    """Another checkout on the machine has the usual ports, or this program does."""
    usual = nullcontext() if listening(21_333) else socket.create_server(("127.0.0.1", 21_333))
    with usual:
        try:
            started = run_script("dev_s3.py", "start", f"--folder={tmp_path}")
            assert started.returncode == 0, started.stderr
            port = int(exported_environment(started.stdout)["AWS_ENDPOINT_URL"].rpartition(":")[2])
            assert port != 21_333
            assert listening(port)
        finally:
            assert run_script("dev_s3.py", "stop", f"--folder={tmp_path}").returncode == 0


@pytest.mark.slow
def test_another_process_with_the_same_id_is_left_alone(tmp_path: Path) -> None:
    """The pid file of a dead server may name an unrelated process."""
    (tmp_path / "server.pid").write_text(f"{os.getpid()}\nMon Jan  1 00:00:00 2024\n")
    assert "not running" in run_script("dev_s3.py", "stop", f"--folder={tmp_path}").stderr
