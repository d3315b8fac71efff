"""The shares of several workers that train trees, and their messages; with one worker every function is the identity.

A worker bins its share of the training groups and all validation groups. Libraries exchange histograms by themselves,
and need the addresses of all workers.
"""

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ltrscale.arrays import Doubles
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream import plan
from ltrscale.errors import InputError
from ltrscale.runtime.workers import Context, rank_and_world
from ltrscale.trees.data import BinCodes, Labelled
from ltrscale.trees.targets import TargetsConfig, make_targets

T = TypeVar("T")
_ELSEWHERE = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737): no packet is sent, but connecting reveals the outgoing interface."""


def all_workers(value: T) -> list[T]:
    """The values of all workers, by rank."""
    found = [value] * rank_and_world()[1]
    if dist.is_initialized():
        dist.all_gather_object(found, value)
    return found


def deal(selection: Selection, *, rank: int, world: int) -> Selection:
    """The row groups of one worker, in file order: each row group belongs to one worker, and documents are balanced.

    Shares differ by at most the documents of the largest row group.

    Raises:
        InputError: there are fewer row groups than workers.
    """
    if len(selection.row_groups) < world:
        raise InputError(
            f"train has {len(selection.row_groups)} row groups for {world} workers, which share whole ones; lower "
            f"workers to {len(selection.row_groups)}, or take more periods"
        )
    documents = [max(1, selection.served_documents(row_group)) for row_group in selection.row_groups]
    dealt = plan.canonical_streams(documents, seed=0, epoch=0, key=selection.hash, streams=world, shuffle=False)
    return replace(selection, row_groups=tuple(selection.row_groups[i] for i in dealt[rank]))


def check_complete(selection: Selection, share: Labelled) -> None:
    """Check that the shares of all workers together make up the selection."""
    counts = torch.tensor([len(share.ids_Q)])
    if dist.is_initialized():
        dist.all_reduce(counts)
    assert int(counts[0]) == selection.n_groups, f"{counts[0]} groups were read, {selection.n_groups} are selected"


def merged_codes(codes: BinCodes) -> BinCodes:
    """The codes and samples of all workers merged, so that bins are those of one process."""
    first, *others = all_workers(codes)
    for other in others:
        first.merge(other)
    return first


def shared_targets(config: TargetsConfig | None, share: Labelled) -> Doubles:
    """Targets of a worker's documents, shape [N]; grades have borders from the scores of all workers."""
    rank, world = rank_and_world()
    if config is None or not config.of_all_groups or world == 1:
        return make_targets(config, share.labels_N, share.offsets_Q1)
    shares = all_workers((share.labels_N, share.lengths_Q))
    labels, lengths = zip(*shares, strict=True)
    offsets_Q1 = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    first = sum(map(len, labels[:rank]))
    return make_targets(config, np.concatenate(labels), offsets_Q1)[first : first + len(share.labels_N)]


def together(context: Context) -> Context:
    """A context whose request to stop reaches all workers before the same tree, so that none waits for another."""
    if not dist.is_initialized():
        return context
    return replace(context, stopping=_any_of(context.stopping))


def _any_of(asked: Callable[[], bool]) -> Callable[[], bool]:
    def stopping() -> bool:
        flag = torch.tensor([int(asked())])
        dist.all_reduce(flag)
        return bool(flag)

    return stopping


def own_address() -> str:
    """The address at which the other workers reach this one."""
    if len(set(all_workers(socket.gethostname()))) == 1:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE)
        return str(probe.getsockname()[0])


def meeting_points() -> list[tuple[str, int]]:
    """An address and a free port of each worker, by rank; listen at once, for the ports are not reserved."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
        return all_workers((own_address(), port))  # while the port is bound, so that no neighbour gets the same one
