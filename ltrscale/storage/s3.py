"""S3 clients: an s3fs with requests that wait for an unavailable store, and clients made from it.

Only botocore, below s3fs, resolves store, credentials and options: it reads the environment, the config files and the
profile. pyarrow and deltalake read less of these, each in its own way, so they get what botocore has resolved.
"""

import asyncio
import contextlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.client import IncompleteRead
from typing import Any

from aiohttp import ClientPayloadError
from botocore import UNSIGNED  # type: ignore[import-untyped]
from botocore.exceptions import (  # type: ignore[import-untyped]
    ClientError,
    FlexibleChecksumError,
    NoCredentialsError,
)
from botocore.httpsession import get_cert_path  # type: ignore[import-untyped]
from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem

from ltrscale.errors import InputError
from ltrscale.storage.faults import Tries, is_unexplained

_CUT_SHORT = (ClientPayloadError, ResponseParserError, IncompleteRead, FlexibleChecksumError)
_ALWAYS = {"list_objects_v2": "IsTruncated", "create_multipart_upload": "UploadId"}
"""A key of every complete answer to these requests; an answer without a body would count as an empty listing."""
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_AMAZON = re.compile(r"https://s3(\.[\w-]+)?\.amazonaws\.com(\.cn)?")
"""Amazon's usual endpoints, which a client finds by region."""
_ARROW_TRIES = 6  # with pauses of 25 ms, 50 ms, 100 ms, ...
_regions: dict[str, str] = {}


@dataclass(frozen=True)
class _Connection:
    """The settings to reach a bucket as s3fs does."""

    bucket: str
    endpoint: str | None
    """URL of the store; None for Amazon's usual one of the region."""
    region: str
    bucket_in_host: bool
    """Whether requests name the bucket in the host, not in the path; clients with an endpoint of None decide this."""
    ca_file: str | None
    """The trusted certificates; None without TLS."""
    proxy: str | None = field(repr=False)
    keys: tuple[str, str, str | None] | None = field(repr=False)
    """Current id, secret and session token; None for unsigned requests."""


