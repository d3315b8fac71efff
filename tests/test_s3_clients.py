"""One S3, several clients: s3fs, pyarrow, deltalake and pyiceberg reach the same store in each way to name it."""

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest
from secure_store import certificates, proxy, tls
from shared_cluster import SharedCluster

from jobs.s3 import environment
from ltrscale import storage
from ltrscale.errors import InputError
from ltrscale.ingest.lakes import table_version
from ltrscale.runtime import checks
from ltrscale.storage.s3 import PatientS3

pytestmark = [pytest.mark.s3, pytest.mark.slow]
NAME, DEAD = "store.test", "http://127.0.0.1:1"
TABLE = pa.table({"q": ["a"], "f": [1.0]})


def read_by_arrow(url: str) -> bytes:
    filesystem, path = storage.arrow_filesystem(url)
    with storage.named_errors(url), filesystem.open_input_stream(path) as stream:
        return bytes(stream.read())


CLIENTS: dict[str, Callable[[str], Any]] = {
    "s3fs": lambda url: storage.read_bytes(f"{url}/file"),
    "arrow": lambda url: read_by_arrow(f"{url}/file"),
    "delta": lambda url: len(table_version(f"{url}/delta", "delta", None, since=None).files),
    "iceberg": lambda url: len(table_version(f"{url}/iceberg", "iceberg", None, since=None).files),
}
FOUND = {"s3fs": b"hello", "arrow": b"hello", "delta": 1, "iceberg": 1}


