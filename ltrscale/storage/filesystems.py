"""The file systems behind URLs.

`patience` decides how often a request to S3 is tried. s3fs and botocore make one try each. pyarrow accepts only a
number of tries: it makes a few within a second, and `patience.patiently` repeats these.
"""

import os
from functools import cache
from typing import Any

import fsspec

from ltrscale.errors import InputError
from ltrscale.storage.faults import named_errors
from ltrscale.storage.names import WEB, check_scheme, is_local

_ARROW_TRIES = 6  # with pauses of 25 ms, 50 ms, 100 ms, ...
_S3_OPTIONS = {
    "use_listings_cache": False,
    "config_kwargs": {"retries": {"mode": "legacy", "total_max_attempts": 1}},
}


def filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a URL and the path on it; a plain path is local."""
    check_scheme(url, WEB)
    if is_local(url):  # as below, in a tenth of the time: thousands of small files may be read
        return _local(), _local()._strip_protocol(url)
    s3 = url.startswith("s3://")
    if s3:
        from ltrscale.storage.s3 import PatientS3  # imported late: most processes never use S3

        fsspec.register_implementation("s3", PatientS3, clobber=True)
    try:
        fs, path = fsspec.core.url_to_fs(url, **(_S3_OPTIONS if s3 else {}))
    except (ValueError, ImportError) as error:
        raise InputError(f"{url}: {error}; use a local path or s3://") from error
    return fs, path


_local = cache(lambda: fsspec.filesystem("file"))


def arrow_filesystem(url: str) -> tuple[Any, str]:
    """The pyarrow file system of a URL and the path on it: memory-mapped files, pyarrow's own S3, or fsspec's."""
    from pyarrow import fs as arrow  # imported late: some processes never read Parquet

    fs, path = filesystem(url)
    if is_local(url):
        return arrow.LocalFileSystem(use_mmap=True), path
    if not url.startswith("s3://"):
        return arrow.PyFileSystem(arrow.FSSpecHandler(fs)), path
    # not pyarrow's standard strategy, which also limits the retries of all requests together
    retries = arrow.AwsDefaultS3RetryStrategy(max_attempts=_ARROW_TRIES)
    with named_errors(url):
        if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
            scheme, _, host = endpoint.rpartition("://")
            options = {"endpoint_override": host, "scheme": scheme or "https"}
        else:
            options = {"region": arrow.resolve_s3_region(path.partition("/")[0])}
        return arrow.S3FileSystem(**options, retry_strategy=retries), path
