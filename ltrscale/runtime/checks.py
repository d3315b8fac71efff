"""Checks of a machine, its open ports, a store or a config: each is a function that returns one line."""

import http.client
import ipaddress
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib import metadata
from pathlib import Path, PurePosixPath
from platform import python_version
from typing import Literal
from urllib.parse import urlsplit

from ltrscale import config as configs
from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import InputError, UnavailableError
from ltrscale.processor import memory

Severity = Literal["ok", "warning", "error"]
CHECKED_PACKAGES = ("ray", "torch", "pyarrow", "lightgbm")
"""Packages that must match for processes to understand each other and compute the same."""
_DRIVER = Path("/proc/driver/nvidia/version")
_SHM = Path("/dev/shm")
_SHARE_OF_MEMORY = 0.3  # Ray's default share for its object store
_MOST_STORE = 200e9  # Ray's maximum for it, in bytes
_FULL = 0.95  # above this Ray lets no task write to the disk
_CLOCK_WARNING_S, _CLOCK_ERROR_S = 10.0, 300.0  # S3 refuses requests that are 15 minutes off


@dataclass(frozen=True)
class CheckResult:
    """The result of a check."""

    level: Severity
    what: str
    """What was found."""
    remedy: str = ""
    """How to fix it; empty if there is nothing to do."""


def versions() -> dict[str, str]:
    """The installed versions of Python and `CHECKED_PACKAGES`; empty for a package that is not installed."""
    installed = {"python": python_version()}
    for name in CHECKED_PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = ""
    return installed


def pinned_versions() -> dict[str, str]:
    """The versions in cluster/constraints.txt of this checkout; empty without a checkout."""
    path = Path(__file__).resolve().parents[2] / "cluster" / "constraints.txt"
    if not path.exists():
        return {}
    pins = dict(line.split("==") for line in path.read_text().split())
    return {name: pins[name] for name in CHECKED_PACKAGES}


def packages(expected: Mapping[str, str], whose: str) -> CheckResult:
    """Check this process's versions against those expected by `whose`; a difference in Ray or Python is an error."""
    found = versions()
    description = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    missing = [name for name, version in found.items() if not version]
    # 2.13.0+cpu is the same torch as 2.13.0; processes with different minor versions of Python cannot exchange objects
    differ = {
        name: version
        for name, version in expected.items()
        if found.get(name, "").partition("+")[0] != version.partition("+")[0]
        and (name != "python" or found[name].split(".")[:2] != version.split(".")[:2])
    }
    if not missing and not differ:
        return CheckResult("ok", description)
    required = ", ".join(f"{name} {version}" for name, version in differ.items())
    level: Severity = "error" if missing or {"ray", "python"} & set(differ) else "warning"
    remedy = "`make install`, or build the image anew (cluster/Dockerfile)"
    return CheckResult(
        level, f"{description}; {whose}: {required or 'all of them'}", f"install these versions: {remedy}"
    )


def gpus(declared: float = 0) -> CheckResult:
    """Check that torch can use the GPUs, sees as many as Ray has `declared` on this node, and has NCCL."""
    import torch  # imported late: it takes seconds

    driver = next(iter(_DRIVER.read_text().splitlines()), "") if _DRIVER.exists() else ""
    n_visible = torch.cuda.device_count()
    if driver and torch.version.cuda is None:
        remedy = "install torch from PyPI, or from the index of your CUDA version (README.md)"
        return CheckResult("error", f"a driver is there ({driver}), but torch {torch.__version__} has no CUDA", remedy)
    if (driver and not n_visible) or declared > n_visible:
        description = (
            f"Ray counts {declared:g} GPUs, torch {n_visible}"
            if declared
            else f"a driver is there ({driver}), but no GPU"
        )
        remedy = "update the driver; start the container with its GPUs (docker run --gpus all, nvidia.com/gpu)"
        return CheckResult("error", f"{description}; torch is for CUDA {torch.version.cuda}", remedy)
    if not n_visible:
        return CheckResult("ok", "no GPU; torch computes on the CPU")
    for i in range(n_visible):
        try:
            torch.ones(2, device=f"cuda:{i}").sum().item()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            return CheckResult(
                "error", f"GPU {i} cannot compute ({reason})", "see nvidia-smi; restart the node if it is faulty"
            )
    name, n_bytes = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
    description = f"{n_visible} x {name} ({n_bytes / 1e9:.0f} GB), CUDA {torch.version.cuda}"
    if not torch.distributed.is_nccl_available():
        return CheckResult(
            "error", f"{description}, no NCCL: workers cannot train together", "install a torch build with NCCL"
        )
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return CheckResult("ok", f"{description}, NCCL {nccl}")


