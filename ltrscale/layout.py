"""The list layout of a batch, known on the CPU: index tensors are made from it once and sent to the device.

Reading a length from a GPU makes the host wait for all queued work. So code that moves offsets to a device registers
their values (`register`). What follows from the values alone (the group of each document, lists of similar length
padded to blocks) is computed on the CPU by the read-ahead thread (`ListLayout.make`) and kept while the offsets live.
Unregistered offsets are first copied to the CPU, and the host waits for that copy.

Lists of many lengths get few shapes: sorted lists are cut into chunks, and a frame has shapes that serve all batches.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets; S slots of all chunks, M lists of a chunk with L slots each, G sorted
lists or places of lists in all chunks; C candidates of cuts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ltrscale.devices import block_entries

CHUNKS_ON_A_GPU = 5
"""Lengths to which lists are padded on a GPU: more would pad less and launch more kernels."""
_CUTS = 64
"""Candidates for these lengths."""
_LENGTHS, _ROOM = 8, 1.5
"""Lengths of a frame, and standard deviations of the number of lists of each for which it has room; a list also finds
room among longer ones."""


class Chunk(NamedTuple):
    """Groups of similar length, padded, with the rows of their documents.

    `groups_M` has the groups' numbers; `rows_ML` the document of each slot (in padding, the last one of the list);
    `mask_ML` is True where a slot holds a document.
    """

    groups_M: Tensor
    rows_ML: Tensor
    mask_ML: Tensor


@dataclass(frozen=True)
class Chunks:
    """The chunks of all groups that have a document, and conversions between ragged and padded values.

    There is at least one chunk, which has no list if there is no document. Every conversion is one gather for all
    chunks without a boolean index, so nothing is read back from the device.
    """

    shapes: tuple[tuple[int, int], ...]
    """Lists and slots (M, L) of each chunk."""
    groups_G: Tensor
    """Numbers of the groups, one chunk after the other."""
    rows_S: Tensor
    """Document of each slot."""
    mask_S: Tensor
    """True where a slot holds a document."""
    slots_N: Tensor
    """Slot of each document; any for one of padding."""
    padding_N: Tensor | None = None
    """True where a document is padding of a frame: its values and gradients are 0."""

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks that have a list."""
        if len(self.rows_S):
            groups = torch.split(self.groups_G, [m for m, _ in self.shapes])
            yield from map(Chunk, groups, self.split(self.rows_S), self.split(self.mask_S))

    def split(self, values_S: Tensor) -> list[Tensor]:
        """Values of all slots, [S, ...], as one view [M, L, ...] for each chunk."""
        return split_slots(values_S, self.shapes)

    def pad(self, values_N: Tensor, fill: float | None = 0.0) -> Tensor:
        """Values of documents, [N, ...], in their slots, [S, ...], with `fill` in padding.

        With None, padding has the values of the list's last document, and its gradient must be 0.
        """
        padded_S: Tensor = _Pad.apply(values_N, self, fill)  # type: ignore[no-untyped-call]
        return padded_S

    def ragged(self, parts: Sequence[Tensor]) -> Tensor:
        """The values of the documents, [N, ...], from one part [M, L, ...] for each chunk; padding is dropped."""
        ragged_N: Tensor = _Ragged.apply(torch.cat([part.flatten(0, 1) for part in parts]), self)  # type: ignore[no-untyped-call]
        return ragged_N

    def by_group(self, parts: Sequence[Tensor], n_groups: int) -> Tensor:
        """One value for each group, [Q, ...], from a part [M, ...] for each chunk; 0 for one without documents."""
        values_G = torch.cat(list(parts))
        return values_G.new_zeros(n_groups, *values_G.shape[1:]).index_copy(0, self.groups_G, values_G)


