"""What stands between a client and a store in companies: TLS with a CA of one's own, and a proxy of HTTP."""

import datetime
import ipaddress
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PEM = serialization.Encoding.PEM


def certificates(folder: Path, *names: str) -> tuple[Path, Path]:
    """Writes the certificate of a CA, and key and certificate of a server of these names on 127.0.0.1."""
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    hosts = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), *map(x509.DNSName, names)]
    ca = _certificate("CA", ca_key.public_key()).add_extension(x509.BasicConstraints(True, None), True)
    server = _certificate("server", key.public_key()).add_extension(x509.SubjectAlternativeName(hosts), False)
    key_text = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "ca.pem").write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(PEM))
    (folder / "server.pem").write_bytes(key_text + server.sign(ca_key, hashes.SHA256()).public_bytes(PEM))
    return folder / "ca.pem", folder / "server.pem"


def _certificate(subject: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    name, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (subject, "CA"))
    builder = x509.CertificateBuilder(issuer, name, key, x509.random_serial_number())
    return builder.not_valid_before(now - day).not_valid_after(now + day)


@contextmanager
def tls(target: str, certificate: Path) -> Iterator[str]:
    """Serves what is at an address by TLS; yields the address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as plain:
            _join(plain, target)

    with _listening(serve) as address:
        yield address


@contextmanager
def proxy(target_of: Callable[[str], str]) -> Iterator[tuple[str, list[str]]]:
    """A proxy that connects to another address than it is asked for; yields its own, and what it has been asked for."""
    asked: list[str] = []

    def serve(connection: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            if not (piece := connection.recv(4096)):
                return
            head += piece
        method, place, _ = head.split(b"\r\n")[0].decode().split()
        assert method == "CONNECT"
        asked.append(place)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        _join(connection, target_of(place))

    with _listening(serve) as address:
        yield address, asked


@contextmanager
def _listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # a client that does not trust the certificate, or has closed its connection
                serve(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def _join(client: socket.socket, target: str) -> None:
    """Hands bytes on in both directions until both have ended."""
    host, _, port = target.rpartition(":")
    with socket.create_connection((host, int(port))) as server:
        back = threading.Thread(target=_pump, args=(server, client), daemon=True)
        back.start()
        _pump(client, server)
        back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
