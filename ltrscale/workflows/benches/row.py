"""Row: one measured ratio and the goal it is held against."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line of the benchmark table: a ratio measured in one run, and its goal.

    `at_least` says on which side of the goal the ratio should be, if there is one; `ours` and `peer` are what was
    measured, with units. Without a ratio nothing was measured, and the note says why.
    """

    name: str
    ratio: float | None
    goal: float | None
    at_least: bool
    ours: str
    peer: str
    note: str = ""
