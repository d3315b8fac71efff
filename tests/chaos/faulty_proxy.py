"""A proxy in front of a server that makes requests fail: refused, with a reset connection, or without an answer."""

import contextlib
import http.client
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from jobs.s3 import free_ports

Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""
Match = Callable[[str, str], bool]
"""Whether a request (method, path with query) may fail."""


class Refusal(NamedTuple):
    """An error answer of S3."""

    status: int
    code: str
    message: str

    def content(self) -> bytes:
        """The XML of the answer; an answer to HEAD is sent without it."""
        text = f"<Error><Code>{self.code}</Code><Message>{self.message}</Message></Error>"
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()


SLOW_DOWN = Refusal(503, "SlowDown", "Please reduce your request rate.")
BROKEN = Refusal(500, "InternalError", "We encountered an internal error.")
EXPIRED = Refusal(400, "ExpiredToken", "The provided token has expired.")

Fault = Refusal | Literal["reset", "cut", "hang", "short", "stale"]
"""How a request fails: it is refused; its connection is reset, before the answer or in the middle of it; it gets no
answer as long as the fault lasts; the answer is a success with the first part of its body only, and the length of that
part; or it is what the first request like it got."""

_OF_ONE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class FaultyProxy:
    """Forwards HTTP to `target` on loopback; a context manager that listens at `url`.

    A failing request is not forwarded, unless `after` is set: then it is carried out and only its answer is lost.
    `share`, `match` and `fault` can change while the proxy runs. The failing requests are drawn from a seed, in order
    of arrival. If the server does not answer, the connection is reset. `kept` is the share of a body that is sent if
    answers are short.
    """

    def __init__(self, target: str, share: float, *, seed: int = 0, after: bool = False) -> None:
        self.share, self.after = share, after
        self.fault: Fault = SLOW_DOWN
        self.kept = 0.5
        self.first: dict[str, Answer] = {}
        self.match: Match = lambda _method, _path: True
        self.requests = self.failed = self.answered = 0
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._handler = type("Handler", (_Handler,), {"proxy": self, "target": urlsplit(target).netloc})
        (self._port,) = free_ports(1)  # no outgoing connection takes such a port while the proxy is closed
        self._server: _Server | None = _Server(("127.0.0.1", self._port), self._handler)
        self._listening = False
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Listen, at the same address as before; does nothing if the proxy already listens."""
        if self._listening:
            return
        self._server = self._server or _Server(("127.0.0.1", self._port), self._handler)
        serve = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        serve.start()
        self._listening = True

    def close(self) -> None:
        """Refuse new connections, and cut the open ones."""
        if self._listening and self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server.cut()
            self._server, self._listening = None, False

    @contextmanager
    def gone(self) -> Iterator[None]:
        """Refuse connections while the block runs, and cut the open ones."""
        self.close()
        try:
            yield
        finally:
            self.open()

    @property
    def hangs(self) -> bool:
        """Whether requests that fail still get no answer."""
        return self._listening and self.fault == "hang" and self.share > 0

    def fails(self, method: str, path: str) -> bool:
        """Draw whether the next request fails."""
        with self._lock:
            drawn = self._random.random()
            failing = self.match(method, path) and drawn < self.share
            self.requests += 1
            self.failed += failing
            return failing

    @property
    def idle(self) -> bool:
        """Whether every request that came has its answer, or a reset in place of it."""
        return self.requests == self.answered

    def has_answered(self) -> None:
        """Count a request as answered."""
        with self._lock:
            self.answered += 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # clients keep connections open, so waiting for their threads would never end
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close without the usual shutdown, which would end the connection cleanly instead of resetting it."""
        self._connections.discard(request)
        self.close_request(request)

    def cut(self) -> None:
        """Shut down all connections; a client that sends on one gets a reset."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have closed their connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client, with its own connection to the server."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: ClassVar[FaultyProxy]
    target: ClassVar[str]
    upstream: http.client.HTTPConnection | None = None

    def _serve(self) -> None:
        body = self._body()
        failing = self.proxy.fails(self.command, self.path)
        try:
            self._serve_one(body, failing)
        finally:
            self.proxy.has_answered()

    def _serve_one(self, body: bytes, failing: bool) -> None:
        fault = self.proxy.fault
        forwarded = not failing or self.proxy.after or fault in ("cut", "short", "stale")
        try:
            answer = self._forward(body) if forwarded else None
        except OSError:
            self._reset()
            return
        if not failing and answer is not None:
            self._answer(*answer)
        elif fault == "stale" and answer is not None:
            self._answer(*self.proxy.first.setdefault(f"{self.command} {self.path}", answer))
        elif fault == "short" and answer is not None:
            status, headers, content = answer
            self._answer(status, headers, content[: int(len(content) * self.proxy.kept)])
        elif isinstance(fault, Refusal):
            self._answer(fault.status, {"Content-Type": "application/xml"}, fault.content())
        else:
            while fault == "hang" and self.proxy.hangs:
                time.sleep(0.05)
            if fault == "cut" and answer is not None:
                self._answer(*answer, cut=True)
            self._reset()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _reset(self) -> None:
        """End the connection with a reset instead of a clean end."""
        # SO_LINGER with a timeout of 0 makes close() send RST
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def _body(self) -> bytes:
        """The request's body, with the chunks of the transfer encoding joined."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers
        return b"".join(pieces)

    def _forward(self, body: bytes) -> Answer:
        """Forward the request with its Host header, which the client has signed."""
        for _ in range(2):  # the server may have closed the kept connection: then try once on a new one
            self.upstream = self.upstream or http.client.HTTPConnection(self.target, timeout=60)
            try:
                self.upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in _OF_ONE_CONNECTION | {"expect"}:
                        self.upstream.putheader(name, value)
                self.upstream.putheader("Content-Length", str(len(body)))
                self.upstream.endheaders(body)
                answer = self.upstream.getresponse()
                return answer.status, self._headers(answer), answer.read()
            except (ConnectionError, http.client.HTTPException):
                self.upstream.close()
                self.upstream = None
        raise ConnectionError("the S3 server does not answer")

    def _headers(self, answer: http.client.HTTPResponse) -> dict[str, str]:
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in _OF_ONE_CONNECTION}
        if self.command == "HEAD" and (length := answer.getheader("Content-Length")):
            kept["Content-Length"] = length
        return kept

    def _answer(self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.command == "HEAD":
            content = b""
        elif status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)

    def finish(self) -> None:
        super().finish()
        if self.upstream is not None:
            self.upstream.close()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""
