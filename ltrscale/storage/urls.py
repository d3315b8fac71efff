"""URLs as text."""

from collections.abc import Collection
from pathlib import Path

from ltrscale.errors import InputError

SCHEMES = ("file", "s3", "gs", "gcs", "az", "abfs", "abfss", "hdfs")
"""The schemes that are read and written: stores of files, no archives, caches or chains of these."""
WEB = ("http", "https")
"""Further schemes for inputs, which may lie on a web server too."""


def is_local(url: str) -> bool:
    """Whether the URL is on this machine's disk."""
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> Path:
    """The path of a local URL."""
    return Path(url.removeprefix("file://"))


def absolute(url: str) -> str:
    """The URL, with a local path made absolute, so that processes with other working directories understand it."""
    return str(local_path(url).absolute()) if is_local(url) else url


def join(url: str, *parts: str) -> str:
    """Append path parts to a URL."""
    return "/".join([url.rstrip("/") or "/", *(part.strip("/") for part in parts)]) if parts else url


def check_scheme(url: str, also: Collection[str] = ()) -> None:
    """Check that a URL names a store of files, or has one of the schemes in `also`.

    Raises:
        InputError: it does not.

    Example:
        >>> check_scheme("s3://bucket/config.yaml")
    """
    scheme = url.partition("://")[0] if "://" in url else "file"
    # fsspec would chain file systems at "::", and take the text after `data:` for the content
    if scheme not in (*SCHEMES, *also) or "::" in url or url.startswith("data:"):
        known = ", ".join(f"{name}://" for name in SCHEMES[1:])
        raise InputError(f"{url}: not a path or URL that is read; use a local path, or one of {known}")
