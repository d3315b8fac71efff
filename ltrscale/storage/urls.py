"""URLs as text."""

from pathlib import Path


def is_local(url: str) -> bool:
    """Whether the URL is on this machine's disk."""
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> Path:
    """The path of a local URL."""
    return Path(url.removeprefix("file://"))


def absolute(url: str) -> str:
    """The URL, a local path as one that means the same in another process's working directory."""
    return str(local_path(url).absolute()) if is_local(url) else url


def join(url: str, *parts: str) -> str:
    """Append path parts to a URL."""
    return "/".join([url.rstrip("/") or "/", *(part.strip("/") for part in parts)]) if parts else url
