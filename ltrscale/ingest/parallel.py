"""Handles the units of an input in tasks of a Ray cluster; the output is the same as that of one process.

There are two passes. A survey counts the groups that each unit keeps and hashes its query ids; from these the driver
computes each unit's first gid and which of its query ids occur in earlier units. Then each unit is written. Tasks put
finished files in place themselves; the driver takes them over and commits.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ltrscale import storage
from ltrscale.data.ids import QueryIds
from ltrscale.ingest.assembly import Survey, Written, silent, survey_unit, write_unit
from ltrscale.ingest.inputs import Unit, UnitSettings, UnitStart
from ltrscale.progress import Advance
from ltrscale.runtime.engine import plain_errors, ray_cluster

_PATIENCE_S = 30.0
_TASKS_A_CPU = 2
_REMEDY = "lower unit_mb or sort_memory, or give Ray fewer CPUs"


class _Plan(NamedTuple):
    """A unit's start, and its query ids that earlier units have."""

    start: UnitStart
    returning: NDArray[np.uint64]


class _WrittenUnit(NamedTuple):
    """The result of a task: the unit written, the files put in place, and the ids that only rejected rows have."""

    written: Written
    placed: tuple[storage.Placed, ...]
    lost_ids: NDArray[np.uint64]


def write_with_ray(
    work: UnitSettings,
    units: Sequence[Unit],
    start: UnitStart,
    *,
    commit: storage.Commit,
    ids: QueryIds,
    advance: Advance,
) -> list[Written]:
    """Write all units in tasks of the Ray cluster that this process is connected to, or else of a new one.

    The arguments are those of `write_unit`. A single unit without earlier query ids needs no survey.

    Raises:
        InputError: as `write_unit`, from the first task that fails; or a task's process dies again and again.
    """
    work = replace(work, out=storage.absolute(work.out))
    single = len(units) == 1 and not len(ids.groups)
    share = 1.0 if single else 0.5  # of the bytes, for each pass
    surveys: dict[int, Survey] = {}
    done: dict[int, _WrittenUnit] = {}

    def surveyed(i: int, survey: Survey) -> None:
        surveys[i] = survey
        advance(survey.rows, units[i].bytes * share)

    def written(i: int, unit: _WrittenUnit) -> None:
        commit.adopt(unit.placed)
        done[i] = unit
        advance(unit.written.accounting.rows_in, units[i].bytes * share)

    names = [str(unit) for unit in units]
    with ray_cluster(1):
        plans = [_Plan(start, np.empty(0, np.uint64))]
        if not single:
            run_tasks(_survey, [(work, unit) for unit in units], names, surveyed)
            plans = list(_plans((surveys.pop(i) for i in range(len(units))), start, ids))
        leases = storage.held()
        calls = [(work, unit, *plan, leases) for unit, plan in zip(units, plans, strict=True)]
        run_tasks(_write, calls, names, written)
    for i in range(len(units)):
        ids.unread.add(done[i].lost_ids)
    return [done[i].written for i in range(len(units))]


def _plans(surveys: Iterable[Survey], start: UnitStart, ids: QueryIds) -> Iterator[_Plan]:
    """Prefix sums over the units, without the groups whose query id an earlier unit has."""
    gid, documents = start.gid, start.documents
    for survey in surveys:
        back_Q, others_back_Q = ids.groups.add(survey.kept_Q), ids.groups.add(survey.others_Q)
        returning = np.concatenate([survey.kept_Q[back_Q], survey.others_Q[others_back_Q]])
        yield _Plan(UnitStart(gid, documents), returning)
        gid += int((~back_Q).sum())
        documents += int(survey.documents_Q[~back_Q].sum())


def _survey(work: UnitSettings, unit: Unit) -> Survey:
    """The task of the first pass."""
    with storage.scratch.directory() as folder:
        return survey_unit(work, unit, folder=folder)


def _write(
    work: UnitSettings, unit: Unit, start: UnitStart, returning: NDArray[np.uint64], leases: tuple[storage.Lease, ...]
) -> _WrittenUnit:
    """The task of the second pass."""
    storage.join_leases(leases)
    with (
        storage.scratch.directory() as folder,
        storage.Commit(work.out, part=True) as commit,
    ):
        ids = QueryIds(folder)
        ids.groups.add(returning)
        written = write_unit(work, unit, start, commit=commit, ids=ids, folder=folder, advance=silent)
        return _WrittenUnit(written, commit.leave(), ids.lost())


def run_tasks(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    names: Sequence[str],
    done: Callable[[int, Any], None],
) -> None:
    """Call a function once for each of `calls` in Ray tasks of one CPU; `done` receives each result with its number.

    At most as many tasks run as keep the cluster busy. Ray repeats a task whose process dies. If one fails the others
    are stopped; `done` still receives the results of those that have finished. It is called in this thread, in the
    order in which calls end. `names` are those of the calls' inputs, for errors.

    Raises:
        InputError: a call raised one, or its process died more often than Ray repeats it.
    """
    import ray  # imported late: many processes never use Ray

    remote = ray.remote(num_cpus=1)(function)
    waiting = deque(enumerate(calls))
    running: dict[Any, int] = {}
    limit = _TASKS_A_CPU * max(1, int(ray.cluster_resources().get("CPU", 1)))
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                i, arguments = waiting.popleft()
                running[remote.remote(*arguments)] = i
            (ready,), _ = ray.wait(list(running), num_returns=1)
            i = running.pop(ready)
            with plain_errors(f"{names[i]}: the process that handled it", _REMEDY):
                result = ray.get(ready)
            done(i, result)
    finally:
        for task in running:
            ray.cancel(task)
        ended, _ = ray.wait(list(running), num_returns=len(running), timeout=_PATIENCE_S) if running else ([], [])
        for task in ended:
            try:
                result = ray.get(task)
            except Exception:  # cancelled, or failed as well: the first failure is the one to report
                continue
            done(running[task], result)
