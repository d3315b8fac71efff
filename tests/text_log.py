"""Adds texts to a data set: a token of the title names the label, where there is one."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from dataset_columns import add_column

from ltrscale import storage
from ltrscale.data.dataset.columns import LISTS, TokenField, Vocabulary, lengths_of
from ltrscale.data.dataset.manifest import open_dataset

QUERY = TokenField(name="query", of="query", max_tokens=3)
TITLE = TokenField(name="title", of="document", max_tokens=4)
BODY = TokenField(name="body", of="document", max_tokens=8)
SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
SIZE = 40
ENCODER: dict[str, Any] = {
    "kind": "cross_encoder",
    "bert": {"layers": 1, "width": 16, "heads": 2, "positions": 24, "dropout": 0.1},
    "max_tokens": 16,
    "features": [8],
}
"""A small cross-encoder of these texts."""
STREAM = {"docs_per_batch": 300, "tokens_per_batch": 4000, "streams": 2}
"""Batches for it."""


def add_text(url: str, *, sha256: str = "") -> None:
    """Add a query, titles and bodies to all groups of a data set."""
    lists: dict[str, dict[int, list[list[int]]]] = {"query": {}, "title": {}, "body": {}}
    for path in sorted(Path(url).glob("period=*/*.parquet")):
        table = pq.read_table(path, columns=["gid", "doc_ids", "labels"], partitioning=None)
        for gid, ids, labels in zip(*(table[name].to_pylist() for name in table.column_names), strict=True):
            draw = random.Random(gid)
            lists["query"][gid] = [draw.choices(range(5, 15), k=draw.randrange(4))]
            known = labels or [None] * len(ids)
            titles = [[*draw.choices(range(15, 20), k=draw.randrange(3))] for _ in known]
            for title, label in zip(titles, known, strict=True):
                title.append(25 if label else draw.randrange(26, 30))
            lists["title"][gid] = titles
            lists["body"][gid] = [draw.choices(range(30, SIZE), k=draw.randrange(9)) for _ in known]
    for field in (QUERY, TITLE, BODY):
        flat = {gid: [token for tokens in of for token in tokens] for gid, of in lists[field.name].items()}
        add_column(url, field.column, LISTS, flat.__getitem__)
        if field.of == "document":
            sizes = {gid: [len(tokens) for tokens in of] for gid, of in lists[field.name].items()}
            add_column(url, lengths_of(field.column), LISTS, sizes.__getitem__)
    vocabulary = Vocabulary(size=SIZE, special=SPECIAL, sha256=sha256)  # type: ignore[arg-type]
    manifest = open_dataset(url).manifest.replace(
        tokens=[field.model_dump() for field in (QUERY, TITLE, BODY)], vocabulary=vocabulary.model_dump()
    )
    (Path(url) / storage.MANIFEST).write_text(json.dumps(manifest.model_dump(mode="json")))
