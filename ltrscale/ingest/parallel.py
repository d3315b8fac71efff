"""Processes the units of an input in tasks of a Ray cluster; the output is the same as from one process.

Each unit is read twice. First, a survey counts its kept groups and hashes its query ids. From the surveys so far, the
driver computes the unit's first gid and which of its query ids occurred before. Then the unit is written. Surveys run a
bounded number of units ahead, and results are taken in unit order, so the driver's memory does not grow with the number
of units. Tasks put finished files in place themselves; the driver takes them over and commits.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ltrscale import storage
from ltrscale.arrays import Bits
from ltrscale.data.dataset.files import Counts, total_of
from ltrscale.data.ids import QueryIds
from ltrscale.ingest.assembly import Survey, Written, silent, survey_unit, write_unit
from ltrscale.ingest.inputs import Unit, UnitSettings
from ltrscale.progress import Advance
from ltrscale.runtime.engine import plain_errors

_PATIENCE_S = 30.0
_TASKS_A_CPU = 2
_AHEAD = 2
"""Units in progress per task that may run."""
_REMEDY = "lower unit_mb or sort_memory, or give Ray fewer CPUs"


class Call(NamedTuple):
    """A call to make in a task; `done` receives its result, and `name` is its input's name, for errors."""

    function: Callable[[], Any]
    name: str
    done: Callable[[Any], None]


class _WrittenUnit(NamedTuple):
    """The result of a task: the written unit, its placed files, and the ids that only rejected rows have."""

    written: Written
    placed: tuple[storage.Placed, ...]
    lost_ids: Bits


@dataclass
class UnitsOnRay:
    """The calls that write units, for `run_tasks`; planned units come before surveys of others, so that few wait.

    The fields are the arguments of `write_units`.
    """

    settings: UnitSettings
    units: Sequence[Unit]
    before: Counts
    commit: storage.Commit
    ids: QueryIds
    advance: Advance
    take: Callable[[Written], None]

    def __post_init__(self) -> None:
        self.settings = replace(self.settings, out=storage.absolute(self.settings.out))
        single = len(self.units) == 1 and not len(self.ids.groups)  # needs no survey
        self._share = 1.0 if single else 0.5  # of the bytes, for each pass
        self._planned = deque([self._write(0, self.before, np.empty(0, np.uint64))] if single else [])
        self._to_survey, self._to_plan, self._to_take = len(self.units) if single else 0, 0, 0
        self._surveys: dict[int, Survey] = {}
        self._written: dict[int, _WrittenUnit] = {}
        self._ahead = _AHEAD * _most_tasks()

    def following(self) -> Call | None:
        """The next call; None if there is nothing to do until another call ends."""
        while (survey := self._surveys.pop(self._to_plan, None)) is not None:
            self._planned.append(self._plan(self._to_plan, survey))
            self._to_plan += 1
        while (unit := self._written.pop(self._to_take, None)) is not None:
            self.ids.unread.add(unit.lost_ids)
            self.take(unit.written)
            self._to_take += 1
        if self._planned:
            return self._planned.popleft()
        i = self._to_survey
        if i == len(self.units) or i >= self._to_take + self._ahead:
            return None
        self._to_survey += 1
        read = partial(_survey, self.settings, self.units[i])
        return Call(read, str(self.units[i]), partial(self._surveyed, i))

    def _plan(self, i: int, survey: Survey) -> Call:
        """The call that writes a unit; its groups with new query ids determine where the next unit starts."""
        back_Q, others_back_Q = self.ids.groups.add(survey.kept_Q), self.ids.groups.add(survey.others_Q)
        returning = np.concatenate([survey.kept_Q[back_Q], survey.others_Q[others_back_Q]])
        before = self.before
        self.before = total_of([before, (int((~back_Q).sum()), int(survey.documents_Q[~back_Q].sum()), 0)])
        return self._write(i, before, returning)

    def _write(self, i: int, before: Counts, returning: Bits) -> Call:
        write = partial(_write, self.settings, self.units[i], before, returning)
        return Call(write, str(self.units[i]), partial(self._wrote, i))

    def _surveyed(self, i: int, survey: Survey) -> None:
        self._surveys[i] = survey
        self.advance(survey.rows, self.units[i].bytes * self._share)

    def _wrote(self, i: int, unit: _WrittenUnit) -> None:
        self.commit.adopt(unit.placed)  # at once, so that these files are deleted if another unit fails
        self._written[i] = unit
        self.advance(unit.written.accounting.rows_in, self.units[i].bytes * self._share)


def _survey(settings: UnitSettings, unit: Unit) -> Survey:
    with storage.scratch.directory() as folder:
        return survey_unit(settings, unit, folder=folder)


def _write(settings: UnitSettings, unit: Unit, before: Counts, returning: Bits) -> _WrittenUnit:
    """The task of the second pass."""
    with storage.scratch.directory() as folder, storage.Commit(settings.out, helping=True) as commit:
        ids = QueryIds(folder)
        ids.groups.add(returning)
        written = write_unit(settings, unit, before, commit=commit, ids=ids, folder=folder, advance=silent)
        return _WrittenUnit(written, commit.leave(), ids.lost())


def each_done(calls: Iterable[Call], *, ray: bool) -> None:
    """Make calls, in tasks of the Ray cluster or here, in any order."""
    if ray:
        following = iter(calls)
        run_tasks(lambda: next(following, None))
        return
    for call in calls:
        call.done(call.function())


def _most_tasks() -> int:
    import ray  # many processes never use Ray

    return _TASKS_A_CPU * max(1, int(ray.cluster_resources().get("CPU", 1)))


def run_tasks(following: Callable[[], Call | None]) -> None:
    """Make calls in Ray tasks of one CPU until `following` has none and all have ended; it may have more by then."""
    # As many tasks run as keep the cluster busy, and Ray repeats one whose process dies. If one fails, the others are
    # stopped, and the results of those that have ended are still received, in this thread.
    import ray

    task = ray.remote(num_cpus=1)(_in_task)
    running: dict[Any, Call] = {}
    limit = _most_tasks()
    try:
        while True:
            while len(running) < limit and (call := following()) is not None:
                running[task.remote(call.function, storage.share_leases())] = call
            if not running:
                return
            (ready,), _ = ray.wait(list(running), num_returns=1)
            call = running.pop(ready)
            with plain_errors(f"{call.name}: the process that handled it", _REMEDY):
                result = ray.get(ready)
            call.done(result)
    finally:
        for each in running:
            ray.cancel(each)
        ended, _ = ray.wait(list(running), num_returns=len(running), timeout=_PATIENCE_S) if running else ([], [])
        for each in ended:
            try:
                result = ray.get(each)
            except Exception:  # cancelled, or failed as well: the first failure is the one to report
                continue
            running[each].done(result)


def _in_task(function: Callable[[], Any], leases: tuple[storage.Lease, ...]) -> Any:
    storage.join_leases(leases)
    return function()
