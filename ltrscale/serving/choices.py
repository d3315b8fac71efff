"""The closed union of the formats of exports. Add one line here for each new member."""

from typing import TYPE_CHECKING, Literal

from ltrscale.config import by_kind
from ltrscale.serving.format import Format
from ltrscale.serving.ltr_plugin import ElasticsearchFormat, OpenSearchFormat
from ltrscale.serving.onnx_graph import OnnxFormat
from ltrscale.serving.trees import LightGBMFormat, TreeliteFormat, XGBoostFormat
from ltrscale.serving.vespa import VespaFormat

AnyFormat = (
    LightGBMFormat | XGBoostFormat | OnnxFormat | ElasticsearchFormat | OpenSearchFormat | VespaFormat | TreeliteFormat
)

FORMATS: dict[str, Format] = {kind: format_class() for kind, format_class in by_kind(AnyFormat).items()}
"""All formats by their names."""
if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[tuple(FORMATS)]
