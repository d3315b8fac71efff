"""Resuming: when a run saves its state, which checkpoint it continues from, and what it keeps below `out` until then.

The previous checkpoint is kept until the next is committed; a damaged one is skipped.
"""

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from safetensors import SafetensorError

from ltrscale import storage
from ltrscale.config import Operational
from ltrscale.data.dataset.preflight import Preflight, PreflightConfig, checked, contents_of_read, difference, read_by
from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError, Stopped, UnavailableError
from ltrscale.origin import is_made_by
from ltrscale.progress import Report, log
from ltrscale.runtime import under_torchrun
from ltrscale.runtime.workers import ONE, Resized, WorkerContext, Workers, rank_and_world
from ltrscale.stages.stage import Origin, Stage
from ltrscale.storage import children, join, read_manifest, withdraw
from ltrscale.training.checkpoint import (
    Buffers,
    Progress,
    Snapshot,
    broadcast_snapshot,
    read_checkpoint,
    take,
    withdraw_checkpoint,
    write_checkpoint,
)
from ltrscale.training.loop import StepResult, Trainer
from ltrscale.training.reduce import from_rank_0

CHECKPOINTS, PREFLIGHT, TRANSFORM = "checkpoints", "preflight", "transform"
EPOCHS, STEPS, PROBES = "epochs", "steps", "probes"
_ALONE = WorkerContext()
FAILURES = 3
"""Failed writes of checkpoints in a row that end the run, as on a full disk."""
_FIRST_S = 60.0  # a run that ends early loses little, whatever `every_s` is
_KEPT_CHECKPOINTS = 2  # if the newest is damaged, a run resumes from the previous one


@dataclass(frozen=True)
class _Carried:
    """What rank 0 keeps in memory over a resize."""

    snapshot: Snapshot
    good: tuple[str, ...]
    """Committed checkpoints."""
    stale: frozenset[str]
    """Checkpoints to delete."""
    since: float
    """Time at the end of the last step."""


