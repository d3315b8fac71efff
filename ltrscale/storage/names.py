"""URLs as text, and names that a manifest lists, which are checked so that none leads out of its directory."""

import contextlib
import itertools
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from ltrscale.errors import InputError

SCHEMES = ("file", "s3", "gs", "gcs", "az", "abfs", "abfss", "hdfs")
"""The schemes that are read and written: file stores, but no archives, caches or chains of these."""
WEB = ("http", "https")
"""Further schemes for inputs, which may be on a web server."""


def is_local(url: str) -> bool:
    """True if the URL is on this machine's disk."""
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> Path:
    """The path of a local URL."""
    return Path(url.removeprefix("file://"))


def absolute(url: str) -> str:
    """Make a local path absolute, so that processes with other working directories understand it."""
    return str(local_path(url).absolute()) if is_local(url) else url


def join(url: str, *parts: str) -> str:
    """Append path parts to a URL.

    Example:
        >>> join("s3://bucket/runs/", "a", "b/"), join("/", "data")
        ('s3://bucket/runs/a/b', '/data')
    """
    return "/".join([url.rstrip("/"), *(part.strip("/") for part in parts)]) if parts else url


def check_scheme(url: str, also: Collection[str] = ()) -> None:
    """Check that a URL names a file store, or has one of the schemes in `also`.

    Raises:
        InputError: it does not.
    """
    scheme = url.partition("://")[0] if "://" in url else "file"
    # fsspec would chain file systems at "::", and treat the text after `data:` as content
    if scheme not in (*SCHEMES, *also) or "::" in url or url.startswith("data:"):
        readable = ", ".join(f"{name}://" for name in SCHEMES[1:])
        raise InputError(f"{url}: not a path or URL that is read; use a local path, or one of {readable}")


_PART_BYTES, _PATH_BYTES = 255, 1024
_PATTERNS = set("\\*?[]")
"""Characters that file systems read as a separator or a pattern: deleting a pattern would delete all its matches."""
_RESERVED = {"manifest.json", "_manifest.json"}
RUN, HIDDEN_RUN = "run", "_run"
"""The directory of a job's own log, which no manifest owns; the second is for directories that other programs read."""
_SHOWN = 100


def listed_path(text: str) -> str:
    """Return the text if it can be the path of a file below the directory that lists it.

    Raises:
        ValueError: it cannot; names the fault.

    Example:
        >>> listed_path("period=2026-W07/part-0.parquet")
        'period=2026-W07/part-0.parquet'
        >>> listed_path("../precious")
        Traceback (most recent call last):
        ValueError: '../precious' cannot be the path of a listed file: a part is '..'
    """
    if _PLAIN.fullmatch(text):
        return text
    parts = text.split("/")
    fault = next(filter(None, map(_part_fault, parts)), None)
    if fault is None and len(text.encode()) > _PATH_BYTES:
        fault = f"longer than {_PATH_BYTES} bytes"
    if fault is None and (parts[0] in (RUN, HIDDEN_RUN) or _RESERVED.intersection(parts)):
        fault = "it is reserved"
    if fault:
        raise ValueError(f"{text[:_SHOWN]!r} cannot be the path of a listed file: {fault}")
    return text


_FOLDER = r"(?!_?manifest\.json/)[A-Za-z0-9=_-][A-Za-z0-9=_.:+-]{0,199}/"
_PLAIN = re.compile(rf"(?!run/|_run/)({_FOLDER}){{0,4}}part-[A-Za-z0-9_.-]{{1,200}}")
"""Paths as writers make them, which are all valid."""


def period_name(text: str) -> str:
    """Return the text if it can be the name of a period, which is also the name of a directory.

    Raises:
        ValueError: it cannot; names the fault.
    """
    fault = "it has a '/'" if "/" in text else _part_fault(text, f"period={text}")
    if fault:
        raise ValueError(f"{text[:_SHOWN]!r} cannot be the name of a period: {fault}")
    return text


def _part_fault(part: str, on_disk: str = "") -> str | None:
    """Why a text cannot be one part of a path; None if it can."""
    if not part:
        return "a part is empty"
    if part[0] == ".":
        return f"a part is {part[:_SHOWN]!r}" if part in (".", "..") else "a part begins with '.'"
    if not part.isprintable() or _PATTERNS.intersection(part):
        return "it has a control character or one of \\ * ? [ ]"
    return f"a part is longer than {_PART_BYTES} bytes" if len((on_disk or part).encode()) > _PART_BYTES else None


def listed_file(url: str, name: str) -> str:
    """The URL of a file that a directory's manifest lists.

    The directory itself may be reached through a symlink; the file must be below the directory that this leads to.

    Raises:
        InputError: a symlink on a local disk leads out of the directory.
    """
    path = join(url, name)
    if is_local(url):
        root = os.path.realpath(local_path(url))
        if not os.path.realpath(local_path(path)).startswith(root.rstrip("/") + "/"):
            raise InputError(f"{path}: a symlink leads out of {url}; put the file itself there")
    return path


def check_links(url: str, names: Sequence[str]) -> None:
    """Check the files that a directory's manifest lists like `listed_file`, one folder at a time.

    Raises:
        InputError: a symlink on a local disk leads out of the directory.
    """
    if is_local(url):
        links = _links(url.removeprefix("file://"), {name.rpartition("/")[0] for name in names})
        for name in names if links else ():
            if name in links or name.rpartition("/")[0] in links:
                listed_file(url, name)


def _links(root: str, folders: Collection[str]) -> set[str]:
    """The symlinks in folders below a directory, and the folders reached through a symlink, by name."""
    links = set[str]()
    for folder in folders:
        above = itertools.accumulate(folder.split("/") if folder else [], lambda path, part: f"{path}/{part}")
        if any(os.path.islink(f"{root}/{path}") for path in above):  # noqa: PTH114 - pathlib takes four times as long
            links.add(folder)
        with contextlib.suppress(OSError), os.scandir(f"{root}/{folder}") as entries:
            links.update(f"{folder}/{entry.name}".lstrip("/") for entry in entries if entry.is_symlink())
    return links
