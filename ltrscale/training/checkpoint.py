"""Checkpoints: everything that an exact resume needs, as committed directories.

A checkpoint, `checkpoints/step-00000120`, holds safetensors files (weights, buffers, the optimizer's moments) and a
manifest with plain data. An interrupted write is never committed, so never read; damage is detected. The learning rate
and random generators are functions of the step and the seed, so they are not saved.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import safetensors.torch
import torch
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor

from ltrscale import storage
from ltrscale.config import Strict, validate
from ltrscale.data.stream.windows import Position
from ltrscale.errors import InputError
from ltrscale.runtime.workers import rank_and_world
from ltrscale.training.feed import Account
from ltrscale.training.loop import State, Stream, Trainer
from ltrscale.training.reduce import broadcast, from_rank_0, sum_over_workers

_FORMAT, _VERSION = "ltrscale-checkpoint", 2
_TENSOR_FILES = re.compile(r"[a-z_]+-([0-9a-f]{8})(?:-[0-9a-f]{8})?\.safetensors")
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Progress:
    """What the run adds to the trainer's state: plain data, and tensors that no longer change."""

    steps_before: int = 0
    """Steps of earlier phases."""
    place: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensors] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """The state of a trainer after a step, with the progress of the run."""

    state: Mapping[str, Any]
    """The trainer's step, epoch, sums of the epoch and expected sums, stream positions, and optimizer settings."""
    tensors: Mapping[str, Tensors]
    """`weights`, `optimizer`, and the tensors of the run's progress."""
    progress: Mapping[str, Any]
    """Plain data of the run's progress."""
    steps_before: int = 0
    """Steps of earlier phases."""

    @property
    def step(self) -> int:
        """Steps of the whole run so far."""
        return int(self.steps_before + self.state["step"])

    def map(self, function: Callable[[Tensor], Tensor]) -> "Snapshot":
        """The snapshot with a function applied to each tensor."""
        tensors = {kind: {n: function(value) for n, value in of_kind.items()} for kind, of_kind in self.tensors.items()}
        return replace(self, tensors=tensors)


class Buffers:
    """Reusable CPU memory for copies of tensors: allocating costs more than copying."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Tensor] = {}

    def copy(self, kind: str, tensors: Tensors) -> dict[str, Tensor]:
        """A copy of the tensors, valid until the next copy of the same kind."""
        copies = {name: self._buffer(kind, name, value) for name, value in tensors.items()}
        for name, value in tensors.items():
            copies[name].copy_(value.detach(), non_blocking=True)
        for device in {value.device for value in tensors.values() if value.is_cuda}:  # the copies are asynchronous
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _buffer(self, kind: str, name: str, value: Tensor) -> Tensor:
        held = self._held.get((kind, name))
        if held is None or (held.shape, held.dtype) != (value.shape, value.dtype):
            held = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._held[kind, name] = held
        return held


def take(trainer: Trainer, progress: Progress, buffers: Buffers) -> Snapshot | None:
    """The snapshot after a step on rank 0, valid until the next one into these buffers; None on the other ranks."""
    state, auxiliary = trainer.state, trainer.auxiliary
    positions = _all_positions(trainer.stream, state.positions)  # a collective: all workers must take part
    extra = {}
    if auxiliary is not None:
        of_auxiliary = _all_positions(auxiliary.stream, auxiliary.positions)
        extra["auxiliary"] = {"epoch": auxiliary.epoch, "positions": of_auxiliary}
    if rank_and_world()[0] != 0:
        return None
    groups, moments = optimizer_state(trainer.optimizer)
    return Snapshot(
        state={
            **vars(state),
            "account": list(state.account),
            "positions": positions,
            "expected": trainer.expected and list(trainer.expected),
            "optimizer": groups,
            **extra,
        },
        tensors={
            "weights": buffers.copy("weights", trainer.model.state_dict()),
            "optimizer": buffers.copy("optimizer", moments),
            **progress.tensors,
        },
        progress=dict(progress.place),
        steps_before=progress.steps_before,
    )


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The settings of its groups, and its tensors by `parameter.key`; `parameter` is the parameter's index."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    moments = {
        f"{index}.{key}": torch.as_tensor(value)
        for index, values in optimizer.state_dict()["state"].items()
        for key, value in values.items()
    }
    return groups, moments


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]], tensors: Tensors) -> None:
    """Restore an optimizer from the result of `optimizer_state`."""
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".")
        moments.setdefault(int(index), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]  # has the parameters' indices, which snapshots omit
    for group, settings in zip(groups, saved, strict=True):
        group.update(settings)
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _all_positions(stream: Stream, positions: Mapping[int, Position]) -> dict[str, list[int]]:
    """The stream positions of all workers, gathered by a sum over disjoint rows; empty at the start of an epoch."""
    rows = torch.zeros(stream.config.streams, 1 + len(Position()), dtype=torch.int64)
    for c, position in positions.items():
        rows[c] = torch.tensor([1, *position])
    return {str(c): row[1:] for c, row in enumerate(sum_over_workers(rows).tolist()) if row[0]}


def _positions(saved: Mapping[str, Sequence[int]], stream: Stream) -> dict[int, Position]:
    """The positions of this worker's streams; a stream without one has no groups."""
    return {c: Position(*saved.get(str(c), Position())) for c in stream.streams} if saved else {}


