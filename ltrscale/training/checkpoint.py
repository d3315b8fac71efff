"""Checkpoints: when a run saves its state, how it writes the state, and from which checkpoint it resumes.

A checkpoint is a committed directory, `checkpoints/step-00000120`, of safetensors files and a manifest. An interrupted
write is never committed, and so never read; a checkpoint with damaged content is skipped. The previous checkpoint is
kept until the next is committed.
"""

import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import safetensors.torch
from pydantic import Field
from safetensors import SafetensorError

from ltrscale import storage
from ltrscale.config import Config, is_made_by, validate
from ltrscale.errors import InputError, Stopped, UnavailableError
from ltrscale.progress import log
from ltrscale.runtime.workers import rank_and_world
from ltrscale.training.loop import StepResult, Trainer
from ltrscale.training.reduce import from_rank_0
from ltrscale.training.snapshot import Buffers, Progress, Snapshot, take

_FORMAT, _VERSION = "ltrscale-checkpoint", 2
_FIRST_S = 60.0  # a run that ends early, by Ctrl-C or a defect, has then lost little, whatever `every_s` is
_KEPT = 2  # should the newest prove damaged, a run resumes from the one before
_FILES = re.compile(r"[a-z_]+-[0-9a-f]{8}(-[0-9a-f]{8})?\.safetensors")


class _Content(Config, extra="ignore"):
    """The part of a checkpoint's manifest that `read_checkpoint` returns."""

    tensors: dict[str, str]
    """Names of the files, by kind."""
    state: dict[str, Any]
    progress: dict[str, Any]
    steps_before: int = Field(ge=0)


def write_checkpoint(url: str, snapshot: Snapshot, *, origin: Mapping[str, Any], data: str) -> None:
    """Commit a snapshot as a checkpoint.

    Args:
        url: directory of the checkpoint.
        snapshot: the state to save.
        origin: config and inputs of the run, as `ltrscale.config.made_by` returns them.
        data: hash of the selections that the run reads; stream positions depend on them.

    Raises:
        InputError: the checkpoint cannot be written.
    """
    files = {}
    with storage.Commit(url) as commit:
        for kind, tensors in snapshot.tensors.items():
            # named by content, so that a writer thought dead and its successor do not overwrite each other's files
            size = sum(value.nbytes for value in tensors.values())
            with commit.file(f"{kind}-{{hash}}.safetensors", size=size) as path:
                safetensors.torch.save_file({name: value.contiguous() for name, value in tensors.items()}, path)
            files[kind] = commit.files[-1].path
        commit.finish(
            {
                "format": _FORMAT,
                "version": _VERSION,
                "made_by": origin,
                "data": data,
                "tensors": files,
                "state": snapshot.state,
                "progress": snapshot.progress,
                "steps_before": snapshot.steps_before,
            }
        )


def read_checkpoint(checkpoint: str) -> Snapshot:
    """The content of a checkpoint, checked against the hashes in its manifest.

    Raises:
        InputError: the checkpoint is missing, damaged, or of another version of this package.
    """
    manifest = storage.read_manifest(checkpoint)
    if manifest is None:
        raise InputError(f"{checkpoint}: no checkpoint is committed there")
    if (manifest.get("format"), manifest.get("version")) != (_FORMAT, _VERSION):
        raise InputError(f"{checkpoint}: not a checkpoint of this version; start anew with --fresh")
    content = validate(_Content, manifest, storage.join(checkpoint, storage.MANIFEST))
    step = content.state.get("step")
    if type(step) is not int or step < 0:  # isinstance would let a bool pass
        raise InputError(f"{checkpoint}: its state has no step; remove it")
    tensors = {}
    for kind, name in content.tensors.items():
        try:
            tensors[kind] = safetensors.torch.load(storage.read_verified(checkpoint, name, manifest))
        except SafetensorError as error:
            raise InputError(f"{storage.join(checkpoint, name)}: damaged ({error})") from error
    return Snapshot(content.state, tensors, content.progress, content.steps_before)


def withdraw_checkpoint(checkpoint: str) -> None:
    """Delete a checkpoint, its manifest first, or the remains of an interrupted write."""
    storage.withdraw(checkpoint, _FILES)


def list_checkpoints(url: str) -> list[str]:
    """Committed checkpoints below `url`, oldest first."""
    return [child for child in storage.children(url) if storage.exists(storage.join(child, storage.MANIFEST))]


