"""A device without hardware: tensors that live on the CPU, behave as on a GPU, and count what a GPU would be asked.

Under `pretending()` the device "pretend" exists. Each operation on its tensors runs on the CPU, so values are real. As
on a GPU, an operation on tensors of two devices is refused, and a look at a value makes the host wait.
"""

import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.flop_counter import flop_registry

import ltrscale

NAME = "pretend"
aten = torch.ops.aten
_PACKAGE = Path(ltrscale.__file__).parent

_WAITS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
}
"""Operations whose result, or its shape, the host must see before it goes on."""
_FREE = {
    "aten::detach",
    "aten::alias",
    "aten::lift_fresh",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::resize_",
    "aten::set_",
    "aten::record_stream",
    "aten::is_same_size",
    "aten::sym_size",
    "aten::_has_compatible_shallow_copy_type",
}
"""Operations that launch nothing, besides views."""


@dataclass
class Counts:
    """What a piece of work asked of the device."""

    launches: int = 0
    """Operations that are no views; a GPU runs at least one kernel for each."""
    waits: Counter[str] = field(default_factory=Counter)
    """Times that the host waited for a value, by the place in the package that asked."""
    copies: int = 0
    """Copies between host and device."""
    moved: int = 0
    """Bytes of these copies."""
    touched: int = 0
    """Bytes that operations read and wrote in the device's memory."""
    flops: int = 0
    """Of matrix products."""
    by_name: Counter[str] = field(default_factory=Counter)
    """Launches by operation."""


class PretendTensor(Tensor):
    """A tensor on the pretend device; `held` has its values on the CPU."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> "PretendTensor":  # noqa: D102
        made: PretendTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendTensor({self.held})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return PretendTensor, (self.held,)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, Counts())  # outside `counting`: runs, and counts for nobody


class counting(TorchDispatchMode):  # noqa: N801
    """Counts what the code inside asks of the pretend device, in `counts`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.counts)


def _run(func: Any, args: Any, kwargs: Mapping[str, Any], counts: Counts) -> Any:
    flat, spec = pytree.tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, Tensor)]
    ours = [value for value in tensors if isinstance(value, PretendTensor)]
    devices = [value for value in flat if isinstance(value, torch.device)]
    asked = devices[0] if devices else None
    makes = asked is not None and asked.type == NAME
    if not ours and not makes:
        return func(*args, **kwargs)
    name = func.name().split(".")[0]
    _check_devices(name, tensors, ours)
    _count(func, name, args, kwargs, counts, to_host=bool(ours) and asked is not None and not makes)
    wrapped = {id(value.held): value for value in ours}
    held = [value.held if isinstance(value, PretendTensor) else value for value in flat]
    held = [torch.device("cpu") if isinstance(value, torch.device) else value for value in held]
    inner_args, inner_kwargs = pytree.tree_unflatten(held, spec)
    result = func(*inner_args, **inner_kwargs)
    if name == "aten::copy_" and not isinstance(args[0], PretendTensor):
        return args[0]
    if ours and asked is not None and not makes:  # a copy to the host
        return result
    return pytree.tree_map_only(
        Tensor, lambda value: wrapped[id(value)] if id(value) in wrapped else PretendTensor(value), result
    )


def _check_devices(name: str, tensors: Sequence[Tensor], ours: Sequence[Tensor]) -> None:
    others = [value for value in tensors if not isinstance(value, PretendTensor) and value.ndim > 0]
    if ours and others and name not in ("aten::copy_", "aten::_to_copy"):
        shapes = [list(value.shape) for value in others]
        raise RuntimeError(f"{name}: expected all tensors on one device, but {shapes} lie on the CPU")


def _count(
    func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], counts: Counts, *, to_host: bool
) -> None:
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    indexes = (
        args[1] if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_") else ()
    )
    boolean = any(value is not None and value.dtype in (torch.bool, torch.uint8) for value in indexes)
    unknown = name == "aten::repeat_interleave" and kwargs.get("output_size") is None
    if name in _WAITS or boolean or to_host or unknown:
        counts.waits[_place()] += 1
    if name in ("aten::copy_", "aten::_to_copy") and (
        to_host or any(not isinstance(t, PretendTensor) for t in tensors)
    ):
        counts.copies += 1
        counts.moved += sum(value.numel() * value.element_size() for value in tensors[-1:])
        return
    if func.is_view or name in _FREE:
        return
    counts.launches += 1
    counts.by_name[name] += 1
    counts.touched += _touched(name, tensors)
    packet = func.overloadpacket
    if packet in flop_registry:
        result = func(*pytree.tree_map_only(PretendTensor, lambda value: value.held.to("meta"), tuple(args)))
        counts.flops += flop_registry[packet](*args, **kwargs, out_val=result)


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _touched(name: str, tensors: Sequence[Tensor]) -> int:
    """Bytes that an operation reads, and the same again for the largest input, as what it writes.

    A gather or scatter touches the rows that it moves, not the whole tensor.
    """
    if not tensors:
        return 0
    if name in ("aten::index_select", "aten::gather", "aten::index", "aten::embedding"):
        index = [value for value in tensors if value.dtype in (torch.int64, torch.int32)]
        row = _bytes(tensors[0]) // max(1, tensors[0].shape[0] if name != "aten::gather" else tensors[0].numel())
        return sum(_bytes(value) + 2 * value.numel() * row for value in index)
    if name.startswith(("aten::index_copy", "aten::index_add", "aten::index_put", "aten::scatter")):
        return sum(_bytes(value) for value in tensors[1:]) + _bytes(tensors[-1])
    return sum(map(_bytes, tensors)) + max(map(_bytes, tensors))


def _place() -> str:
    """File and line of the package that is at work, `optimizer` for torch's own."""
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        path = Path(frame.f_code.co_filename)
        if _PACKAGE in path.parents:
            return f"{path.relative_to(_PACKAGE)}:{line}"
    return "outside the package"


@cache
def _register() -> None:
    """Make the name of the device known to torch, once in a process."""
    _setup_privateuseone_for_python_backend(NAME)
    module = getattr(torch, NAME)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda _: None


@contextmanager
def pretending() -> Iterator[torch.device]:
    """Let code inside use the pretend device; torch has no random generators for it, so the CPU's serve."""
    _register()
    # autograd's threads are those of the devices that were there at its first use
    with (
        counting(),
        torch.autograd.set_multithreading_enabled(False),
        mock.patch.object(torch, "Generator", _Generator),
    ):
        yield torch.device(NAME, 0)


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)
