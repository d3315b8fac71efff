"""The file systems behind URLs, and how long they insist when S3 refuses a request.

s3fs repeats a request in rounds, and in each round botocore tries it a few times: together 24 times in about 25
seconds, so that one in 10^7 fails where half of all answers are 503. botocore's newer modes stop early where many
requests fail, by a budget of retries for all requests together; the legacy mode has none. pyarrow takes a number of
retries, 9 tries in 6 seconds; `faults.patiently` repeats that.
"""

import os
from typing import Any

import fsspec
from botocore.exceptions import ClientError  # type: ignore[import-untyped]

from ltrscale.errors import InputError
from ltrscale.storage.faults import named_errors
from ltrscale.storage.urls import check_scheme, is_local

_ROUNDS = 8
_TRIES_A_ROUND = 3
_ARROW_RETRIES = 8  # with pauses of 25 ms, 50 ms, 100 ms, ...
_OVERLOADED = (500, 502, 503, 504)
_S3_OPTIONS = {
    "use_listings_cache": False,
    "config_kwargs": {"retries": {"mode": "legacy", "total_max_attempts": _TRIES_A_ROUND}},
}


def filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a URL and the path on it; a plain path is local."""
    check_scheme(url)
    s3 = url.startswith("s3://")
    try:
        fs, path = fsspec.core.url_to_fs(url, **(_S3_OPTIONS if s3 else {}))
    except (ValueError, ImportError) as error:
        raise InputError(f"{url}: {error}; use a local path or s3://") from error
    if s3:
        _insist(fs)
    return fs, path


def _insist(fs: fsspec.AbstractFileSystem) -> None:
    """Let s3fs repeat whatever was refused.

    By itself it reads the reason in the body of the answer, and the answer to a HEAD request has none.
    """
    from s3fs.core import set_custom_error_handler  # here, for what never uses S3

    set_custom_error_handler(_is_overload)
    fs.retries = _ROUNDS


def _is_overload(error: Exception) -> bool:
    return isinstance(error, ClientError) and error.response["ResponseMetadata"]["HTTPStatusCode"] in _OVERLOADED


def arrow_filesystem(url: str) -> tuple[Any, str]:
    """The pyarrow file system of a URL and the path on it: memory-mapped files, pyarrow's own S3, or fsspec's."""
    from pyarrow import fs as arrow  # here, for what never reads Parquet

    fs, path = filesystem(url)
    if is_local(url):
        return arrow.LocalFileSystem(use_mmap=True), path
    if not url.startswith("s3://"):
        return arrow.PyFileSystem(arrow.FSSpecHandler(fs)), path
    # pyarrow's standard strategy has a budget of retries too
    retries = arrow.AwsDefaultS3RetryStrategy(max_attempts=_ARROW_RETRIES)
    with named_errors(url):
        if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
            scheme, _, host = endpoint.rpartition("://")
            where = {"endpoint_override": host, "scheme": scheme or "https"}
        else:
            where = {"region": arrow.resolve_s3_region(path.partition("/")[0])}
        return arrow.S3FileSystem(**where, retry_strategy=retries), path
