"""Stores behind URLs: file systems for fsspec, pyarrow and deltalake, and conditional puts on S3.

`faults` decides how often a request to S3 is tried. s3fs and botocore make one try each. pyarrow only accepts a number
of tries: it makes a few within a second, and `faults.patiently` repeats these. All S3 clients use the store and keys
that s3fs's session has resolved (`s3`).

Conditions keep two writers apart without a lock: S3 puts an object only if none exists (If-None-Match) or if it has a
given ETag (If-Match), and answers 412 otherwise. A probe, once per process and bucket, detects stores that ignore the
condition. Such stores cause a warning, and so do stores other than S3, which get no conditions.
"""

import functools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
from botocore.exceptions import ClientError  # type: ignore[import-untyped]

from ltrscale.errors import InputError
from ltrscale.storage import writers
from ltrscale.storage.faults import named_errors
from ltrscale.storage.names import WEB, check_scheme, is_local, join

_S3_OPTIONS = {
    "use_listings_cache": False,
    "config_kwargs": {"retries": {"mode": "legacy", "total_max_attempts": 1}},
}
DIGEST = "sha256"
"""The user metadata of an object with the hash of its content."""
_REFUSED = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_MISSING = ("NoSuchKey", "404")  # the answer to If-Match where the object was deleted meanwhile
_FIRST_PROBE = ".lease.probe"
_LARGEST_PUT = 5 * 2**30  # bytes; S3's limit for one request, and s3fs sends the condition with a single request only


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


def swap_if_unchanged(url: str, old: bytes | None, new: bytes | None) -> bool:
    """Replace `old` by `new` as `lease.swap` does; False also if the answer was lost."""
    fs, path = filesystem(url)
    if not heeds_conditions(url):
        with named_errors(url, "write"):
            if (fs.cat_file(path) if fs.exists(path) else None) != old:
                return False
            if new is None:
                fs.rm_file(path)
            else:
                fs.pipe_file(path, new)
            return True
    etag = stamp(url)
    with named_errors(url, "write", need=len(new or b"")):
        if (etag is None) != (old is None) or (etag is not None and fs.cat_file(path) != old):
            return False
        if new is None:
            bucket, key, _ = fs.split_path(path)
            return _accepted(lambda: fs.call_s3("delete_object", Bucket=bucket, Key=key, IfMatch=etag))
        return _accepted(lambda: fs.pipe_file(path, new, **_condition(etag)))


def put_file(local: Path, url: str, digest: str, stamp: str | None) -> bool:
    """Move a local file to a URL as `files.put_over` does."""
    fs, path = filesystem(url)
    condition = _condition(stamp) if heeds_conditions(url) else {}
    put = functools.partial(fs.put_file, str(local), path, chunksize=_LARGEST_PUT, Metadata={DIGEST: digest})
    with named_errors(url, "write", need=local.stat().st_size):
        return _accepted(lambda: put(**condition)) or describes(url, local.stat().st_size, digest)


def stamp(url: str) -> str | None:
    """The ETag of an object on S3, None if there is no object; always None on other stores."""
    if not url.startswith("s3://"):
        return None
    head = _head_object(url)
    return None if head is None else str(head["ETag"])


def describes(url: str, bytes_: int, digest: str) -> bool:
    """True if an object has this size and, on S3, this hash in its metadata."""
    if not url.startswith("s3://"):
        fs, path = filesystem(url)
        with named_errors(url):
            return bool(fs.exists(path)) and int(fs.size(path)) == bytes_
    head = _head_object(url)
    return head is not None and (head["ContentLength"], head["Metadata"].get(DIGEST)) == (bytes_, digest)


@functools.cache
def warn(store: str, what: str) -> None:  # noqa: ARG001 - once per store
    """Warn that the store cannot exclude a second writer."""
    logging.getLogger("ltrscale").warning("%s: run one writer of a directory at a time", what)


def clock_ahead_s(url: str) -> float:
    """Seconds by which the clock of S3 is ahead of this machine's, to about a second; the object must be there."""
    head = _head_object(url)
    date = head["ResponseMetadata"]["HTTPHeaders"].get("date") if head else None
    return parsedate_to_datetime(date).timestamp() - time.time() if date else 0.0


def _head_object(url: str) -> dict[str, Any] | None:
    fs, path = filesystem(url)
    bucket, key, _ = fs.split_path(path)
    with named_errors(url):
        try:
            return dict(fs.call_s3("head_object", Bucket=bucket, Key=key))
        except FileNotFoundError:
            return None


def _condition(etag: str | None) -> dict[str, str]:
    return {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}


def _accepted(put: Any) -> bool:
    """True if S3 accepted the request, False if it refused because of the condition."""
    try:
        put()
    except (OSError, ClientError) as error:
        of_s3 = error if isinstance(error, ClientError) else error.__cause__  # s3fs chains an OSError to it
        code = of_s3.response["Error"]["Code"] if isinstance(of_s3, ClientError) else ""
        if code in _REFUSED or code in _MISSING:
            return False
        raise
    return True


def heeds_conditions(url: str) -> bool:
    """True if the store respects conditions, so that two writers cannot overwrite each other unseen."""
    if not url.startswith("s3://"):
        scheme = url.partition("://")[0]
        warn(scheme, f"{scheme}:// has no conditional put that is used here")
        return False
    fs, path = filesystem(url)
    with named_errors(url, "write"):
        endpoint = fs.s3.meta.endpoint_url
    return _probe(url, fs.split_path(path)[0], endpoint)


_probed: dict[tuple[str, str], bool] = {}


def _probe(url: str, bucket: str, endpoint: str) -> bool:
    if (bucket, endpoint) not in _probed:
        folder, lease = url.rpartition("/")[0], writers.covering(url)
        # A probe of a killed process is found again: by its token, or before there is a lease by a name that is always
        # the same. That name another process may remove meanwhile, so it cannot show that conditions are ignored.
        heeds = lease is None and _heeds(join(folder, _FIRST_PROBE), url)
        token = writers.new_token() if lease is None else lease.token
        heeds = heeds or _heeds(join(folder, writers.staged_name("probe", token)), url)
        if not heeds:
            warn(endpoint, f"s3://{bucket} at {endpoint}: this store puts without heeding the condition")
        _probed[bucket, endpoint] = heeds
    return _probed[bucket, endpoint]


def _heeds(probe: str, url: str) -> bool:
    fs, path = filesystem(probe)
    with named_errors(url, "write"):  # the file that is about to be written
        fs.pipe_file(path, b"1")
        heeds = not _accepted(lambda: fs.pipe_file(path, b"2", IfNoneMatch="*"))
        heeds &= not _accepted(lambda: fs.pipe_file(path, b"3", IfMatch='"0"'))  # no object has this ETag
        fs.rm_file(path)
    return heeds
