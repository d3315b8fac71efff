"""The proxy that simulates a faulty network and store."""

import http.client
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.chaos.faulty_proxy import FaultyProxy


class _Store(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def store() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Store) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _get(proxy: FaultyProxy) -> int:
    connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status
    finally:
        connection.close()


def test_it_refuses_and_cuts_connections_and_comes_back_at_its_address(store: str) -> None:
    with FaultyProxy(store, 0.0) as proxy:
        kept = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=5)
        kept.request("GET", "/")
        assert kept.getresponse().read() == b"ok"
        url = proxy.url
        proxy.close()
        proxy.close()
        with pytest.raises(ConnectionRefusedError):
            _get(proxy)
        assert kept.sock.recv(1) == b""
        kept.close()
        proxy.open()
        proxy.open()
        assert proxy.url == url
        assert _get(proxy) == 200


def test_it_resets_the_share_that_is_asked_for(store: str) -> None:
    with FaultyProxy(store, 1.0) as proxy:
        assert _get(proxy) == 503
        proxy.fault = "reset"
        with pytest.raises(ConnectionResetError):
            _get(proxy)
        proxy.share = 0.0
        assert _get(proxy) == 200


def test_a_store_that_is_gone_is_a_reset() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{free.getsockname()[1]}"
    with FaultyProxy(gone, 0.0) as proxy, pytest.raises(ConnectionResetError):
        _get(proxy)