def shared_memory(store: float | None = None) -> CheckResult:
    """Check that /dev/shm has room for the bytes of Ray's object store; by default those that Ray would take."""
    if not _SHM.is_dir():
        return CheckResult("ok", "no /dev/shm on this system; Ray uses files")
    size = shutil.disk_usage(_SHM).total
    required = default_store() if store is None else store
    description = f"/dev/shm has {_gb(size)}, Ray's object store {'wants' if store is None else 'has'} {_gb(required)}"
    if size >= required:
        return CheckResult("ok", description)
    remedy = f"enlarge it: docker run --shm-size={required * 1.1 / 1e9:.0f}g, or on Kubernetes an emptyDir with medium"
    return CheckResult(
        "warning", f"{description}: it would be on a disk", f"{remedy} Memory at /dev/shm (cluster/kuberay-rayjob.yaml)"
    )


def default_store() -> float:
    """Default size of Ray's object store on this machine, in bytes."""
    return min(_SHARE_OF_MEMORY * memory(), _MOST_STORE)


def spill_disk(folder: Path | None = None, store: float | None = None) -> CheckResult:
    """Check that Ray's session folder, or else that of temporary files, has room for the bytes of the object store."""
    folder = folder or Path(tempfile.gettempdir())
    usage = shutil.disk_usage(folder)
    description = f"{folder} has {_gb(usage.free)} free of {_gb(usage.total)}"
    remedy = "make room, or put Ray's files on another disk: ray start --temp-dir, and TMPDIR for scratch"
    if usage.free < (1 - _FULL) * usage.total:
        return CheckResult("error", f"{description}; Ray writes nothing to a disk that is {_FULL:.0%} full", remedy)
    required = default_store() if store is None else store
    return CheckResult(
        "warning" if usage.free < required else "ok", description, remedy if usage.free < required else ""
    )


def _gb(bytes_: float) -> str:
    return f"{bytes_ / 1e9:.1f} GB"


def from_error(error: InputError | UnavailableError) -> CheckResult:
    """The result for an error, with a message of the finding and its remedy."""
    problem, _, remedy = str(error).rpartition("; ")
    return CheckResult("error", problem or remedy, remedy if problem else "")


def _reporting_errors(check: Callable[[str], CheckResult]) -> Callable[[str], CheckResult]:
    """A check that returns an input error or an outage as the result."""

    @wraps(check)
    def checked(url: str) -> CheckResult:
        try:
            return check(url)
        except (InputError, UnavailableError) as error:
            return from_error(error)

    return checked


@_reporting_errors
def store_access(url: str) -> CheckResult:
    """Check that files below a URL can be written, read and deleted with the keys of this process."""
    file, content = storage.join(url, f".doctor-{secrets.token_hex(8)}"), secrets.token_bytes(64)
    storage.write_bytes(file, content)
    try:
        if not storage.read_bytes(file) == _read_by_arrow(file) == content:
            return CheckResult("error", f"{url}: returns other bytes than were written", "use another store")
    finally:
        storage.remove(file)
    if storage.exists(file):
        return CheckResult("error", f"{url}: a deleted file is still there", "allow s3:DeleteObject to these keys")
    return CheckResult("ok", f"{url}: writes, reads and deletes")


def _read_by_arrow(url: str) -> bytes:
    """The content of a file through pyarrow, which reads the data sets with its own client."""
    filesystem, path = storage.arrow_filesystem(url)

    def read() -> bytes:
        with filesystem.open_input_stream(path) as stream:
            return bytes(stream.read())

    with storage.named_errors(url):
        return storage.patiently(read)


@_reporting_errors
def store_conditions(url: str) -> CheckResult:
    """Check that the store can put a file only if none exists, to keep two writers apart; a disk has locks instead."""
    if storage.is_local(url):
        return CheckResult("ok", f"{url}: a disk, where locks keep writers apart")
    if storage.heeds_conditions(storage.join(url, ".doctor")):
        return CheckResult("ok", f"{url}: heeds conditional puts (If-None-Match, If-Match)")
    remedy = "run one writer of a directory at a time, or use a store that heeds them"
    return CheckResult(
        "warning", f"{url}: puts without heeding a condition, so two writers may overwrite each other", remedy
    )


@_reporting_errors
def store_clock(url: str) -> CheckResult:
    """Check that the clocks of S3 and of this machine agree."""
    if not url.startswith("s3://"):
        return CheckResult("ok", f"{url}: has no clock of its own")
    file = storage.join(url, f".doctor-{secrets.token_hex(8)}")
    storage.write_bytes(file, b"")
    try:
        return clocks({url: storage.clock_ahead_s(file)})
    finally:
        storage.remove(file)