@pytest.fixture(scope="module")
def tables(s3: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a file, a table of Delta Lake and one of Iceberg."""
    deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed")
    memory = pytest.importorskip("pyiceberg.catalog.memory", reason="pyiceberg is not installed")
    url, local = f"{s3}/clients", tmp_path_factory.mktemp("tables")
    storage.write_bytes(f"{url}/file", b"hello")
    deltalake.write_deltalake(str(local / "delta"), TABLE)
    for path in (path for path in local.rglob("*") if path.is_file()):
        storage.write_bytes(f"{url}/{path.relative_to(local)}", path.read_bytes())
    at = {"s3.endpoint": os.environ["AWS_ENDPOINT_URL"], "s3.region": "us-east-1"}
    catalog = memory.InMemoryCatalog("test", warehouse=url, **at)
    catalog.create_namespace("logs")
    catalog.create_table("logs.shop", schema=TABLE.schema, location=f"{url}/iceberg").append(TABLE)
    return url


@contextmanager
def only(**values: str) -> Iterator[None]:
    """An environment with these variables and none of Amazon's others, nor those of a CA or a proxy."""
    others = [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith(("_proxy", "ca_bundle"))]
    with pytest.MonkeyPatch.context() as patch:
        for name in others:
            patch.delenv(name)
        for name, value in {"AWS_EC2_METADATA_DISABLED": "true", storage.PATIENCE: "1", **values}.items():
            patch.setenv(name, value)
        PatientS3.clear_instance_cache()
        yield
    PatientS3.clear_instance_cache()


Way = Callable[[ExitStack, Path, str], Mapping[str, str]]
"""The environment that names a store, given what is open meanwhile, an empty directory, and the store's address."""


def keys() -> dict[str, str]:
    return {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")}


def files(folder: Path, profile: str, settings: str) -> dict[str, str]:
    """Config files with a profile, in place of the variables."""
    title = profile if profile == "default" else f"profile {profile}"
    (folder / "config").write_text(f"[{title}]\nregion = us-east-1\n{settings}")
    of_keys = (f"{name.lower()} = {keys()[name]}" for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    (folder / "credentials").write_text("\n".join([f"[{profile}]", *of_keys, ""]))
    places = {"AWS_CONFIG_FILE": folder / "config", "AWS_SHARED_CREDENTIALS_FILE": folder / "credentials"}
    return {name: str(path) for name, path in places.items()} | {"AWS_PROFILE": profile}


def by_tls(stack: ExitStack, folder: Path, address: str) -> Mapping[str, str]:
    ca, server = certificates(folder)
    endpoint = f"https://{stack.enter_context(tls(address, server))}"
    return files(folder, "default", f"endpoint_url = {endpoint}\nca_bundle = {ca}\n")


def by_proxy(stack: ExitStack, folder: Path, address: str) -> Mapping[str, str]:
    ca, server = certificates(folder, NAME)
    secure = stack.enter_context(tls(address, server))
    through, asked = stack.enter_context(proxy(lambda _: secure))
    stack.callback(lambda: None if set(asked) == {f"{NAME}:443"} else pytest.fail(str(asked)))
    at = {"AWS_ENDPOINT_URL": f"https://{NAME}/", "AWS_CA_BUNDLE": str(ca), "HTTPS_PROXY": f"http://{through}"}
    return keys() | at


WAYS: dict[str, Way] = {
    "variable": lambda _s, _f, address: keys() | {"AWS_ENDPOINT_URL": f"http://{address}"},
    "variable of the service": lambda _s, _f, address: (
        keys() | {"AWS_ENDPOINT_URL": DEAD, "AWS_ENDPOINT_URL_S3": f"http://{address}"}
    ),
    "config file": lambda _s, folder, address: files(folder, "default", f"endpoint_url = http://{address}\n"),
    "profile with services": lambda _s, folder, address: files(
        folder, "shop", f"services = own\n\n[services own]\ns3 =\n  endpoint_url = http://{address}\n"
    ),
    "TLS with an own CA": by_tls,
    "proxy": by_proxy,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_all_clients_reach_the_store_that_is_named(tables: str, way: Way, tmp_path: Path) -> None:
    address = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    with ExitStack() as stack, only(**way(stack, tmp_path, address)):
        assert {name: read(tables) for name, read in CLIENTS.items()} == FOUND
        access = checks.store_access(f"{tables}/doctor")
        assert access.level == "ok", access


@pytest.mark.nightly
@pytest.mark.ray
def test_tasks_of_ray_reach_it_too(tables: str, tmp_path: Path, shared_cluster: SharedCluster) -> None:
    import ray

    from ltrscale.runtime.engine import ray_cluster

    shared_cluster.stop()
    address = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    with ExitStack() as stack, only(**by_tls(stack, tmp_path, address)), ray_cluster(1):
        of_workers = ray.remote(num_cpus=0)(lambda: {name: read(tables) for name, read in CLIENTS.items()})
        assert ray.get(of_workers.remote()) == FOUND


@pytest.mark.parametrize("ca", ["another", "missing", "none"])
def test_a_certificate_is_not_blamed_on_keys(tables: str, ca: str, tmp_path: Path) -> None:
    address = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    given = {"none": {}, "missing": {"AWS_CA_BUNDLE": str(tmp_path / "nothing")}}.get(ca)
    if given is None:
        (tmp_path / "other").mkdir()
        given = {"AWS_CA_BUNDLE": str(certificates(tmp_path / "other")[0])}
    with ExitStack() as stack:
        endpoint = f"https://{stack.enter_context(tls(address, certificates(tmp_path)[1]))}"
        stack.enter_context(only(**keys(), **given, AWS_ENDPOINT_URL=endpoint))
        for name, read in CLIENTS.items():
            with pytest.raises(InputError, match=r"certificate is not trusted .* set AWS_CA_BUNDLE") as error:
                read(tables)
            assert "AWS_ACCESS_KEY_ID" not in str(error.value), name
        access = checks.store_access(f"{tables}/doctor")
        assert (access.level, access.remedy) == ("error", "set AWS_CA_BUNDLE to the file of its CA")


def test_a_certificate_of_a_server_of_the_web_is_named(tmp_path: Path) -> None:
    with (
        tls("127.0.0.1:1", certificates(tmp_path)[1]) as address,
        environment(SSL_CERT_FILE=str(tmp_path / "none")),
        pytest.raises(InputError, match=r"certificate is not trusted .* set SSL_CERT_FILE"),
    ):
        storage.read_bytes(f"https://{address}/file")


def test_the_doctor_sees_that_pyarrow_alone_cannot_read(tables: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = storage.arrow_filesystem
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr(storage, "arrow_filesystem", lambda url: (_client(place), real(url)[1]))
        monkeypatch.setenv(storage.PATIENCE, "0")
        access = checks.store_access(f"{tables}/doctor")
    assert (access.level, access.remedy) == ("error", "check the network and AWS_ENDPOINT_URL")


def _client(place: str) -> Any:
    from pyarrow import fs

    retries = fs.AwsDefaultS3RetryStrategy(max_attempts=1)
    return fs.S3FileSystem(endpoint_override=place, scheme="http", region="us-east-1", retry_strategy=retries)


def test_each_file_is_opened_with_the_keys_of_that_moment(tables: str, tmp_path: Path) -> None:
    """A program of the profile gives keys that end in five minutes, which botocore therefore renews each time."""
    endpoint, own = os.environ["AWS_ENDPOINT_URL"], keys()
    (tmp_path / "program.py").write_text(
        f"""
import json, pathlib, time
end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 300))
keys = {{"AccessKeyId": pathlib.Path({str(tmp_path / "id")!r}).read_text(), "Expiration": end}}
print(json.dumps({{"Version": 1, "SecretAccessKey": {own["AWS_SECRET_ACCESS_KEY"]!r}, **keys}}))
"""
    )
    program = f"{sys.executable} {tmp_path / 'program.py'}"
    settings = f"endpoint_url = {endpoint}\ncredential_process = {program}\n"
    given = files(tmp_path, "renewed", settings) | {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}
    with only(**given):
        (tmp_path / "id").write_text("nobody")
        with pytest.raises(InputError, match="no permission to read"):
            read_by_arrow(f"{tables}/file")
        (tmp_path / "id").write_text(own["AWS_ACCESS_KEY_ID"])
        assert {name: read(tables) for name, read in CLIENTS.items()} == FOUND


@pytest.mark.parametrize("problem", ["endpoint", "profile"])
def test_settings_that_name_no_store_are_one_line(tables: str, problem: str, tmp_path: Path) -> None:
    given = {"endpoint": {"AWS_ENDPOINT_URL": "store:9000"}, "profile": {"AWS_PROFILE": "nobody"}}[problem]
    remedy = {"endpoint": "store:9000; write it as http://HOST:PORT", "profile": r"profile \(nobody\) could not"}
    with only(**keys(), **given, AWS_CONFIG_FILE=str(tmp_path / "none")):
        for read in CLIENTS.values():
            with pytest.raises(InputError, match=remedy[problem]):
                read(tables)


class _Amazon(BaseHTTPRequestHandler):
    """Says of a bucket that it is in another region, and of each object the same."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(403 if self.path == "/" else 200)
        for name, value in (("x-amz-bucket-region", "eu-central-1"), ("Content-Length", "5"), ("ETag", '"1"')):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"hello")

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def test_pyarrow_asks_amazon_in_the_region_of_the_bucket(tmp_path: Path) -> None:
    hosts = [f"shop.s3{region}.amazonaws.com" for region in ("", ".eu-west-1", ".eu-central-1")]
    ca, certificate = certificates(tmp_path, *hosts)
    with ExitStack() as stack:
        amazon = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), _Amazon))
        Thread(target=amazon.serve_forever, daemon=True).start()
        stack.callback(amazon.shutdown)
        secure = stack.enter_context(tls(f"127.0.0.1:{amazon.server_address[1]}", certificate))
        through, asked = stack.enter_context(proxy(lambda _: secure))
        own = {"AWS_DEFAULT_REGION": "eu-west-1", "AWS_CA_BUNDLE": str(ca), "HTTPS_PROXY": f"http://{through}"}
        stack.enter_context(only(AWS_ACCESS_KEY_ID="id", AWS_SECRET_ACCESS_KEY="secret", **own))
        assert read_by_arrow("s3://shop/file") == b"hello"
    assert [f"{host}:443" for host in (hosts[1], hosts[2])] == list(dict.fromkeys(asked))


def test_a_table_of_iceberg_names_no_store_of_its_own(tables: str) -> None:
    """The settings of a table are its author's, who may be a stranger."""
    (place,) = storage.list_files(f"{tables}/iceberg/metadata/00001-*.metadata.json")
    metadata = json.loads(storage.read_bytes(place))
    metadata["properties"] |= {"s3.endpoint": DEAD, "py-io-impl": "os.path.Stranger"}
    storage.write_bytes(f"{tables}/stranger/metadata/00001-b.metadata.json", json.dumps(metadata).encode())
    assert len(table_version(f"{tables}/stranger", "iceberg", None, since=None).files) == 1
