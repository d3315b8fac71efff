"""Who writes where: the leases that this process holds or acts for, and names that carry a writer's token.

Only its token identifies what a dead writer has left. No other name is proof: anybody may call a file
`.labels.20261127`, but nobody else draws the token of a lease.
"""

import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from ltrscale.storage.names import absolute, is_local


@dataclass(frozen=True)
class Lease:
    """The right to write below a directory; `url` is absolute."""

    url: str
    token: str


HELD: dict[str, Lease] = {}
"""The leases that this process holds or acts for, by `place`."""
SHARED: set[str] = set()
"""The places of leases that `share_leases` has given to other processes."""


def share_leases() -> tuple[Lease, ...]:
    """The leases that this process holds or acts for, to be joined by a process that it starts elsewhere."""
    SHARED.update(HELD)
    return tuple(HELD.values())


def is_held(url: str) -> bool:
    """True if this process holds the lease of exactly this directory, or acts for its holder."""
    return place(url) in HELD


def join_leases(leases: Iterable[Lease]) -> None:
    """Act for the holder of these leases, in a process that the holder has started."""
    HELD.update((lease.url, lease) for lease in leases)


def covering(url: str) -> Lease | None:
    """The lease of the nearest directory at or above `url` that this process holds or acts for."""
    url = place(url)
    above = [lease for lease in HELD.values() if f"{url}/".startswith(f"{lease.url}/")]
    return max(above, key=lambda lease: len(lease.url), default=None)


def place(url: str) -> str:
    """A canonical spelling of a directory, so that different ways to write a path compare equal."""
    return str(Path(absolute(url)).resolve()) if is_local(url) else url.rstrip("/")


def token_at(url: str) -> str:
    """The token of the lease that covers a URL; a new token if there is none."""
    lease = covering(url)
    return new_token() if lease is None else lease.token


def new_token() -> str:
    """A token that no other writer has."""
    return secrets.token_hex(4)


def is_token(text: object) -> bool:
    """True if this can be a token."""
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{8}", text) is not None


def staged_name(name: str, token: str) -> str:
    """The temporary name of a small file until it is renamed."""
    return f".{name}.{token}-{secrets.token_hex(4)}"


def staging_name(token: str) -> str:
    """The name of the folder with a commit's files until they are renamed."""
    return f".staging-{token}-{secrets.token_hex(4)}"


def left_by(tokens: Collection[str]) -> re.Pattern[str]:
    """A pattern for what writers with these tokens have left: names of files and staging folders below a directory.

    Example:
        >>> left = left_by(["0a1b2c3d"])
        >>> [bool(left.search(name)) for name in ("a/part-2cf24dba-0a1b2c3d.txt", "a/part-2cf24dba-20261127.txt")]
        [True, False]
    """
    # tokens come from a file that others may have written; `(?!)` matches nothing
    token = f"({'|'.join(filter(is_token, tokens)) or '(?!)'})"
    drawn = "[0-9a-f]{8}"
    names = (rf"[^/]*{drawn}-{token}(\.\w+)?$", rf"\.[^/]+\.{token}-{drawn}$", rf"\.staging-{token}-{drawn}(/|$)")
    return re.compile(rf"(^|/)({'|'.join(names)})")