class Checkpoints:
    """The checkpoints of one run: saves them when they are due or the run must stop, and finds the one to resume from.

    All workers make the same calls after the same steps. Rank 0 copies the state to memory between two steps, and its
    writing thread saves the copy while training continues. Only one checkpoint is written at a time: the next is due
    once it is committed, at once if overdue. So training never waits for storage, and memory holds one copy.
    A context manager: leaving it waits for the write in progress.

    Args:
        origin: config and inputs of the run; checkpoints of other runs are left alone.
        data: hash of the selections that the run reads; a stream position is valid only for them.
        every_s: seconds from one checkpoint to the next; the first is due after a minute at the latest.
        worker: counts committed checkpoints, on rank 0 in the writing thread, and signals a stop or a resize.
    """

    def __init__(
        self,
        url: str,
        *,
        origin: Mapping[str, Any],
        data: str,
        every_s: float,
        worker: WorkerContext = _ALONE,
    ) -> None:
        self.url, self.origin, self.data = url, origin, data
        self.every_s, self.worker = every_s, worker
        self._first = rank_and_world()[0] == 0
        self._due_at = time.monotonic() + min(_FIRST_S, every_s)
        self._buffers = Buffers()
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._good: list[str] = []
        self._stale: set[str] = set()
        self._failed: list[str] = []
        self._is_outage = False
        """Whether the last write that failed met an outage."""
        self._paused_since: float | None = None
        """On rank 0: when the workers did the last step before a resize."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.shutdown()

    def newest(self) -> Snapshot | None:
        """The state in memory from before a resize, else the newest undamaged checkpoint of this run, or None.

        Only rank 0 reads it from storage, for all workers.
        """
        carried, snapshot = self.worker.carried, None
        if isinstance(carried, _Carried):
            self._good, self._stale, self._paused_since = list(carried.good), set(carried.stale), carried.since
            snapshot = carried.snapshot
        elif self._first:
            snapshot = self._choose()
        return broadcast_snapshot(snapshot)

    def _choose(self) -> Snapshot | None:
        """Read the newest undamaged checkpoint and remember it; deletes the remains of interrupted writes."""
        foreign = False
        for checkpoint in reversed(storage.children(self.url)):
            try:
                manifest = storage.read_manifest(checkpoint)
                if manifest is None:  # an interrupted write: the manifest comes last
                    withdraw_checkpoint(checkpoint)
                elif not (is_made_by(manifest, self.origin) and manifest.get("data") == self.data):
                    foreign = True
                elif self._good:
                    self._stale.add(checkpoint)
                else:
                    snapshot = read_checkpoint(checkpoint)
                    self._good.append(checkpoint)
            except InputError as error:
                log.warning("%s; trying the checkpoint before", error)
                self._stale.add(checkpoint)
        if foreign:
            log.warning(
                "%s: not resuming from the checkpoints there, which belong to another config or other data; they are "
                "deleted when this run has finished, or at once with --fresh",
                self.url,
            )
        if not self._good:
            return None
        log.info("resumed from %s", self._good[0])
        return snapshot

    def requests(self) -> tuple[bool, bool, bool]:
        """What a `Trainer` asks once per step: rank 0's clock says when a checkpoint is due, failed writes end all."""
        due = self._first and time.monotonic() >= self._due_at and not self._is_writing()
        return due, self.worker.stopping(), len(self._failed) >= FAILURES

    def after(self, result: StepResult, trainer: Trainer, progress: Progress) -> None:
        """Act on the result of a step: save, save and stop, or end a run that cannot save.

        Raises:
            Resized: the workers continue in a resized world, from the state of rank 0.
            Stopped: a worker was asked to stop; the checkpoint is committed.
            InputError: too many checkpoints in a row could not be written.
            UnavailableError: likewise, and the last one because of an outage.
        """
        step = progress.steps_before + trainer.state.step
        if self._paused_since is not None:
            workers = rank_and_world()[1]
            pause_s, self._paused_since = time.monotonic() - self._paused_since, None
            log.info("step %d is the first with %d workers, after a pause of %.1f s", step, workers, pause_s)
        if result.failed:
            raise self._cannot_save()
        if result.stopping and from_rank_0(self.worker.resizing()):
            self._wait()  # the write in progress uses the buffers and changes the lists below
            snapshot = take(trainer, progress, self._buffers)
            raise Resized(snapshot and _Carried(snapshot, tuple(self._good), frozenset(self._stale), time.monotonic()))
        if result.checkpoint_due or result.stopping:
            self._save(trainer, progress)
        if result.stopping:
            self._wait()
            raise self._stopped(step)

    def _cannot_save(self) -> InputError | UnavailableError:
        is_outage, message = from_rank_0(
            (
                self._is_outage,
                f"{self.url}: {len(self._failed)} checkpoints in a row could not be written "
                f"({'; '.join(self._failed[-1:])}); then the same command resumes from {self._from_where()}",
            )
        )
        return (UnavailableError if is_outage else InputError)(message)

    def _stopped(self, step: int) -> Stopped:
        written = f"not written ({self._failed[-1]})" if self._failed else f"written to {self.url}"
        return Stopped(
            from_rank_0(f"after step {step}, checkpoint {written}; the same command resumes from {self._from_where()}")
        )

    def _from_where(self) -> str:
        return self._good[-1].rsplit("/", 1)[-1] if self._good else "the beginning"

    def _save(self, trainer: Trainer, progress: Progress) -> None:
        self._wait()  # the write in progress reads the buffers that the next copy fills
        began = time.monotonic()
        snapshot = take(trainer, progress, self._buffers)
        if snapshot is None:
            return
        self._due_at = began + self.every_s  # not from the commit: slow storage must not delay the next
        self._writing = self._writer.submit(self._write, snapshot, time.monotonic() - began)

    def _is_writing(self) -> bool:
        if self._writing is not None and self._writing.done():
            self._wait()
        return self._writing is not None

    def _wait(self) -> None:
        """Wait for the write in progress; raises the writing thread's unexpected exceptions."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, snapshot: Snapshot, paused_s: float) -> None:
        """Commit a snapshot and delete old checkpoints, in the writing thread."""
        began = time.monotonic()
        target = storage.join(self.url, f"step-{snapshot.step:08d}")
        try:
            write_checkpoint(target, snapshot, origin=self.origin, data=self.data)
        except (InputError, UnavailableError, OSError, SafetensorError) as error:
            lost = isinstance(error, storage.LeaseLost)  # another process owns the output now: retrying is futile
            self._failed += [str(error)] * (FAILURES if lost else 1)
            self._is_outage = isinstance(error, UnavailableError)
            self._stale.add(target)
            log.warning(
                "checkpoint of step %d not written, %d in a row: %s; training continues",
                *(snapshot.step, len(self._failed), error),
            )
            return
        self._failed.clear()
        self._good.append(target)
        self.worker.progressed()
        took = time.monotonic() - began
        log.info(
            "checkpoint of step %d in %.1f s, for which training paused %.0f ms", snapshot.step, took, 1e3 * paused_s
        )
        self._prune()

    def _prune(self) -> None:
        """Delete this run's checkpoints except the newest good ones."""
        self._stale.update(self._good[:-_KEPT_CHECKPOINTS])
        self._good = self._good[-_KEPT_CHECKPOINTS:]
        self._stale.difference_update(self._good)
        try:
            for checkpoint in sorted(self._stale):
                withdraw_checkpoint(checkpoint)
                self._stale.remove(checkpoint)
        except (InputError, UnavailableError) as error:
            log.warning("%s; old checkpoints are left in place", error)