def clocks(ahead_s: Mapping[str, float]) -> CheckResult:
    """Check that clocks agree with this machine's, by the seconds that each is ahead, the delay of its answer included.

    Example:
        >>> clocks({"a": 0.2, "b": -400.0}).what
        "clocks differ from this machine's by up to 400 s (b)"
    """
    node, most = max(ahead_s.items(), key=lambda each: abs(each[1]))
    description = f"clocks differ from this machine's by up to {abs(most):.0f} s ({node})"
    level: Severity = "error" if abs(most) > _CLOCK_ERROR_S else "warning" if abs(most) > _CLOCK_WARNING_S else "ok"
    remedy = "synchronise the clocks (chronyd, systemd-timesyncd); S3 refuses requests that are 15 minutes off"
    return CheckResult(level, description, "" if level == "ok" else remedy)


def config_validity(url: str, job: str | None, config_of: Callable[[str], type[Config]]) -> CheckResult:
    """Check that a file is a valid config of its job, whose config `config_of` gives.

    By default the job is the first part of the file's name, such as `pretrain` in `pretrain-news.yaml`.
    """
    name = job or PurePosixPath(url).stem.partition("-")[0]
    try:
        cls = config_of(name)
    except InputError as error:
        return CheckResult(
            "error", f"{url}: its name does not begin with a job's ({error})", "name it with --set job=NAME"
        )
    try:
        configs.load(cls, url)
    except (InputError, UnavailableError) as error:
        return from_error(error)
    return CheckResult("ok", f"{url}: is a config of jobs.{name}")


PORTS = (6379, 8265, 10001)
"""The usual ports of Ray's store of cluster state (GCS), of its dashboard, and of Ray Client."""
_SOCKETS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"
_ANSWER_S = 3.0
_GRPC_CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A request of Ray's own processes; a server that requires a token refuses it without one."""
_ASK_TOKENS = (
    "set RAY_AUTH_MODE=token on all nodes and restart Ray, or listen on 127.0.0.1 only (ray start --dashboard-host, "
    "--node-ip-address), and close the port in the firewall"
)

Answer = Literal["open", "token", "silent", "closed"]


def open_ports(ports: Collection[int]) -> CheckResult:
    """Check that Ray requires a token on these ports of addresses that others can reach."""
    if not _SOCKETS[0].exists():
        return CheckResult("ok", "listening ports are not known on this system")
    answers = {
        (host, port): answer(host, port) for host, port in listening() if port in ports and not _is_loopback(host)
    }

    def on(kind: Answer) -> str:
        return ", ".join(sorted(_place(*place) for place, its in answers.items() if its == kind))

    if on("open"):
        return CheckResult(
            "error", f"whoever reaches {on('open')} is served without a token, and can run code", _ASK_TOKENS
        )
    if on("silent"):
        return CheckResult(
            "warning", f"something that is not Ray listens for others on {on('silent')}", "see what it is"
        )
    finding = f"asks for a token on {on('token')}" if on("token") else "listens on no address that others reach"
    return CheckResult("ok", f"Ray {finding} (ports {', '.join(map(str, sorted(ports)))})")


def open_dashboard(address: str) -> CheckResult:
    """Check that the dashboard at a URL requires a token."""
    parts = urlsplit(address)
    host, port = str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80)
    match answer(host, port, secure=parts.scheme == "https"):
        case "token":
            return CheckResult("ok", f"{address} asks for a token")
        case "open" if _is_loopback(host):
            problem = f"{address} asks for no token: every user of this machine can run code there"
            return CheckResult("warning", problem, "set RAY_AUTH_MODE=token on all nodes and restart Ray")
        case "open":
            return CheckResult("error", f"{address} asks for no token: whoever reaches it can run code", _ASK_TOKENS)
    return CheckResult("error", f"{address} does not answer", "check the address, and that the cluster runs")


def listening() -> Iterator[tuple[str, int]]:
    """Address and port of every listening socket of this machine, from Linux's table."""
    for table in _SOCKETS:
        for row in table.read_text().splitlines()[1:] if table.exists() else []:
            local, _, state = row.split()[1:4]
            if state == _LISTENS:
                address, port = local.split(":")
                yield _address(address), int(port, 16)


def _address(text: str) -> str:
    """An address from Linux's notation, in little-endian words of four bytes."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def answer(host: str, port: int, *, secure: bool = False) -> Answer:
    """How a server answers an HTTP request without a token, or a gRPC request if it does not speak HTTP."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except OSError:
        return "closed"
    connection = (http.client.HTTPSConnection if secure else http.client.HTTPConnection)(host, port, timeout=_ANSWER_S)
    try:
        connection.request("GET", "/api/version")
        return "token" if connection.getresponse().status in (401, 403) else "open"
    except (OSError, http.client.HTTPException):
        return _answer_to_grpc(host, port)
    finally:
        connection.close()


def _answer_to_grpc(host: str, port: int) -> Answer:
    import grpc  # imported late, like Ray, which it comes with

    with grpc.insecure_channel(_place(host, port), options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_GRPC_CALL)(b"", timeout=_ANSWER_S)
        except grpc.RpcError as error:
            match error.code():
                case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
                    return "token"
                case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
                    return "silent"
        return "open"