class Checkpoints:
    """The checkpoints of one run: saves them when they are due or the run must stop, and finds the one to resume from.

    All workers make the same calls after the same steps. Rank 0 copies the state to memory between two steps, and its
    writing thread saves the copy while training goes on. Only one checkpoint is written at a time: no other is due
    until it is committed, and one that fell due meanwhile follows at once. So training never waits for storage, and
    memory holds one copy. A context manager: leaving it waits for the write in progress.

    Args:
        url: directory of the checkpoints.
        origin: config and inputs of the run; checkpoints of other runs are left alone.
        data: hash of the selections that the run reads; a stream position means nothing in other data.
        every_s: seconds from one checkpoint to the next; the first is due after a minute at the latest.
        failures: failed writes in a row that end the run.
        progressed: called on rank 0, in the writing thread, when a checkpoint is committed.
    """

    def __init__(
        self,
        url: str,
        *,
        origin: Mapping[str, Any],
        data: str,
        every_s: float,
        failures: int,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        self.url, self.origin, self.data = url, origin, data
        self.every_s, self.failures, self.progressed = every_s, failures, progressed
        self._first = rank_and_world()[0] == 0
        self._due_at = time.monotonic() + min(_FIRST_S, every_s)
        self._buffers = Buffers()
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._good: list[str] = []
        self._stale: set[str] = set()
        self._failed: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.shutdown()

    def newest(self) -> Snapshot | None:
        """The newest undamaged checkpoint of this run; None if it has none.

        Rank 0 chooses, so that all workers resume from the same one.

        Raises:
            InputError: another worker does not see what rank 0 sees.
        """
        snapshot = self._choose() if self._first else None
        chosen = from_rank_0(self._good[-1] if self._good else None)
        if chosen is not None and snapshot is None:
            try:
                snapshot = read_checkpoint(chosen)
            except UnavailableError:
                raise
            except InputError as error:
                raise InputError(f"{error}; rank 0 can read it: put out on storage that all workers reach") from error
        return snapshot

    def _choose(self) -> Snapshot | None:
        """Read the newest undamaged checkpoint and remember it; the remains of interrupted writes are deleted."""
        foreign = False
        for checkpoint in reversed(storage.children(self.url)):
            try:
                manifest = storage.read_manifest(checkpoint)
                if manifest is None:  # an interrupted write, for the manifest comes last
                    withdraw_checkpoint(checkpoint)
                elif not self._is_ours(manifest):
                    foreign = True
                elif self._good:
                    self._stale.add(checkpoint)
                else:
                    snapshot = read_checkpoint(checkpoint)
                    self._good.append(checkpoint)
            except UnavailableError:  # the checkpoint may be undamaged: an older one would lose steps for nothing
                raise
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

    def _is_ours(self, manifest: Mapping[str, Any]) -> bool:
        return is_made_by(manifest, self.origin) and manifest.get("data") == self.data

    def due(self) -> bool:
        """Whether this worker asks for a checkpoint; only rank 0 does, by its own clock."""
        return self._first and time.monotonic() >= self._due_at and not self._is_writing()

    def failed(self) -> bool:
        """Whether too many writes in a row have failed on this worker."""
        return len(self._failed) >= self.failures

    def after(self, result: StepResult, trainer: Trainer, progress: Progress) -> None:
        """Act on the result of a step: save, save and stop, or end a run that cannot save.

        Raises:
            Stopped: a worker was asked to stop; the checkpoint is committed.
            InputError: too many checkpoints in a row could not be written.
        """
        if result.failed:
            raise InputError(
                from_rank_0(
                    f"{self.url}: {len(self._failed)} checkpoints in a row could not be written "
                    f"({'; '.join(self._failed[-1:])}); then the same command goes on from {self._from_where()}"
                )
            )
        if result.stopping:
            self._save(trainer, progress)
            self._wait()
            raise Stopped(from_rank_0(self._farewell(progress.steps_before + trainer.state.step)))
        if result.checkpoint_due:
            self._save(trainer, progress)

    def _farewell(self, step: int) -> str:
        written = f"not written ({self._failed[-1]})" if self._failed else f"written to {self.url}"
        return f"after step {step}, checkpoint {written}; the same command goes on from {self._from_where()}"

    def _from_where(self) -> str:
        return self._good[-1].rsplit("/", 1)[-1] if self._good else "the beginning"

    def _save(self, trainer: Trainer, progress: Progress) -> None:
        self._wait()  # the write in progress reads the buffers that the next copy fills
        began = time.monotonic()
        snapshot = take(trainer, progress, self._buffers)
        if snapshot is None:
            return
        name = f"step {snapshot.step} ({_place(trainer)})"
        self._due_at = began + self.every_s  # not from the commit: slow storage must not space checkpoints out
        self._writing = self._writer.submit(self._write, snapshot, name, time.monotonic() - began)

    def _is_writing(self) -> bool:
        if self._writing is not None and self._writing.done():
            self._wait()
        return self._writing is not None

    def _wait(self) -> None:
        """Wait for the write in progress; an unexpected exception of the writing thread is raised here."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, snapshot: Snapshot, name: str, paused_s: float) -> None:
        """Commit a snapshot and delete old checkpoints, in the writing thread."""
        began = time.monotonic()
        target = storage.join(self.url, f"step-{snapshot.step:08d}")
        try:
            write_checkpoint(target, snapshot, origin=self.origin, data=self.data)
        except (InputError, OSError, SafetensorError) as error:
            lost = isinstance(error, storage.LeaseLost)  # another process owns the output now: trying again is futile
            self._failed += [str(error)] * (self.failures if lost else 1)
            self._stale.add(target)
            log.warning(
                "checkpoint of %s not written, %d in a row: %s; training goes on", name, len(self._failed), error
            )
            return
        self._failed.clear()
        self._good.append(target)
        self.progressed()
        took = time.monotonic() - began
        log.info("checkpoint of %s in %.1f s, for which training paused %.0f ms", name, took, 1e3 * paused_s)
        self._prune()

    def _prune(self) -> None:
        """Delete this run's checkpoints except the newest good ones."""
        self._stale.update(self._good[:-_KEPT])
        self._good = self._good[-_KEPT:]
        self._stale.difference_update(self._good)
        try:
            for checkpoint in sorted(self._stale):
                withdraw_checkpoint(checkpoint)
                self._stale.remove(checkpoint)
        except InputError as error:
            log.warning("%s; old checkpoints are left in place", error)


def _place(trainer: Trainer) -> str:
    """Epoch, progress and loss of a trainer, for the log."""
    state = trainer.state
    share = min(1.0, state.account.groups / max(1, trainer.stream.groups_per_epoch))
    loss = f", loss {state.loss / state.count:.4g}" if state.count else ""
    return f"epoch {state.epoch + 1} of {trainer.epochs}, {share:.0%}{loss}"
