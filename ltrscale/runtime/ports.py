"""Checks of open ports: whether Ray serves others on this machine, or at an address, without a token."""

import http.client
import ipaddress
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from ltrscale.runtime.checks import CheckResult

PORTS = (6379, 8265, 10001)
"""The usual ports of Ray's store of cluster state (GCS), of its dashboard, and of Ray Client."""
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"
_ANSWER_S = 3.0
_CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A request of Ray's own processes; a server that requires a token refuses it without one."""
_REMEDY = (
    "set RAY_AUTH_MODE=token on all nodes and restart Ray, or listen on 127.0.0.1 only (ray start --dashboard-host, "
    "--node-ip-address), and close the port in the firewall"
)

Answer = Literal["open", "token", "silent", "closed"]


def open_ports(ports: Collection[int]) -> CheckResult:
    """Check that Ray requires a token on these ports of addresses that others can reach."""
    if not _TABLES[0].exists():
        return CheckResult("ok", "listening ports are not known on this system")
    answers = {
        (host, port): answer(host, port) for host, port in listening() if port in ports and not _is_loopback(host)
    }

    def on(kind: Answer) -> str:
        return ", ".join(sorted(_place(*place) for place, its in answers.items() if its == kind))

    if on("open"):
        return CheckResult(
            "error", f"whoever reaches {on('open')} is served without a token, and can run code", _REMEDY
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
            return CheckResult("error", f"{address} asks for no token: whoever reaches it can run code", _REMEDY)
    return CheckResult("error", f"{address} does not answer", "check the address, and that the cluster runs")


def listening() -> Iterator[tuple[str, int]]:
    """Address and port of every listening socket of this machine, from Linux's table."""
    for table in _TABLES:
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
            channel.unary_unary(_CALL)(b"", timeout=_ANSWER_S)
        except grpc.RpcError as error:
            match error.code():
                case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
                    return "token"
                case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
                    return "silent"
        return "open"
