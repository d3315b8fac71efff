"""A ranker of text from raw rows to ranked items of other raw rows."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ltrscale import bundle
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.scoring.predict import PredictJob
from ltrscale.training.finetune import FinetuneJob

WORDS = ["apple", "pear", "plum", "good", "bad", "old", "new"]


def rows(path: Path, queries: int, seed: int, *, labels: bool) -> str:
    """Rows of five items a query; a title with `good` is relevant."""
    draw, lines = random.Random(seed), []
    for q in range(queries):
        for n in range(5):
            title = " ".join(draw.choices(WORDS, k=3))
            row: dict[str, Any] = {"q": f"{seed}-{q}", "item": f"i{n}", "ask": draw.choice(WORDS[:3]), "title": title}
            row |= {"price": draw.random(), "week": "a" if q % 2 else "b"}
            if labels:
                row["y"] = float("good" in title)
            lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.slow
def test_new_rows_are_ranked_by_their_text(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    tokens = {
        "tokenizer": {"kind": "wordpiece", "path": str(vocabulary)},
        "query": {"query": {"column": "ask", "max_tokens": 4}},
        "document": {"title": {"column": "title", "max_tokens": 8}},
    }
    columns = {"query": "q", "item": "item", "label": "y", "period_column": "week", "features": ["price"]}
    source = {"kind": "items", "columns": {**columns, "tokens": tokens}}
    train = rows(tmp_path / "train.jsonl", 60, 0, labels=True)
    prepare = {"inputs": train, "source": source, "max_rejected": 0.9}
    PrepareJob.model_validate({"out": str(tmp_path / "data"), "prepare": prepare}).run()
    encoder = {"kind": "cross_encoder", "bert": {"layers": 1, "width": 16, "heads": 2}, "document": ["title"]}
    values = {
        "out": str(tmp_path / "ranker"),
        "splits": {
            name: {"data": str(tmp_path / "data"), "periods": p} for name, p in (("train", "a"), ("validation", "b"))
        },
        "finetune": {
            "network": {"encoder": encoder},
            "epochs": 30,
            "optimizer": {"learning_rate": 0.01},
            "stream": {"docs_per_batch": 25},
        },
    }
    FinetuneJob.model_validate(values).run()
    assert bundle.load(str(tmp_path / "ranker")).reads_tokens
    new = rows(tmp_path / "new.jsonl", 20, 1, labels=False)
    PredictJob.model_validate(
        {"out": str(tmp_path / "ranked"), "inputs": new, "bundle": str(tmp_path / "ranker")}
    ).run()
    titles = {(row["q"], row["item"]): row["title"] for row in map(json.loads, Path(new).read_text().splitlines())}
    found = [row for path in sorted(tmp_path.glob("ranked/period=*/*.parquet")) for row in read(path)]
    assert len(found) == len(titles) == 100
    good = [row["rank"] for row in found if "good" in titles[row["query_id"], row["item_id"]]]
    bad = [row["rank"] for row in found if "good" not in titles[row["query_id"], row["item_id"]]]
    assert sum(good) / len(good) < sum(bad) / len(bad) - 1


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file."""
    rows: list[dict[str, Any]] = pq.ParquetFile(path).read().to_pylist()
    return rows
