"""A Ray cluster on this machine, with head and workers as separate processes, to try `jobs.submit`.

    eval "$(python cluster/local.py start)"     start it; set its address and token for `ray` in this shell
    python -m jobs.submit -- pretrain --config jobs/configs/start/distributed-dev.yaml
    eval "$(python cluster/local.py status)"    set them in another shell
    python cluster/local.py stop                stop it

As on a real cluster the head has no CPU for tasks. Jobs see the environment in which the cluster was started. Put an S3
server's address and keys there, because everybody who sees the dashboard sees a job's runtime_env. Ray listens on
127.0.0.1 only and requires the token in runs/local-ray; no usage statistics are sent.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from urllib.request import Request, urlopen

from processes import (
    RUNS,
    Process,
    free_ports,
    is_free,
    one_line_errors,
    print_exports,
    print_status,
    write_private,
)

from ltrscale.errors import InputError
from ltrscale.runtime.engine import loopback

_DASHBOARD = 8265  # the default of Ray's tools
_READY_S = 90.0
_STOP_S = 30.0
_DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
_MB = 1 << 20
# The program `ray`, patched for a cluster on 127.0.0.1. RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 makes Ray's child processes
# keep that address, but it also makes `ray start` refuse worker nodes. So this process sets the constant back, and
# switches off the replacement of 127.0.0.1 by the machine's address on the network.
_RAY = """
from ray._private import ray_constants, services
ray_constants.ENABLE_RAY_CLUSTER, services.resolve_ip_for_localhost = True, str
from ray.scripts.scripts import main
main()
"""


def main() -> None:
    """Parse the command line and carry out the action."""
    options = argparse.ArgumentParser(
        prog="local.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("action", choices=["start", "stop", "status"])
    options.add_argument("--folder", type=Path, default=RUNS / "local-ray", help="state (default: runs/local-ray)")
    options.add_argument(
        "--dashboard-port", type=int, help="port for submitting jobs (default: 8265, or a free one if that is taken)"
    )
    options.add_argument("--workers", type=int, default=1, help="worker nodes (default: 1)")
    options.add_argument("--cpus", type=int, default=4, help="CPUs that each worker node declares (default: 4)")
    options.add_argument(
        "--resources", default='{"reader": 4}', help="resources of each worker node (default: %(default)s)"
    )
    given = options.parse_args()
    with one_line_errors():
        folder = given.folder.resolve()
        match given.action:
            case "start":
                if _nodes(folder)[0].pid is None:
                    _start(folder, given.dashboard_port, given.workers, _worker_options(given.cpus, given.resources))
                _show(folder)
            case "stop":
                print_status("stopped" if _stop(folder) else "not running")
            case _:
                _show(folder)


def _worker_options(cpus: int, resources: str) -> list[str]:
    try:
        named = json.loads(resources)
    except ValueError as error:
        raise InputError(f"--resources: not JSON ({error}); write it as in '{{\"reader\": 4}}'") from error
    if not isinstance(named, dict) or not all(isinstance(amount, int | float) for amount in named.values()):
        raise InputError(
            f"--resources: {resources} is not a mapping of names to numbers; write it as in '{{\"reader\": 4}}'"
        )
    return [f"--num-cpus={cpus}", f"--resources={resources}"]


def _nodes(folder: Path) -> list[Process]:
    """The head, then every started worker."""
    workers = sorted(path.stem for path in folder.glob("worker-*.pid"))
    return [Process(folder, name) for name in ("head", *workers)]


def _start(folder: Path, dashboard_port: int | None, workers: int, worker_options: Iterable[str]) -> None:
    """Start the head, then the workers, and wait until all are alive."""
    if dashboard_port is None:
        dashboard_port = _DASHBOARD if is_free(_DASHBOARD) else free_ports(1)[0]
    elif not is_free(dashboard_port):
        raise InputError(f"port {dashboard_port}: another program listens there; choose another --dashboard-port")
    _stop(folder)  # workers may remain from a cluster whose head has died
    folder.mkdir(parents=True, exist_ok=True)
    write_private(folder / "auth_token", secrets.token_hex(32))
    scratch = tempfile.mkdtemp(prefix="ltrscale-ray-")  # below the checkout the paths of sockets could be too long
    client = {
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard_port}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "auth_token"),
    }
    (folder / "environment.json").write_text(json.dumps(client, indent=1))
    (folder / "scratch").write_text(scratch)
    gcs, client_server, *agents = free_ports(3 + workers)
    node = ["start", "--block", "--node-ip-address=127.0.0.1"]
    head = [
        *node, "--head", f"--port={gcs}", "--num-cpus=0", f"--temp-dir={scratch}", "--disable-usage-stats",
        "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}", f"--ray-client-server-port={client_server}",
        f"--dashboard-agent-listen-port={agents[0]}", f"--object-store-memory={128 * _MB}",
    ]  # fmt: skip
    ray, environment = [sys.executable, "-c", _RAY], _environment(client)
    try:
        process = Process(folder, "head")
        process.start([*ray, *head], environment)
        _await_nodes(process, client, 1)
        for i in range(workers):
            process = Process(folder, f"worker-{i}")
            agent = f"--dashboard-agent-listen-port={agents[i + 1]}"
            address = f"--address=127.0.0.1:{gcs}"
            store = f"--object-store-memory={1024 * _MB}"
            process.start([*ray, *node, address, agent, store, *worker_options], environment)
            # one after the other, for Ray gives each 30 s; on a busy machine two at once take longer
            _await_nodes(process, client, i + 2)
    except InputError:
        _stop(folder)
        raise


def _await_nodes(started: Process, client: dict[str, str], count: int) -> None:
    """Wait until the cluster has so many nodes; an error if the one that was started last has ended."""
    started.wait(lambda: _alive(client) >= count, _READY_S)


def _environment(client: dict[str, str]) -> dict[str, str]:
    """This shell's environment, with this `python` first on the PATH and Ray's settings."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    ray = {
        "RAY_USAGE_STATS_ENABLED": "0",
        _DRAIN: os.environ.get(_DRAIN, "0"),  # end on SIGTERM without waiting
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keep 127.0.0.1 as the address, see _RAY
        "GLOO_SOCKET_IFNAME": loopback(),
    }
    return {**inherited, **client, **ray, "PATH": path}


