"""The card that explains to people how to use an export."""

from ltrscale.serving.features import ExportedFeatures, Format

_MATRIX: tuple[Format, ...] = ("lightgbm", "xgboost", "onnx", "treelite")
_TITLES: dict[Format, str] = {
    "lightgbm": "A ranker as LightGBM's own text",
    "xgboost": "A ranker in XGBoost's own formats",
    "onnx": "A ranker as an ONNX graph",
    "elasticsearch": "A ranker for Elasticsearch's Learning to Rank plugin",
    "opensearch": "A ranker for OpenSearch's Learning to Rank plugin, version 3.8 or later",
    "vespa": "A ranker for Vespa",
    "treelite": "A ranker as a treelite checkpoint, for Triton's FIL backend",
}
_USES: dict[Format, str] = {
    "lightgbm": """```python
import lightgbm
scores = lightgbm.Booster(model_file="model.txt").predict(matrix, raw_score=True)
```""",
    "xgboost": """`model.ubj` and `model.json` are the same model:

```python
import xgboost
booster = xgboost.Booster(model_file="model.ubj")
rows = xgboost.DMatrix(
    matrix, feature_names=booster.feature_names, feature_types=booster.feature_types, enable_categorical=True
)
scores = booster.predict(rows, output_margin=True)
```""",
    "onnx": """```python
import onnxruntime
scores = onnxruntime.InferenceSession("model.onnx").run(["scores"], {"features": matrix})[0]
```""",
    "treelite": """```python
import treelite
model = treelite.Model.deserialize("checkpoint.tl")
scores = treelite.gtil.predict(model, matrix, pred_margin=True).reshape(-1)
```

In a model repository of Triton, the files are `NAME/config.pbtxt` and `NAME/1/checkpoint.tl`.""",
    "elasticsearch": """```sh
curl -X PUT localhost:9200/_ltr
curl -X PUT localhost:9200/_ltr/_featureset/NAME -H 'Content-Type: application/json' -d @featureset.json
curl -X POST localhost:9200/_ltr/_featureset/NAME/_createmodel -H 'Content-Type: application/json' -d @model.json
```

The queries of `featureset.json` take each value from the numeric field of the same name; change them if your features
come from elsewhere, but keep their names. No score is negative, so a feature `x` with values below 0 has two queries,
`x` for max(x, 0) and `x_negative` for max(-x, 0).""",
    "vespa": """Put `model.json` below `models/` of the application package, and define a function for each feature:

```
rank-profile ranker {
    function price() { expression: attribute(price) }
    first-phase { expression: lightgbm("model.json") }
}
```

The features have the names of `label`. Categories are text: their functions take attributes of type string.""",
}


_OF_ROWS = """
`raw_rows.py` makes the matrix of rows of the raw log; it needs Python 3.9 or later alone, and `raw_rows.json`, which
has the recipe of each feature:

```python
import raw_rows
matrix = [raw_rows.inputs(row) for row in raw_rows.read("rows.csv")]
```

A row is a dict with the columns of the log. One that cannot be used raises `raw_rows.RowError` with the reason.
"""
_OF_FIELDS = """
`raw_rows.py` makes the values of the numeric fields, in the order of `features.json`, of a row of the raw log:
`raw_rows.features(row)`, NaN for a field without a value. It needs Python 3.9 or later alone, and `raw_rows.json`,
which has the recipe of each feature. A row that cannot be used raises `raw_rows.RowError` with the reason.
"""


def card(features: ExportedFeatures, documents: int, difference: float, *, rows: bool = False) -> str:
    """The card's text.

    Args:
        features: columns of the export.
        documents: number of documents whose scores were compared.
        difference: the largest difference that was found.
        rows: whether the export has the transformer of raw rows.
    """
    use = _USES["elasticsearch" if features.to == "opensearch" else features.to]
    of_rows = (_OF_ROWS if features.to in _MATRIX else _OF_FIELDS) if rows else ""
    reads = _matrix(features) if features.to in _MATRIX else _engine(features)
    return f"""# {_TITLES[features.to]}

The model scores documents; higher is better.

{use}

{reads}
{of_rows}
Before this was published, the scores of a reader that has these files only were compared with the ranker's own on
{documents:,} documents: they were at most {difference:.3g} apart (`parity.json`).
"""


def _matrix(features: ExportedFeatures) -> str:
    categorical = sum(column.kind == "categorical" for column in features.columns)
    if features.to == "onnx":
        number = "its code; one that the network has not learnt is the same as a missing one"
    else:
        number = "the place of its code in the column's `codes`, counted from 0; NaN if it is not listed"
    return f"""`matrix` has one row a document, of single precision, and {len(features.columns)} columns,
{categorical} of them categorical, as `features.json` lists them in order:

- a numeric column has the raw value, a categorical one a number; a missing value is NaN;
- the number of a category is {number};
- `values` has the numbers of the texts that were recorded. The code of a whole number below 2^24 is that number; that
  of another text is `int.from_bytes(digest, "little") >> 40`, where the digest is
  `hashlib.blake2b(b"category\\0" + text.encode(), digest_size=8).digest()`."""


def _engine(features: ExportedFeatures) -> str:
    missing = "is read as 0" if features.missing == "zero" else "stays missing: it goes where the model says"
    return f"""`features.json` lists the features: `name` in the data set, `label` in the model. A missing value
{missing}."""
