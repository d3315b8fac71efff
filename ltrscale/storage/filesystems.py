"""File systems behind URLs, for fsspec, pyarrow and deltalake.

`faults` decides how often a request to S3 is tried. s3fs and botocore make one try each. pyarrow only accepts a number
of tries: it makes a few within a second, and `faults.patiently` repeats these.

All S3 clients use the store and keys that s3fs's session has resolved (`s3`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import fsspec

from ltrscale.errors import InputError
from ltrscale.storage.faults import named_errors
from ltrscale.storage.names import WEB, check_scheme, is_local

_S3_OPTIONS = {
    "use_listings_cache": False,
    "config_kwargs": {"retries": {"mode": "legacy", "total_max_attempts": 1}},
}


def filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a URL and the path on it; a plain path is local."""
    check_scheme(url, WEB)
    if is_local(url):  # as below, in a tenth of the time for thousands of small files
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
    from ltrscale.storage.s3 import arrow_client

    return arrow_client(_connection(url)), path


@contextmanager
def delta_options(url: str) -> Iterator[dict[str, str]]:
    """Storage options that let deltalake reach a URL as all other clients do, for use inside the block."""
    if not url.startswith("s3://"):
        yield {}
        return
    from ltrscale.storage import s3

    with s3.rust_options(_connection(url)) as options:
        yield options


def _connection(url: str) -> Any:
    fs, path = filesystem(url)
    with named_errors(url):
        return fs.connection(path.partition("/")[0])