def _alive(client: dict[str, str]) -> int:
    """The number of living nodes according to the dashboard; 0 while it does not answer."""
    token = Path(client["RAY_AUTH_TOKEN_PATH"]).read_text()
    request = Request(
        f"{client['RAY_API_SERVER_ADDRESS']}/nodes?view=summary", headers={"Authorization": f"Bearer {token}"}
    )
    with contextlib.suppress(OSError, ValueError, KeyError), urlopen(request, timeout=5) as answer:
        summary = json.load(answer)["data"]["summary"]
        return sum(node["raylet"].get("state") == "ALIVE" for node in summary)
    return 0


def _stop(folder: Path) -> bool:
    """Stop the workers, then the head, and delete Ray's scratch; returns whether anything ran."""
    ran = [process.stop(_STOP_S) for process in reversed(_nodes(folder))]
    if (folder / "scratch").exists():
        shutil.rmtree((folder / "scratch").read_text(), ignore_errors=True)
        (folder / "scratch").unlink()
    return any(ran)


def _show(folder: Path) -> None:
    head, *workers = _nodes(folder)
    if head.pid is None:
        raise InputError(f"{folder}: no cluster runs here; start it with `python cluster/local.py start`")
    client: dict[str, str] = json.loads((folder / "environment.json").read_text())
    running = sum(worker.pid is not None for worker in workers)
    print_status(f"Ray head, process {head.pid}, and {running} workers; dashboard {client['RAY_API_SERVER_ADDRESS']}")
    print_status(f"for Prometheus: {(folder / 'scratch').read_text()}/prom_metrics_service_discovery.json")
    print_exports(client)


if __name__ == "__main__":
    main()