class PatientS3(S3FileSystem):  # type: ignore[misc]
    """S3 that retries each request, including reading its answer, as `faults.Tries` decides."""

    retries = 1  # no retries by s3fs itself, which would not share the clock of an outage

    async def set_session(self, *arguments: Any, **options: Any) -> Any:
        """Open a session as s3fs does; an `InputError` for an invalid endpoint."""
        try:
            return await super().set_session(*arguments, **options)
        except ValueError as error:
            remedy = "write it as http://HOST:PORT or https://HOST in AWS_ENDPOINT_URL or endpoint_url of ~/.aws/config"
            raise InputError(f"{error}; {remedy}") from error

    async def _connection(self, bucket: str) -> _Connection:
        client = await self.set_session()
        endpoint, region = str(client.meta.endpoint_url).rstrip("/"), str(client.meta.region_name)
        http = client._endpoint.http_session  # there is no public access to what follows
        in_path = client._ruleset_resolver._builtins["AWS::S3::ForcePathStyle"]
        ca_file, proxy = get_cert_path(http._verify), http._proxy_config.proxy_url_for(endpoint)
        secure = endpoint.startswith("https://")
        if secure and ca_file is None:
            raise InputError(
                "certificates are checked where Parquet is read; set AWS_CA_BUNDLE to the file of their CA"
            )
        is_amazon = _AMAZON.fullmatch(endpoint) is not None
        if is_amazon:
            region = await self._region_of(bucket) or region
        credentials, keys = client._request_signer._credentials, None
        if client.meta.config.signature_version is not UNSIGNED:
            if credentials is None:
                raise NoCredentialsError
            frozen = await credentials.get_frozen_credentials()  # renews keys that are about to expire
            keys = (frozen.access_key, frozen.secret_key, frozen.token)
        return _Connection(
            bucket, None if is_amazon else endpoint, region, not in_path, str(ca_file) if secure else None, proxy, keys
        )

    connection = sync_wrapper(_connection)
    """The settings that this session has resolved for a bucket, with current keys."""

    async def _region_of(self, bucket: str) -> str | None:
        """The region of an Amazon bucket: s3fs follows redirects to another region, other clients do not."""
        if bucket not in _regions:
            try:
                answer = await self._call_s3("head_bucket", Bucket=bucket)
            except PermissionError as error:  # the answer still has the region
                answer = error.__cause__.response if isinstance(error.__cause__, ClientError) else {}
            headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
            if "x-amz-bucket-region" not in headers:
                return None
            _regions[bucket] = headers["x-amz-bucket-region"]
        return _regions[bucket]

    async def _call_s3(self, method: str, *arguments: Any, **options: Any) -> Any:
        tries = Tries()
        while True:
            try:
                answer = await self._call_once(method, *arguments, **options)
            except Exception as error:
                pause = tries.pause_after(error)
                if pause is None:
                    raise
                await asyncio.sleep(pause)
            else:
                tries.answered()
                return answer

    call_s3 = sync_wrapper(_call_s3)

    async def _call_once(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Make one request and read its whole answer, so that a lost connection fails here and is retried."""
        try:
            answer = await super()._call_s3(method, *arguments, **options)
            if method == "get_object":
                with contextlib.closing(answer["Body"]) as body:
                    data = await body.read()
                _check_length(options.get("Range", ""), answer.get("ContentRange", ""), len(data))
                answer["Body"] = _Content(data)
            if method in _ALWAYS and _ALWAYS[method] not in answer:
                raise ConnectionError("the answer was cut short: it has no content")
        except _CUT_SHORT as error:
            raise ConnectionError(f"the answer was cut short ({' '.join(str(error).split())})") from error
        except OSError as error:
            if method == "head_object" and is_unexplained(error):
                # GET is refused like HEAD, but its answer has a body that names the reason
                key = {name: options[name] for name in ("Bucket", "Key", "VersionId") if name in options}
                await self._call_once("get_object", Range="bytes=0-0", **key)
            raise
        return answer


def _check_length(asked: str, answered: str, bytes_: int) -> None:
    """Raise a `ConnectionError` if a part of a file is incomplete: s3fs would fill the gap with zeros."""
    if (part := _RANGE.fullmatch(asked)) is None:
        return
    first, last, total = *part.groups(), answered.rpartition("/")[2]
    ends = [int(last) + 1] * bool(last) + [int(total)] * total.isdecimal()
    if bytes_ != min(ends, default=0) - int(first):
        raise ConnectionError(f"the answer was cut short: {bytes_:,} bytes came for {asked} of {answered or 'no part'}")


class _Content:
    """The content of an answer as s3fs reads it."""

    def __init__(self, data: bytes) -> None:
        self._stream = io.BytesIO(data)

    async def read(self, size: int = -1) -> bytes:
        return self._stream.read(size)

    def close(self) -> None:
        self._stream.close()


def arrow_client(connection: _Connection) -> Any:
    """The S3 client of pyarrow, reused with its open connections until a setting changes."""
    return _arrow_client(connection, os.getpid())  # a fork cannot use the client of its parent


@lru_cache(maxsize=16)
def _arrow_client(connection: _Connection, process: int) -> Any:  # noqa: ARG001 - see above
    from pyarrow import fs as arrow  # imported late: some processes never read Parquet

    scheme, _, host = (connection.endpoint or "https://").partition("://")
    id_, secret, token = connection.keys or (None, None, None)
    return arrow.S3FileSystem(
        access_key=id_,
        secret_key=secret,
        session_token=token,
        anonymous=connection.keys is None,
        region=connection.region,
        scheme=scheme,
        endpoint_override=host or None,
        force_virtual_addressing=bool(host) and connection.bucket_in_host,
        tls_ca_file_path=connection.ca_file,
        proxy_options=connection.proxy,
        # not pyarrow's standard strategy, which also limits the total retries of all requests
        retry_strategy=arrow.AwsDefaultS3RetryStrategy(max_attempts=_ARROW_TRIES),
    )


@contextmanager
def rust_options(connection: _Connection) -> Iterator[dict[str, str]]:
    """Options of deltalake's S3 client, for use inside the block."""
    endpoint = connection.endpoint or ""
    if connection.bucket_in_host:
        endpoint = endpoint.replace("://", f"://{connection.bucket}.")
    id_, secret, token = connection.keys or ("", "", None)
    options = {
        "aws_region": connection.region,
        "aws_endpoint_url": endpoint,
        "aws_endpoint_url_s3": endpoint,  # otherwise the environment's would win
        "aws_virtual_hosted_style_request": str(connection.bucket_in_host).lower(),
        "aws_allow_http": str(endpoint.startswith("http://")).lower(),
        "aws_access_key_id": id_,
        "aws_secret_access_key": secret,
        "aws_session_token": token or "",
        "aws_skip_signature": str(connection.keys is None).lower(),
        "proxy_url": connection.proxy or "",
    }
    before = os.environ.get("SSL_CERT_FILE")
    if connection.ca_file is not None:
        os.environ["SSL_CERT_FILE"] = connection.ca_file  # the library has no option for the certificates
    try:
        yield {name: value for name, value in options.items() if value}
    finally:
        os.environ.pop("SSL_CERT_FILE", None)
        if before is not None:
            os.environ["SSL_CERT_FILE"] = before
