"""A device without hardware: tensors that live on the CPU, behave as on a GPU, and count what a GPU would be asked.

Under `pretending()` the device "pretend" exists. Each operation on its tensors runs on the CPU, so values are real. As
on a GPU, an operation on tensors of two devices is refused, and a look at a value makes the host wait. What torch asks
inside one operation is not seen; the gradient of `prod`, for example, looks at values where nobody counts.
"""

import math
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
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
    "aten::is_nonzero",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
}
"""Operations whose result, or its shape, the host must see before it goes on."""
_COPIES = {"aten::copy_", "aten::_to_copy"}
"""Operations that may have tensors of two devices."""
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

    def mean(self, number: int) -> "Counts":
        """The mean of a number of steps; rounded up, so that what some of them asked is seen."""

        def part(value: Any) -> Any:
            if isinstance(value, Counter):
                return Counter({name: part(count) for name, count in value.items()})
            return math.ceil(value / number)

        return Counts(**{each.name: part(getattr(self, each.name)) for each in fields(self)})


class PretendTensor(Tensor):
    """A tensor on the pretend device; `held` has its values on the CPU, or only its shape on "meta"."""

    held: Tensor

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

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {}, Counts())  # outside `counting`: runs, and counts for nobody


PretendTensor.__torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment,method-assign]


class counting(TorchDispatchMode):  # noqa: N801
    """Counts what the code inside asks of the pretend device, in `counts`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.counts)


class _Call(NamedTuple):
    """One operation, and whether it leads to the device or away from it."""

    func: Any
    name: str
    args: Any
    kwargs: Mapping[str, Any]
    ours: list[PretendTensor]
    others: list[Tensor]
    to_host: bool
    to_device: bool


def _run(func: Any, args: Any, kwargs: Mapping[str, Any], counts: Counts) -> Any:
    flat, spec = pytree.tree_flatten((args, kwargs))
    ours = [value for value in flat if isinstance(value, PretendTensor)]
    others = [value for value in flat if isinstance(value, Tensor) and not isinstance(value, PretendTensor)]
    named = [value.type for value in flat if isinstance(value, torch.device)]
    name = func.name().split(".")[0]
    to_host = (bool(ours) and named not in ([], [NAME])) or (
        name == "aten::copy_" and bool(others) and args[0] is others[0]
    )
    call = _Call(func, name, args, kwargs, ours, others, to_host, to_device=named == [NAME])
    if not ours and not call.to_device:
        return func(*args, **kwargs)
    _check_devices(call)
    held = [value.held if isinstance(value, PretendTensor) else value for value in flat]
    held = [torch.device(_HOME.get()) if isinstance(value, torch.device) else value for value in held]
    inner_args, inner_kwargs = pytree.tree_unflatten(held, spec)
    shapeless = _HOME.get() == "meta" and (to_host or name == "aten::_local_scalar_dense")
    if _HOME.get() == "meta" and name.endswith("_") and "generator" in inner_kwargs:
        inner_kwargs["generator"] = None  # shapes need no randomness, and some operations refuse it
    result = _ones(call) if shapeless else func(*inner_args, **inner_kwargs)
    _count(call, result, counts)
    if to_host or not isinstance(result, Tensor | list | tuple):
        return args[0] if name == "aten::copy_" else result
    wrapped = {id(value.held): value for value in ours}
    return pytree.tree_map_only(
        Tensor, lambda value: wrapped[id(value)] if id(value) in wrapped else PretendTensor(value), result
    )


def _ones(call: _Call) -> Any:
    """What the host reads from a device without values."""
    if call.name == "aten::_local_scalar_dense":
        return 1
    return torch.ones(call.ours[0].shape, dtype=call.kwargs.get("dtype") or call.ours[0].dtype)


def _check_devices(call: _Call) -> None:
    elsewhere = [list(value.shape) for value in call.others if value.ndim > 0]
    if call.ours and elsewhere and call.name not in _COPIES:
        raise RuntimeError(f"{call.name}: expected all tensors on one device, but {elsewhere} lie on the CPU")


def _count(call: _Call, result: Any, counts: Counts) -> None:
    indexes = call.args[1] if call.name == "aten::index" or call.name.startswith("aten::index_put") else ()
    boolean = any(value is not None and value.dtype in (torch.bool, torch.uint8) for value in indexes)
    unknown = call.name == "aten::repeat_interleave" and call.kwargs.get("output_size") is None
    at_once = call.name in _COPIES and not (call.kwargs.get("non_blocking") or (*call.args, None, None)[2])
    blocking = bool(call.others) and at_once
    if call.name in _WAITS or boolean or unknown or blocking or (call.to_host and at_once):
        counts.waits[_place()] += 1
    if call.name in _COPIES and (call.to_host or call.others):
        counts.copies += 1
        counts.moved += _bytes((call.others or call.ours)[0])
        return
    if call.func.is_view or call.name in _FREE:
        return
    counts.launches += 1
    counts.by_name[call.name] += 1
    tensors = [value for value in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(value, Tensor)]
    counts.touched += _touched(call.name, tensors, result)
    if (packet := call.func.overloadpacket) in flop_registry:
        counts.flops += flop_registry[packet](*call.args, **call.kwargs, out_val=result)


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _touched(name: str, tensors: Sequence[Tensor], result: Any) -> int:
    """Bytes that an operation reads and writes; a gather or scatter touches the rows that it moves, not the whole."""
    written = sum(_bytes(value) for value in pytree.tree_leaves(result) if isinstance(value, Tensor))
    if name in ("aten::index_select", "aten::gather", "aten::index", "aten::embedding"):
        return sum(_bytes(value) for value in tensors[1:]) + 2 * written
    if name.startswith(("aten::index_copy", "aten::index_add", "aten::index_put", "aten::scatter")):
        return sum(_bytes(value) for value in tensors[1:]) + 2 * _bytes(tensors[-1])
    return sum(map(_bytes, tensors)) + written


def _place() -> str:
    """The innermost line of the package in the stack, as `file:line`."""
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


_HOME: ContextVar[str] = ContextVar("home", default="cpu")
"""Where the tensors really are."""


@contextmanager
def pretending(*, values: bool = True) -> Iterator[torch.device]:
    """Let code inside use the pretend device; torch has no random generators for it, so the CPU's serve.

    Without values nothing is computed: only shapes are followed, whatever the size, and the host reads ones.
    """
    _register()
    home = _HOME.set("cpu" if values else "meta")
    # autograd's threads are those of the devices that were there at its first use
    single_thread, generators = (
        torch.autograd.set_multithreading_enabled(False),
        mock.patch.object(torch, "Generator", _Generator),
    )
    try:
        with counting(), single_thread, generators:
            yield torch.device(NAME, 0)
    finally:
        _HOME.reset(home)


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)  # type: ignore[call-arg]
