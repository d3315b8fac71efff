"""What the end of a command means: done, to be given again, or a failure of the promises."""

import re
import signal
from collections.abc import Collection
from typing import Literal, NamedTuple

_TRACEBACK = "Traceback (most recent call last)"
_EXPLAINED = re.compile(
    r"check the network|overloaded|refused every retry"  # S3
    r"|disk full|[Nn]o space left"
    r"|workers died|worker|Ray|raylet|its process died"  # killed processes
    r"|no longer holds|changed by others"  # a lease that was taken over
    r"|another (writer|process|command|job)|meanwhile|is running|runs? (here|there|on)|held by|lease"  # two writers
)

_CUT_OFF = "Failed to get the system config from raylet because it is dead"
"""What Ray's core says before it ends a process whose raylet has died while it connected: nothing of ours runs then."""


class Verdict(NamedTuple):
    """The end of a command."""

    what: Literal["done", "again", "failure"]
    line: str
    """The last line of its output, or what is wrong."""


def judge(code: int, output: str, *, sent: Collection[signal.Signals], disturbed: bool) -> Verdict:
    """Judge how a command has ended.

    Args:
        code: its exit status, negative for a signal.
        output: what it has printed.
        sent: signals that this program has sent to the command's first process.
        disturbed: whether something has gone wrong since it was given, or another command worked on the same output.
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
        return Verdict("failure", f"exit status 2 without a line that says why: {last}")
    if not disturbed:
        return Verdict("failure", f"nothing was wrong, and yet: {error}")
    if not _EXPLAINED.search(error):
        return Verdict("failure", f"no fault explains this: {error}")
    return Verdict("again", error)
