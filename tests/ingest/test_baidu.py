"""Files in the form of Baidu-ULTR: made up, with each kind of bad row, which is named by file and line."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from preparing import prepare, rejections_of, rows_of
from token_columns import lists_of

from ltrscale.data.dataset.manifest import Dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.ingest import baidu, lines
from ltrscale.ingest.inputs import PrepareConfig

REST = ["0", "0", "0", "12.5", *["0"] * 18]  # how a document was shown, which nothing reads


def ids(*tokens: int) -> str:
    return "\x01".join(map(str, tokens))


def query(qid: int | str, *tokens: int) -> str:
    return "\t".join([str(qid), ids(*tokens), ids(7, 7)])


def document(position: Any, title: str, abstract: str, click: Any, *, url: str = "", media: str = "599") -> str:
    return "\t".join([str(position), url or f"md5-{position}-{title}", title, abstract, media, str(click), *REST])


SESSIONS = [
    query(11, 1, 2, 3),
    document(1, ids(1, 9), ids(4, 5, 6), 0),
    document(2, ids(2), "", 1, media=""),
    "",
    query(11, 1, 2, 3),  # the same query in another session
    document(1, ids(3), ids(21_989), 1),
]
BAD = {
    document(1, ids(1), ids(1), 0, url="early"): "a document before any query",
    "12\t1": "2 fields where a query has 3, in line 2; the documents after it have no query",
    document(1, ids(1), ids(1), 0): "2 fields where a query has 3, in line 2; the documents after it have no query",
    query("", 1): "no query id, in line 4; the documents after it have no query",
    query(13, 1): "",  # no document
    query(14, 1): "",
    "1\tmd5\t5\t6\t0\t1": "6 fields where a query has 3 and a document more than 6",
    document("one", ids(1), ids(1), 0): "position 'one' is no number",
    document(3, ids(1), ids(1), "yes"): "click 'yes' is no number",
    document(4, "1\x01two", ids(1), 0): "title has 'two', which is no token id",
    document(5, ids(1), ids(1, 21_990), 0): "abstract: token 21990 is not in the vocabulary of 21,990",
    document(6, ids(1), ids(5), 0): "",  # good
    "15\t\t": "",  # a query without tokens
    document(1, ids(1), ids(2), 0, url="silent"): "query has no text",
}


def made(path: Path, out: Path, **source: Any) -> Dataset:
    source = {"kind": "baidu_ultr", **source}
    config = {"inputs": str(path), "source": source, "max_rejected": 0.99}
    return prepare(PrepareConfig.model_validate(config), str(out))


@pytest.mark.parametrize("name", ["part-00001", "part-00001.gz"])
def test_sessions_keep_their_lists_clicks_and_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(baidu._MOST_TOKENS, "abstract", 2)
    text = "\n".join(SESSIONS) + "\n"
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    dataset = made(tmp_path / name, tmp_path / "set")
    rows = rows_of(dataset)
    assert [row["query_id"] for row in rows] == ["11:part-00001:1", "11:part-00001:5"]
    assert [row["meta_qid"] for row in rows] == ["11", "11"]
    assert [row["positions"] for row in rows] == [[1, 2], [1]]
    assert [row["clicks"] for row in rows] == [row["labels"] for row in rows] == [[0, 1], [1]]
    assert rows[0]["doc_ids"][0] == f"md5-1-{ids(1, 9)}"
    np.testing.assert_array_equal(rows[0]["features"], [3, 2, 3, 599, 3, 1, 0, np.nan])
    [groups] = iterate(
        select(Split(data=(dataset.url,)), labelled=True).reading(query=["query"], document=["title", "abstract"])
    )
    assert lists_of(groups.query_tokens["query"]) == [[1, 2, 3], [1, 2, 3]]
    assert lists_of(groups.document_tokens["title"]) == [[1, 9], [2], [3]]
    assert lists_of(groups.document_tokens["abstract"]) == [[4, 5], [], [21_989]]
    assert dataset.manifest.vocabulary is not None
    assert min(dataset.manifest.vocabulary.special.values()) == 21_990
    assert dataset.manifest.token_summaries["document_tokens_abstract"].cut_tokens == 1


@pytest.mark.parametrize("block", [64, 1 << 22])
def test_each_bad_row_is_named_by_file_and_line(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_BLOCK", block)
    path = tmp_path / "part-00000"
    path.write_text("\n".join([*BAD, query(16, 9)]))
    dataset = made(path, tmp_path / "set")
    found = {row["line"]: row for row in rejections_of(dataset)}
    for line, (text, message) in enumerate(BAD.items(), start=1):
        if message:
            assert found[line]["file"] == str(path)
            assert found[line]["found"] == message
            assert found[line]["text"].startswith(f"{message}: {text[:20]}")
    assert [line for line, row in found.items() if row["rule"] == "empty_group"] == [5, 15]
    assert [line for line, row in found.items() if row["rule"] == "bad_tokens"] == [10, 11, 14]
    assert found.keys() - {5, 15} == {line for line, message in enumerate(BAD.values(), start=1) if message}
    assert [(row["query_id"], row["positions"]) for row in rows_of(dataset)] == [("14:part-00000:6", [6])]
    accounting = dataset.manifest.accounting
    assert accounting.rows_in == accounting.rows_kept + accounting.rows_rejected == 9


def test_judgements_have_labels_and_buckets(tmp_path: Path) -> None:
    lines = [
        ("21", ids(1, 2), ids(3), ids(4), "3", "0"),
        ("21", ids(1, 2), ids(5), "", "0", "0"),
        ("22", ids(8), ids(9), ids(1), "4", "9"),
        ("22", ids(8), ids(9), ids(1), "good", "9"),
        ("22", ids(8), ids(9), ids(1), "1"),
        ("", ids(8), ids(9), ids(1), "1", "9"),
    ]
    (tmp_path / "annotation.txt").write_text("\n".join("\t".join(line) for line in lines))
    dataset = made(tmp_path / "annotation.txt", tmp_path / "set", layout="judgements")
    rows = rows_of(dataset)
    assert [(row["query_id"], row["labels"], row["meta_bucket"]) for row in rows] == [("21", [3, 0], 0), ("22", [4], 9)]
    assert [(row["line"], row["found"]) for row in rejections_of(dataset)] == [
        (4, "label 'good' is no number"),
        (5, "5 fields where 6 belong"),
        (6, "no query id"),
    ]


def test_a_document_without_a_title_can_be_rejections_of(tmp_path: Path) -> None:
    (tmp_path / "part").write_text("\n".join([query(1, 1), document(1, "", ids(2), 1), document(2, ids(1), ids(2), 0)]))
    dataset = made(tmp_path / "part", tmp_path / "set", missing="reject")
    assert [(row["line"], row["found"]) for row in rejections_of(dataset)] == [(2, "title has no text")]
