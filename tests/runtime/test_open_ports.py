"""Open ports, on real sockets of this machine."""

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ltrscale.runtime import checks
from ltrscale.runtime.checks import listening, open_dashboard, open_ports

ANYWHERE = "0.0.0.0"


@contextmanager
def dashboard(host: str, status: int) -> Iterator[int]:
    """A server that answers every request with a status; yields its port."""

    class Answering(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with http.server.HTTPServer((host, 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "status", "level"),
    [(ANYWHERE, 200, "error"), (ANYWHERE, 401, "ok"), (ANYWHERE, 403, "ok"), ("127.0.0.1", 200, "ok")],
)
def test_a_dashboard_that_others_reach_must_ask_for_a_token(host: str, status: int, level: str) -> None:
    with dashboard(host, status) as port:
        line = open_ports([port])
    assert line.level == level
    assert (f"{ANYWHERE}:{port} is served without a token" in line.what) == (level == "error")
    assert ("RAY_AUTH_MODE=token" in line.remedy) == (level == "error")
    assert open_ports([port]).level == "ok", "it is closed now"


@pytest.mark.slow
def test_something_that_is_not_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_ANSWER_S", 0.3)
    with socket.create_server((ANYWHERE, 0)) as silent:
        port = silent.getsockname()[1]
        line = open_ports([port])
    assert (line.level, f"{ANYWHERE}:{port}" in line.what) == ("warning", True)


def test_listening_sockets_are_those_of_the_system() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("::1", 0), family=socket.AF_INET6) as two:
        assert {one.getsockname()[:2], two.getsockname()[:2]} <= set(listening())


@pytest.mark.slow
def test_the_dashboard_at_an_address() -> None:
    with dashboard("127.0.0.1", 200) as port:
        assert open_dashboard(f"http://127.0.0.1:{port}").level == "warning"
    with dashboard("127.0.0.1", 401) as port:
        assert open_dashboard(f"http://127.0.0.1:{port}").level == "ok"
    assert open_dashboard(f"http://127.0.0.1:{port}").level == "error"
