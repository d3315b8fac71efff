"""One epoch of training as a run sees it: steps reported, checkpoints saved, and a record of it all at the end."""

import resource
import sys
import time
from collections.abc import Mapping
from contextlib import closing

import torch

from ltrscale.launch.workers import rank_and_world
from ltrscale.progress import Advance, Report, log
from ltrscale.training.checkpoint import Checkpoints
from ltrscale.training.loop import State, Trainer
from ltrscale.training.reduce import gather_over_workers
from ltrscale.training.snapshot import Progress

Record = dict[str, object]
_NOTHING = Progress()


def run_epoch(
    trainer: Trainer,
    checkpoints: Checkpoints,
    *,
    report: Report,
    advance: Advance,
    progress: Progress = _NOTHING,
    labels: Mapping[str, object] | None = None,
) -> Record:
    """Run the rest of the current epoch.

    Args:
        trainer: at an epoch's start, or in the middle of one that it goes on with.
        checkpoints: saved to when a step says so.
        report: receives a record a step.
        advance: is told the documents of each step.
        progress: what the run adds to each checkpoint.
        labels: begin every record.

    Returns:
        The record of the epoch. Loss, groups, documents and checksum are those of the whole epoch, rates and waiting
        those since it was begun or resumed.

    Raises:
        Stopped: a worker was asked to stop, and a checkpoint is committed.
        InputError: training has diverged, or checkpoints cannot be written.
    """
    clock = _Clock(trainer)
    with closing(trainer.epoch()) as steps:
        for result in steps:
            advance(result.documents)
            report(
                {
                    **(labels or {}),
                    "step": progress.steps_before + trainer.state.step,
                    "loss": result.loss if result.count else None,
                    "documents": result.documents,
                    "wait_s": round(result.wait_s, 4),
                }
            )
            checkpoints.after(result, trainer, progress)
    done = trainer.past
    return {
        **(labels or {}),
        "epoch": done.epoch + 1,
        "loss": done.mean_loss if done.count else None,
        **done.account._asdict(),
        **clock.rates(done),
    }


class _Clock:
    """Measures an epoch, or what is left of one that is resumed."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.began, self.waited_s = trainer, time.monotonic(), trainer.waited_s
        self.documents = trainer.state.account.documents

    def rates(self, done: State) -> Record:
        """Speed, waiting and memory, for all workers together and for each; all workers call it."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        gpu = self.trainer.device.type == "cuda"
        gpu_bytes = torch.cuda.max_memory_allocated(self.trainer.device) if gpu else 0
        own = torch.tensor([(self.trainer.waited_s - self.waited_s) / seconds, gpu_bytes, _peak_bytes()])
        waiting, on_gpu, resident = gather_over_workers(own.double()).T.tolist()
        workers = [
            {
                "wait_percent": round(100 * waiting[rank], 2),
                "memory_gb": round(resident[rank] / 1e9, 3),
                **({"gpu_gb": round(on_gpu[rank] / 1e9, 3)} if gpu else {}),
            }
            for rank in range(rank_and_world()[1])
        ]
        return {
            "documents_per_s": round((done.account.documents - self.documents) / seconds),
            "wait_percent": round(100 * sum(waiting) / len(waiting), 2),
            "workers": workers,
        }


def _peak_bytes() -> int:
    """The most memory that this process has had resident so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class EpochLog:
    """Tells of epochs in the log: of the first and the last, and of others that end at least so many seconds apart.

    Args:
        label: begins each line.
        epochs: how many there are at most.
        exact: whether the trainer compares what an epoch has read with what it has to read.
    """

    EVERY_S = 10.0

    def __init__(self, label: str, epochs: int, *, exact: bool) -> None:
        self.label, self.epochs, self.exact = label, epochs, exact
        self._next = 0.0

    def __call__(self, record: Mapping[str, object], *, last: bool = False, more: str = "") -> None:
        """Log the record of an epoch; `more` ends the line."""
        now = time.monotonic()
        if now < self._next and not (last or record["epoch"] == self.epochs):
            return
        self._next = now + self.EVERY_S
        account = " (0 missed, 0 repeated)" if self.exact else ""  # the trainer would have raised otherwise
        loss = "" if record["loss"] is None else f", loss {record['loss']:.4g}"
        log.info(
            f"{self.label}, epoch {record['epoch']} of {self.epochs}: {record['groups']:,} groups{account}, "
            f"{record['documents']:,} documents, {record['documents_per_s']:,} documents/s, "
            f"waiting for data {record['wait_percent']:.1f}%{loss}{more}"
        )
