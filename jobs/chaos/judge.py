"""Judge the end of a command: done, to be repeated, or a broken promise."""

import re
import signal
from collections.abc import Collection
from typing import Literal, NamedTuple

_TRACEBACK = "Traceback (most recent call last)"
_EXPLAINED = re.compile(
    r"check the network|overloaded|refused every retry"  # S3
    r"|disk full|[Nn]o space left"
    r"|workers died|worker|Ray|raylet|its process died"  # killed processes
    r"|no longer holds|changed by others"  # a lost lease
    r"|another (writer|process|command|job)|meanwhile|is running|runs? (here|there|on)|held by|lease"  # two writers
)

_CUT_OFF = "Failed to get the system config from raylet because it is dead"
"""Message of Ray's core before it ends a process whose raylet died while it connected; none of our code runs then."""


class Verdict(NamedTuple):
    """The end of a command."""

    what: Literal["done", "again", "failure"]
    line: str
    """The last line of its output, or the problem."""


def judge(code: int, output: str, *, sent: Collection[signal.Signals], disturbed: bool) -> Verdict:
    """Judge the end of a command.

    Args:
        code: its exit status, negative for a signal.
        output: its standard output and error.
        sent: signals that chaos has sent to the command's first process.
        disturbed: whether a fault was active since it started, or another command worked on the same output.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "(no output)"
    if _TRACEBACK in output:
        return Verdict("failure", f"a traceback, exit status {code}: {last}")
    if code == 0:
        return Verdict("done", last)
    if code == -signal.SIGKILL and signal.SIGKILL in sent:
        return Verdict("again", "killed")
    if code in (-signal.SIGTERM, 128 + signal.SIGTERM) and signal.SIGTERM in sent:
        return Verdict("again", last)
    if code == 1 and disturbed and _CUT_OFF in last:
        return Verdict("again", last)
    if code != 2:
        return Verdict("failure", f"exit status {code}: {last}")
    error = next((line for line in reversed(lines) if line.startswith("error: ")), "")
    if not error:
        return Verdict("failure", f"exit status 2 without an error line: {last}")
    if not disturbed:
        return Verdict("failure", f"an error without any fault: {error}")
    if not _EXPLAINED.search(error):
        return Verdict("failure", f"no fault explains this: {error}")
    return Verdict("again", error)