def _manifests(out: str) -> Iterator[dict[str, Any]]:
    """The manifests of the checkpoints below `out`, oldest first, without damaged ones: no run resumes from those."""
    for checkpoint in children(join(out, CHECKPOINTS)):
        manifest = None
        with suppress(InputError):
            manifest = read_manifest(checkpoint)
        if manifest is not None:
            yield manifest


def _is_unfinished(out: str, origin: Mapping[str, Any]) -> bool:
    """True if a run of this origin was interrupted and can resume from a checkpoint."""
    return any(is_made_by(manifest, origin) for manifest in _manifests(out))


def begin(
    splits: Mapping[str, Split], config: PreflightConfig, out: str, *, origin: Mapping[str, Any], report: Report
) -> Preflight:
    """Check the data of a run that starts or resumes in `out`; returns the result of the pre-flight.

    Raises:
        InputError: an interrupted run with the same settings has read other data; or as `checked`.
    """
    if not _is_unfinished(out, origin):
        for made_by in (manifest.get("made_by", {}) for manifest in _manifests(out)):
            changed = [url for url, value in _data_of(origin).items() if _data_of(made_by).get(url) != value]
            if changed and _settings_of(made_by) == _settings_of(origin):
                change = difference(read_by(join(out, PREFLIGHT)), contents_of_read(splits.values()))
                change = change or f"read other data than {changed[0]} holds now: restore that data to resume the run"
                raise InputError(f"{out}: the unfinished run there {change}, or start anew with --fresh")
    return checked(splits, config, join(out, PREFLIGHT), origin, report=report)


def _settings_of(origin: Mapping[str, Any]) -> Any:
    """Stage and config of a run, without its periods, which change as data arrives."""
    # a deep copy through JSON, because the caller's config must keep its periods
    plain = json.loads(json.dumps({"stage": origin.get("stage"), "config": origin.get("config", {})}))
    for split in plain["config"].get("splits", []):
        split["periods"] = []
    return plain


def _data_of(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Hashes of the data sets that a run read, and of the scores used as its labels."""
    splits = origin.get("config", {}).get("splits", [])
    urls = {url for split in splits for url in (*split["data"], split["scores"])}
    return {url: value for url, value in origin.get("inputs", {}).items() if url in urls}


def finish(out: str) -> None:
    """Remove files that are useless once the output is committed; keeps the pre-flight, which names the data read."""
    _withdraw(out, TRANSFORM)


def _start_anew(out: str) -> None:
    """Remove everything that a run left, so the next run starts from the beginning."""
    _withdraw(out, PREFLIGHT, TRANSFORM, EPOCHS, STEPS)


def _withdraw(out: str, *names: str) -> None:
    """Withdraw all checkpoints and probes, the directories with these names, and those directly inside them."""
    for checkpoint in children(join(out, CHECKPOINTS)):
        withdraw_checkpoint(checkpoint)
    for url in (join(out, name) for name in names):
        for directory in (*children(url), url):
            withdraw(directory)
    for probe in children(join(out, PROBES)):
        _start_anew(probe)
        withdraw(probe)
    for holder in (CHECKPOINTS, PROBES):  # the directories that held them
        withdraw_checkpoint(join(out, holder))


class TrainingStage(Stage):
    """A stage that resumes from checkpoints after an interruption, and whose training may have several workers."""

    workers: Operational[Workers] = ONE
    """Data-parallel workers; more than one run under Ray Train."""
    fresh: Operational[bool] = False
    """Start anew even if `out` is up to date; removes the checkpoints of an unfinished run."""

    def clear(self) -> None:
        """Remove checkpoints and everything else that a resume needs."""
        if self._starts_anew():
            _start_anew(self.out)

    def tidy(self) -> None:
        """Remove files that only a resume needs."""
        finish(self.out)

    def is_done(self, origin: Origin) -> bool:
        """True if the bundle is committed and no checkpoint of this origin is left to resume from."""
        if self._starts_anew() or _is_unfinished(self.out, origin):
            return False
        return super().is_done(origin)

    def recorded_as(self) -> Self:
        """The config without `fresh`, because repeating the run must not delete it."""
        return self.replace(fresh=False)

    def _starts_anew(self) -> bool:
        # torchrun restarts with the same command, but must resume the run
        return self.fresh and not under_torchrun.is_restarted()
