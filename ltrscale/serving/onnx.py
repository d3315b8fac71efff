"""A network as an ONNX graph, its feature transform included: raw features in, scores out.

    model.onnx       input `features`, float32 [documents, features]; output `scores`, float32 [documents]

The documents must be those of one query if a score depends on the other documents of its list (a listwise network,
features standardised per query); otherwise they may be any. Opset 18.

Shapes: N documents, F features.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from ltrscale.errors import InputError
from ltrscale.late import Late
from ltrscale.serving.format import CodeTexts, Files, MatrixFormat, MatrixScorer, ModelColumn, Observed, labels_of

if TYPE_CHECKING:
    from ltrscale.bundle import Bundle
    from ltrscale.serving import onnx_graph
else:
    onnx_graph = Late("ltrscale.serving.onnx_graph")

_MODEL = "model.onnx"


class OnnxFormat(MatrixFormat):
    """A network as an ONNX graph."""

    kind: Literal["onnx"] = "onnx"
    title: ClassVar[str] = "A ranker as an ONNX graph"
    tolerance: ClassVar[float] = 1e-4
    number: ClassVar[str] = "its code; one that the network has not learnt is the same as a missing one"
    use: ClassVar[str] = """```python
import onnxruntime
scores = onnxruntime.InferenceSession("model.onnx").run(["scores"], {"features": matrix})[0]
```"""

    def write(self, bundle: Bundle, observed: Observed) -> tuple[Files, tuple[ModelColumn, ...]]:
        """The graph; its columns are the raw features."""
        return {_MODEL: onnx_graph.graph_of(bundle)}, _raw_columns(bundle, observed.texts)

    def readers(self, folder: Path) -> tuple[MatrixScorer, ...]:
        """A session of onnxruntime."""
        try:
            import onnxruntime
        except ImportError as error:
            raise InputError("onnxruntime is not installed; pip install 'ltrscale[serve]'") from error
        session = onnxruntime.InferenceSession(str(folder / _MODEL), providers=["CPUExecutionProvider"])
        return (lambda matrix_NF: session.run(["scores"], {"features": matrix_NF})[0].astype(np.float64),)


def _raw_columns(bundle: Bundle, texts: CodeTexts) -> tuple[ModelColumn, ...]:
    labels = labels_of(feature.name for feature in bundle.features)
    return tuple(
        ModelColumn(
            column=i,
            name=feature.name,
            label=label,
            kind=feature.kind,
            values=dict(texts.get(feature.name, {})) if feature.kind == "categorical" else None,
        )
        for i, (feature, label) in enumerate(zip(bundle.features, labels, strict=True))
    )