def split_slots(values_S: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Values of slots that lie end to end, [S, ...], as one view [M, L, ...] for each of the shapes (M, L)."""
    sizes = [m * length for m, length in shapes]
    parts = [values_S] if len(sizes) == 1 else torch.split(values_S, sizes)  # an exported graph has one list
    return [part.view(*shape, *part.shape[1:]) for part, shape in zip(parts, shapes, strict=True)]


class _Pad(torch.autograd.Function):
    """Each document has one slot, so both directions, and both gradients, are gathers."""

    @staticmethod
    def forward(ctx: Any, values_N: Tensor, chunks: Chunks, fill: float | None) -> Tensor:
        ctx.chunks = chunks
        values_S = values_N.index_select(0, chunks.rows_S)
        if fill is None:
            return values_S
        return values_S.masked_fill_(~chunks.mask_S.view(-1, *[1] * (values_N.ndim - 1)), fill)

    @staticmethod
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Tensor, None, None]:
        return _Ragged.apply(grad_S, ctx.chunks), None, None  # type: ignore[no-untyped-call]


class _Ragged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_S: Tensor, chunks: Chunks) -> Tensor:
        ctx.chunks = chunks
        values_N = values_S.index_select(0, chunks.slots_N)
        if chunks.padding_N is None:
            return values_N
        return values_N.masked_fill_(chunks.padding_N.view(-1, *[1] * (values_N.ndim - 1)), 0.0)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:
        return _Pad.apply(grad_N, ctx.chunks, 0.0), None  # type: ignore[no-untyped-call]


UNKNOWN = -1


class Request(NamedTuple):
    """The name of a method of a layout, and its arguments."""

    name: str
    arguments: tuple[Any, ...] = ()


class Frame(NamedTuple):
    """Shapes that the batches of a training are padded to, so that the same operations serve each of them.

    After its own groups a padded batch has empty ones, and last a group of the documents that are padding.
    """

    documents: int
    """Of a batch, those of padding included."""
    shapes: tuple[tuple[int, int], ...]
    """Lists and slots (M, L) of each chunk, short lists first."""

    @property
    def groups(self) -> int:
        """Groups of a batch: one for each place of a list, and that of padding."""
        return sum(m for m, _ in self.shapes) + 1

    @property
    def least(self) -> int:
        """Documents that a batch must have: a fuller one has no room for another list."""
        return max(2, self.documents - self.shapes[-1][1])

    def dealt(self, lengths_Q: NDArray[np.int64], copies: int = 1) -> NDArray[np.int64] | None:
        """The group in each place of a list, shape [G], -1 where there is none; None if the groups do not fit.

        Example:
            >>> Frame(9, ((1, 2), (2, 4))).dealt(np.array([3, 2, 0, 1])).tolist()
            [3, 1, 0]
        """
        order_G, first = lengths_Q.argsort(kind="stable")[(lengths_Q == 0).sum() :], 0
        places = []
        for m, length in self.shapes:  # a list may also have a place of longer ones
            fitting = int(lengths_Q[order_G].searchsorted(length, side="right"))
            taken_M = order_G[first : min(first + m * copies, fitting)]
            places.append(np.pad(taken_M, (0, m * copies - len(taken_M)), constant_values=-1))
            first += len(taken_M)
        return np.concatenate(places) if first == len(order_G) else None


class ListLayout:
    """The offsets of a batch on the CPU, and the tensors made from them on the device."""

    def __init__(self, offsets_Q1: NDArray[np.int64], device: torch.device, frame: Frame | None = None) -> None:
        self.offsets_Q1, self.device, self.frame = offsets_Q1, device, frame
        self.made: dict[Request, Any] = {}
        self.unplaced: int | None = UNKNOWN
        """The first group without any position; None if every group has one."""

    @property
    def lengths_Q(self) -> NDArray[np.int64]:
        """Documents of each group."""
        return np.diff(self.offsets_Q1)

    @property
    def longest(self) -> int:
        """Documents of the longest group; 0 if there is none."""
        return int(self.lengths_Q.max(initial=0))

    def get(self, name: str, *arguments: Any) -> Any:
        """The cached result of the method of this name."""
        request = Request(name, arguments)
        if request not in self.made:
            self.made[request] = getattr(self, name)(*arguments)
        return self.made[request]

    def asked(self) -> dict[Request, Any]:
        """All cached results, with those of offsets among them."""
        return {request: layout(made).asked() if _is_offsets(made) else None for request, made in self.made.items()}

    def make(self, asked: dict[Request, Any]) -> None:
        """Compute now what another layout was asked for."""
        for request, within in asked.items():
            made = self.get(request.name, *request.arguments)
            if within is not None:
                layout(made).make(within)

    def tensors(self) -> Iterator[Tensor]:
        """All cached tensors."""
        for made in list(self.made.values()):
            if _is_offsets(made):
                yield from layout(made).tensors()
            yield from filter(torch.is_tensor, vars(made).values() if isinstance(made, Chunks) else [made])

    def replaced(self, other: "ListLayout") -> Iterator[tuple[Tensor, Tensor]]:
        """Take the values of a layout of the same frame; yields each cached tensor, and that which is to be copied."""
        self.offsets_Q1[:] = other.offsets_Q1
        for request, mine in self.made.items():
            its = other.get(request.name, *request.arguments)
            if _is_offsets(mine):
                yield from layout(mine).replaced(layout(its))
            tensors = [vars(made).values() if isinstance(made, Chunks) else [made] for made in (mine, its)]
            yield from ((a, b) for a, b in zip(*tensors, strict=True) if torch.is_tensor(a))

    @property
    def padding_Q(self) -> NDArray[np.bool_]:
        """Where a group is padding: the last one of each copy of a batch in a frame."""
        number_Q = np.arange(len(self.offsets_Q1) - 1)
        return (number_Q + 1) % self.frame.groups == 0 if self.frame else np.zeros_like(number_Q, np.bool_)

    def real(self) -> Tensor:
        """Where a document is no padding, shape [N]."""
        return self._send(~self.padding_Q.repeat(self.lengths_Q))

    def group_index(self) -> Tensor:
        """The group of each document, shape [N]."""
        return self._send(np.repeat(np.arange(len(self.offsets_Q1) - 1), self.lengths_Q))

    def joined(self, documents: int | None) -> Tensor:
        """Offsets of runs of neighbouring groups, of about this many documents; None joins all."""
        n = self.offsets_Q1[-1]
        runs = max(1, -(-n // documents)) if documents else 1
        borders = np.unique(self.offsets_Q1[self.offsets_Q1.searchsorted(np.arange(1, runs) * n / runs)])
        return self._registered(np.concatenate([[0], borders[borders < n], [n]]))

    def repeated(self, times: int) -> Tensor:
        """Offsets of this many copies of the batch, one after the other."""
        offsets_Q1 = np.concatenate([[0], np.tile(self.lengths_Q, times).cumsum()])
        return registered_offsets(offsets_Q1, self.device, self.frame)

    def kept(self, k: int) -> Tensor:
        """Offsets of the groups if each keeps its first k documents."""
        return self._registered(np.concatenate([[0], np.minimum(self.lengths_Q, k).cumsum()]))

    def kept_rows(self, k: int) -> Tensor:
        """The first k documents of each group, shape [T]."""
        place_N = np.arange(self.offsets_Q1[-1]) - self.offsets_Q1[:-1].repeat(self.lengths_Q)
        return self._send(np.flatnonzero(place_N < k))

    def with_places(self, number: int) -> Tensor:
        """Offsets of the groups with this many more places for documents of other groups, if there are any."""
        return self._registered(self._with_places(number)[0])

    def sources(self, number: int) -> Tensor:
        """The content of the groups of `with_places`, [2, M].

        A document of the group has its number and 0; an added place has -1 and its number in [Q, number].
        """
        offsets_Q1, added_Q = self._with_places(number)
        sources_2M = np.full((2, offsets_Q1[-1]), -1)
        own_N = np.arange(self.offsets_Q1[-1]) + (offsets_Q1 - self.offsets_Q1)[:-1].repeat(self.lengths_Q)
        sources_2M[:, own_N] = np.arange(len(own_N)), np.zeros_like(own_N)
        places_QK = np.arange(len(added_Q) * number).reshape(-1, number)
        sources_2M[1, sources_2M[0] < 0] = places_QK[added_Q > 0].ravel()
        return self._send(sources_2M)

    def _with_places(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        added_Q = np.where(self.lengths_Q < self.offsets_Q1[-1], number, 0)
        return np.concatenate([[0], (self.lengths_Q + added_Q).cumsum()]), added_Q

    def longer(self) -> Tensor:
        """Offsets of the same groups with one row more each."""
        return self._registered(self.offsets_Q1 + np.arange(len(self.offsets_Q1)))

    def chunks(self, budget: int, quadratic: bool) -> Chunks:
        """Padded chunks of groups of similar length, those of the frame if there is one."""
        order_G, shapes = self._framed(self.frame) if self.frame else self._sorted(budget, 2 if quadratic else 1)
        widths_G = np.array([length for m, length in shapes for _ in range(m)], np.int64)
        begin_G = widths_G.cumsum() - widths_G  # first slot
        first_G, last_G = self.offsets_Q1[order_G], self.offsets_Q1[order_G + 1] - 1  # documents
        rows_S = np.arange(widths_G.sum()) + (first_G - begin_G).repeat(widths_G)
        last_S = last_G.repeat(widths_G)
        begin_Q = np.zeros_like(self.lengths_Q)
        begin_Q[order_G] = begin_G
        slots_N = np.arange(self.offsets_Q1[-1]) + (begin_Q - self.offsets_Q1[:-1]).repeat(self.lengths_Q)
        indices = [order_G, np.minimum(rows_S, last_S).clip(min=0), rows_S <= last_S, slots_N]
        if self.frame:  # padding has no slot, and a place without a group no document
            padding_N = self.padding_Q.repeat(self.lengths_Q)
            indices[-1:] = [np.where(padding_N, 0, slots_N), padding_N]
        return Chunks(shapes or ((0, 1),), *map(self._send, indices))

    def _sorted(self, budget: int, power: int) -> tuple[NDArray[np.int64], tuple[tuple[int, int], ...]]:
        """The groups by length, and the shapes of their chunks."""
        lengths_Q = self.lengths_Q
        order_G = lengths_Q.argsort(kind="stable")[(lengths_Q == 0).sum() :]
        lengths_G = lengths_Q[order_G]
        if self.device.type == "cpu":
            ends = filled(lengths_G, power, budget)
        else:
            ends = best_cuts(lengths_G, power, max(budget, block_entries(self.device)))
        return order_G, tuple((end - first, int(lengths_G[end - 1])) for first, end in pairwise([0, *ends]))

    def _framed(self, frame: Frame) -> tuple[NDArray[np.int64], tuple[tuple[int, int], ...]]:
        """The group in each place of the frame, or -1, and the shapes of its chunks."""
        copies = len(self.padding_Q) // frame.groups
        order_G = frame.dealt(np.where(self.padding_Q, 0, self.lengths_Q), copies)
        assert order_G is not None
        return order_G, tuple((m * copies, length) for m, length in frame.shapes)

    def _registered(self, offsets_Q1: NDArray[np.int64]) -> Tensor:
        return registered_offsets(offsets_Q1, self.device)

    def _send(self, values: NDArray[Any]) -> Tensor:
        return send(values, self.device)


def send(values: NDArray[Any], device: torch.device) -> Tensor:
    """The values on a device, without waiting for it; on a CPU they share memory."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":  # from pinned memory a copy does not make the host wait
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


_LAYOUTS = WeakTensorKeyDictionary()
"""The layouts of offsets that are alive, by the identity of the tensor."""


def register(offsets_Q1: Tensor, values_Q1: NDArray[np.int64], frame: Frame | None = None) -> None:
    """Register the values of offsets on a device, and their frame, which saves copying them back to the host."""
    _LAYOUTS[offsets_Q1] = ListLayout(values_Q1, offsets_Q1.device, frame)


def registered_offsets(values_Q1: NDArray[np.int64], device: torch.device, frame: Frame | None = None) -> Tensor:
    """Offsets on a device with registered values; on a CPU they share the memory."""
    offsets_Q1 = send(values_Q1, device)
    register(offsets_Q1, values_Q1, frame)
    return offsets_Q1


def layout(offsets_Q1: Tensor) -> ListLayout:
    """The layout of these offsets; those on a GPU must not be changed in place afterwards."""
    known: ListLayout | None = _LAYOUTS.get(offsets_Q1)  # type: ignore[no-untyped-call]
    if known is not None and (offsets_Q1.device.type != "cpu" or np.array_equal(known.offsets_Q1, offsets_Q1.numpy())):
        return known
    made = ListLayout(offsets_Q1.detach().to("cpu", copy=True).numpy(), offsets_Q1.device)
    _LAYOUTS[offsets_Q1] = made
    return made


def _is_offsets(made: Any) -> bool:
    return torch.is_tensor(made) and made in _LAYOUTS


def frame_of(lengths_Q: NDArray[np.int64], *, documents: int, longest: int, entries: int) -> Frame:
    """A frame with room for nearly every batch of this many documents.

    Args:
        lengths_Q: documents of some groups; those of a batch are taken to have the same distribution.
        documents: the most that a batch has.
        longest: documents of the longest group; a place is reserved for two up to twice as long as any of `lengths_Q`.
        entries: the most that a chunk may have, M * L * L; longer lists do not fit the frame.

    Example:
        >>> frame_of(np.full(50, 10), documents=100, longest=12, entries=1000)
        Frame(documents=100, shapes=((10, 10), (6, 10), (2, 12)))
    """
    most = math.isqrt(entries)
    lengths_G = np.sort(lengths_Q[(lengths_Q > 0) & (lengths_Q <= most)])
    groups, classes = documents / max(1.0, float(lengths_Q[lengths_Q > 0].mean())), []
    for first, end in pairwise([0, *best_cuts(lengths_G, 2, entries * len(lengths_G), _LENGTHS)]):
        expected = groups * (end - first) / len(lengths_Q)
        classes.append((math.ceil(expected + _ROOM * math.sqrt(expected) + 1), int(lengths_G[end - 1])))
    if (longer := min(longest, most, 2 * int(lengths_G.max(initial=1)))) > lengths_G.max(initial=0):
        classes.append((2, longer))
    shapes = []
    for lists, length in classes:
        full, rest = divmod(lists, max(1, entries // length**2))
        shapes += [(max(1, entries // length**2), length)] * full + ([(rest, length)] if rest else [])
    return Frame(documents, tuple(shapes))


def filled(lengths_G: NDArray[np.int64], power: int, budget: int) -> list[int]:
    """Ends of chunks that each hold as many lists as the budget allows, at least one."""
    ends, first = [], 0
    while first < len(lengths_G):
        # the entries of a chunk grow with its last list
        entries_G = (np.arange(first, len(lengths_G)) + 1 - first) * lengths_G[first:] ** power
        first += max(1, int(entries_G.searchsorted(budget, side="right")))
        ends.append(first)
    return ends


def best_cuts(lengths_G: NDArray[np.int64], power: int, budget: int, number: int = CHUNKS_ON_A_GPU) -> list[int]:
    """Ends of a number of chunks with the least padding; a chunk beyond the budget is cut again."""
    if not len(lengths_G):
        return []
    bounds_C = _candidates(lengths_G)
    sizes_CC = np.maximum(0, bounds_C - bounds_C[:, None])
    cost_CC = sizes_CC * np.concatenate([[0], lengths_G[bounds_C[1:] - 1]]) ** power
    cost_CC[sizes_CC == 0] = np.iinfo(np.int64).max // 4
    total_C, back = cost_CC[0], []
    for _ in range(min(number, len(bounds_C) - 1) - 1):  # one more chunk: from the best place to begin it
        totals_CC = np.minimum(total_C[:, None] + cost_CC, np.iinfo(np.int64).max // 4)
        back.append(totals_CC.argmin(0))
        total_C = totals_CC.min(0)
    ends = [len(bounds_C) - 1]
    for best_C in reversed(back):
        ends.append(int(best_C[ends[-1]]))
    first, cuts = 0, []
    for end in bounds_C[ends[::-1]].tolist():
        step = max(1, budget // int(lengths_G[end - 1]) ** power)
        cuts += [*range(first + step, end, step), end]
        first = end
    return cuts


def _candidates(lengths_G: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places where a chunk may begin or end: between lists of different length, thinned out to some dozens."""
    between = np.flatnonzero(np.diff(lengths_G)) + 1
    kept = between[np.unique(np.linspace(0, len(between) - 1, _CUTS).astype(np.int64))] if len(between) else between
    return np.concatenate([[0], kept, [len(lengths_G)]])