def broadcast_snapshot(snapshot: Snapshot | None) -> Snapshot | None:
    """Rank 0's snapshot (or None) on all workers.

    The tensors are sent one by one, so no worker holds all of them twice.
    """
    outline = from_rank_0(snapshot and snapshot.map(lambda value: value.to("meta")))
    if outline is None:
        return None
    received = snapshot or outline.map(lambda value: torch.empty_like(value, device="cpu"))
    return received.map(broadcast)


def restore(trainer: Trainer, snapshot: Snapshot) -> None:
    """Restore a trainer from a snapshot, which a different number of workers may have taken."""
    trainer.model.load_state_dict(dict(snapshot.tensors["weights"]))
    saved = snapshot.state
    restore_optimizer(trainer.optimizer, saved["optimizer"], snapshot.tensors["optimizer"])
    counts = {name: saved[name] for name in ("epoch", "step", "loss", "count")}
    positions = _positions(saved["positions"], trainer.stream)
    trainer.state = State(**counts, account=Account(*saved["account"]), positions=positions)
    if trainer.auxiliary is not None:
        auxiliary, of_auxiliary = saved["auxiliary"], trainer.auxiliary
        of_auxiliary.epoch = auxiliary["epoch"]
        of_auxiliary.positions = _positions(auxiliary["positions"], of_auxiliary.stream)


class _CheckpointManifest(Strict, extra="ignore"):
    """The part of a checkpoint's manifest that `read_checkpoint` returns."""

    tensors: dict[str, str]
    """Names of the files, by kind."""
    state: dict[str, Any]
    progress: dict[str, Any]
    steps_before: int = Field(ge=0)


def write_checkpoint(url: str, snapshot: Snapshot, *, origin: Mapping[str, Any], data: str) -> None:
    """Commit a snapshot as a checkpoint.

    `data` is the hash of the selections that the run reads, on which stream positions depend.

    Raises:
        InputError: the checkpoint cannot be written.
    """
    files = {}
    with storage.Commit(url) as commit:
        for kind, tensors in snapshot.tensors.items():
            # named by content: a writer thought dead and its successor must not overwrite each other's files
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
        InputError: the checkpoint is missing, damaged, or from another version of this package.
    """
    manifest = storage.read_manifest(checkpoint)
    if manifest is None:
        raise InputError(f"{checkpoint}: no checkpoint is committed there")
    if (manifest.get("format"), manifest.get("version")) != (_FORMAT, _VERSION):
        raise InputError(f"{checkpoint}: not a checkpoint of this version; start anew with --fresh")
    content = validate(_CheckpointManifest, manifest, storage.join(checkpoint, storage.MANIFEST))
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
    storage.withdraw(checkpoint, _TENSOR_FILES)


def list_checkpoints(url: str) -> list[str]:
    """Committed checkpoints below `url`, oldest first."""
    return [child for child in storage.children(url) if storage.exists(storage.join(child, storage.MANIFEST))]
