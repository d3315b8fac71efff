"""The ONNX graph of a network, as torch exports it: raw features in, scores out.

Shapes: N documents, Q groups, F features, V sorted values, R rows.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ltrscale.batch import QueryGroups
from ltrscale.bundle import Bundle
from ltrscale.errors import InputError
from ltrscale.models.ranker import AnyRanker

_OPSET = 18
# Giles 2012, "Approximating the erfinv function", single precision: coefficients for w < 5 and w >= 5
_CENTRE = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503,
           -0.00417768164, 0.246640727, 1.50140941)  # fmt: skip
_OUTER = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
         1.00167406, 2.83297682)  # fmt: skip


class _OneList(nn.Module):
    """Scores [N] of documents [N, F] as one list."""

    def __init__(self, ranker: AnyRanker) -> None:
        super().__init__()
        self.ranker = ranker

    def forward(self, features_NF: Tensor) -> Tensor:
        documents_1 = torch.ones_like(features_NF[:, 0], dtype=torch.int64).sum(0, keepdim=True)
        offsets_Q1 = torch.cat([torch.zeros_like(documents_1), documents_1])
        scores_N: Tensor = self.ranker(QueryGroups(features_NF, offsets_Q1))
        return scores_N


def is_listwise(bundle: Bundle) -> bool:
    """True if a document's score depends on the others of its list."""
    return any(part.reads_lists for part in bundle.parts)


def graph_of(bundle: Bundle) -> bytes:
    """The graph of a bundle's network.

    Raises:
        InputError: a graph cannot express the bundle; onnx is not installed.
    """
    _check_exportable(bundle)
    try:
        import onnxscript
    except ImportError as error:
        raise InputError("onnx is not installed; pip install 'ltrscale[serve]'") from error
    example_NF = torch.zeros(5, len(bundle.features))
    with _quiet("torch.onnx", onnxscript.__name__, "onnx_ir"):
        program = torch.onnx.export(
            _OneList(bundle.ranker()).eval(),
            (example_NF,),
            input_names=["features"],
            output_names=["scores"],
            dynamic_shapes=({0: torch.export.Dim("documents", min=1)},),
            custom_translation_table=_translations(),
            opset_version=_OPSET,
            verbose=False,
        )
    assert program is not None
    model: Any = program.model_proto
    for each in (model.graph, *model.functions):  # the names of the exporter's own source files
        for described in (each, *each.node, *each.value_info):
            described.ClearField("metadata_props")
    return bytes(model.SerializeToString())


def _check_exportable(bundle: Bundle) -> None:
    if not bundle.parts:
        remedy = (
            "export a student that jobs.distill trains from it"
            if bundle.forest is None
            else "export trees to lightgbm, xgboost or treelite"
        )
        raise InputError(f"{bundle.url}: holds {bundle.holds}, and onnx takes finetuned networks only; {remedy}")
    if bundle.reads_positions:
        raise InputError(
            f"{bundle.url}: ranks documents by the positions at which they were shown, which the graph does not get; "
            "train with context.initial_rank: feature, or export a student that jobs.distill trains"
        )
    for context in (part.context for part in bundle.parts):
        if context is not None and context.beyond_graphs:
            raise InputError(
                f"{bundle.url}: its list context {context.kind} {context.beyond_graphs}, which a graph cannot express; "
                "export a student that jobs.distill trains from it"
            )


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """ONNX translations of operations that the exporter does not know."""
    from onnxscript import opset18 as op

    def searchsorted(
        sorted_RV: Any,
        values: Any,
        out_int32: bool = False,  # noqa: ARG001
        right: bool = False,
        side: str | None = None,
        sorter: Any = None,  # noqa: ARG001
    ) -> Any:
        """Binary search: the number of sorted values below each value, or with `right` not above it."""
        after = right or side == "right"
        n, rows = sorted_RV.shape[-1], len(sorted_RV.shape) > 1
        count = op.Mul(op.Cast(op.IsNaN(values), to=7), op.Constant(value_int=0))
        for bit in reversed(range(int(n).bit_length())):
            more = op.Add(count, op.Constant(value_int=1 << bit))
            place = op.Min(op.Sub(more, op.Constant(value_int=1)), op.Constant(value_int=n - 1))
            at_place = op.GatherElements(sorted_RV, place, axis=1) if rows else op.Gather(sorted_RV, place)
            passes = op.LessOrEqual(at_place, values) if after else op.Less(at_place, values)
            fits = op.LessOrEqual(more, op.Constant(value_int=n))
            count = op.Where(op.And(passes, fits), more, count)
        return count

    def polynomial(w: Any, coefficients: Sequence[float]) -> Any:
        total = op.Constant(value_float=coefficients[0])
        for coefficient in coefficients[1:]:
            total = op.Add(op.Mul(total, w), op.Constant(value_float=coefficient))
        return total

    def erfinv(x: Any) -> Any:
        one = op.Constant(value_float=1.0)
        w = op.Neg(op.Log(op.Mul(op.Sub(one, x), op.Add(one, x))))
        centre = polynomial(op.Sub(w, op.Constant(value_float=2.5)), _CENTRE)
        tail = polynomial(op.Sub(op.Sqrt(w), op.Constant(value_float=3.0)), _OUTER)
        return op.Mul(op.Where(op.Less(w, op.Constant(value_float=5.0)), centre, tail), x)

    def sort(keys: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:  # noqa: ARG001
        """Stable sort by TopK, which keeps the order of equal keys; a missing key comes last."""
        last = op.CastLike(op.Constant(value_float=-math.inf if descending else math.inf), keys)
        length = op.Gather(op.Shape(keys), op.Constant(value_ints=[dim]))
        return op.TopK(op.Where(op.IsNaN(keys), last, keys), length, axis=dim, largest=int(descending), sorted=1)

    def copysign(x: Any, y: Any) -> Any:
        size = op.Abs(x)
        return op.Where(op.Less(y, op.CastLike(op.Constant(value_float=0.0), y)), op.Neg(size), size)

    aten = torch.ops.aten
    return {
        aten.searchsorted.Tensor: searchsorted,
        aten.erfinv.default: erfinv,
        aten.sort.stable: sort,
        aten.copysign.Tensor: copysign,
    }


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Silence the warnings of some libraries while the block runs."""
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in levels:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in levels.items():
                logger.setLevel(level)
