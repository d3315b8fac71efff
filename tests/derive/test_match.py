"""Appending exact-match features: right for every document, by the statistics of the training periods alone."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from preparing import prepare, rows_of
from reference import matching as slow

from ltrscale import storage
from ltrscale.data.dataset.manifest import Dataset, open_dataset
from ltrscale.data.dataset.origin import origins
from ltrscale.derive.match import MEASURES, TokenLists, collect, gather_statistics, match_measures, merge
from ltrscale.derive.relabel import RelabelConfig, RelabelJob
from ltrscale.derive.rewrite import read_groups
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig

SIZE = 30
WEEKS = ("w1", "w1", "w1", "w2", "w2")


def documents(seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "d": f"d{i}",
            "title": rng.integers(0, SIZE, rng.integers(0, 4)).tolist(),
            "body": rng.integers(0, SIZE, 9).tolist(),
        }
        for i in range(12)
    ]


def log(folder: Path, *, ids: bool = True, name: str = "log") -> Path:
    """Five queries, each with some of twelve documents; a document is in several lists."""
    rng, known = np.random.default_rng(1), documents()
    rows = []
    for q, week in enumerate(WEEKS):
        words = rng.integers(0, SIZE, 3).tolist()
        for i in rng.permutation(6 if week == "w1" else 12)[:4].tolist():
            rows.append({"q": f"q{q}", "week": week, "x": 1.0, "y": float(i % 2), "words": words, **known[i]})
    table = pa.Table.from_pylist(rows)
    pq.write_table(table if ids else table.drop_columns("d"), folder / f"{name}.parquet")
    return folder / f"{name}.parquet"


def prepared(path: Path, out: Path, **columns: Any) -> Dataset:
    tokens = {
        "tokenizer": {"kind": "ids", "size": SIZE},
        "query": {"words": {"column": "words"}},
        "document": {name: {"column": name} for name in ("title", "body")},
    }
    named = {"query": "q", "item": "d", "label": "y", "period_column": "week", "features": ["x"], "tokens": tokens}
    source = {"kind": "items", "columns": named | columns}
    return prepare(PrepareConfig.model_validate({"inputs": str(path), "source": source}), str(out))


def matched(data: str, out: Path, *steps: dict[str, Any], **settings: Any) -> Dataset:
    match = {"kind": "match", "counted": ["w1"], **settings}
    RelabelJob.model_validate({"data": data, "out": str(out), "relabel": {"steps": [match, *steps]}}).run()
    return open_dataset(str(out))


def expected(path: Path, texts: dict[str, Sequence[str]]) -> dict[tuple[str, int], list[float]]:
    """The new features of each row, by query and place in its list."""
    rows = pq.read_table(path).to_pylist()
    training = {str(row["title"] + [-1] + row["body"]): row for row in rows if row["week"] == "w1"}
    found: dict[tuple[str, int], list[float]] = {}
    place: dict[str, int] = {}
    for row in rows:
        place[row["q"]] = place.get(row["q"], -1) + 1
        values = []
        for columns in texts.values():
            known = [[token for column in columns for token in one[column]] for one in training.values()]
            own = [token for column in columns for token in row[column]]
            measures = slow.measures(row["words"], own, known, SIZE + 5)
            values += [measures[name] for name in MEASURES]
        found[row["q"], place[row["q"]]] = values
    return found


ALL = {"title": ("title",), "body": ("body",), "all": ("title", "body")}


@pytest.mark.slow
@pytest.mark.parametrize("ids", [True, False])
def test_each_document_has_the_measures_of_its_texts(ids: bool, tmp_path: Path) -> None:
    path = log(tmp_path, ids=ids)
    data = prepared(path, tmp_path / "data", item="d" if ids else None)
    out = matched(data.url, tmp_path / "out")
    names = [feature.name for feature in out.manifest.features]
    assert names == ["x", *(f"{measure}_{text}" for text in ALL for measure in MEASURES)]
    values = expected(path, ALL)
    for old, new in zip(rows_of(data), rows_of(out), strict=True):
        features_NF = np.array(new["features"], np.float32).reshape(-1, len(names))
        for place, row in enumerate(features_NF):
            assert row[0] == 1
            np.testing.assert_allclose(row[1:], values[new["query_id"], place], rtol=1e-5, atol=1e-6)
        assert {k: v for k, v in old.items() if k != "features"} == {k: v for k, v in new.items() if k != "features"}
    assert out.manifest.counts() == data.manifest.counts()
    assert (out.manifest.tokens, out.manifest.token_summaries) == (data.manifest.tokens, data.manifest.token_summaries)
    assert out.manifest.vocabulary == data.manifest.vocabulary
    assert origins(out)("w1") & origins(data)("w1")  # so that splits do not mix the two


@pytest.mark.slow
@pytest.mark.parametrize("groups_per_block", [1, 2, 5])
@pytest.mark.parametrize("known", [0, 6, 12])
def test_a_document_counts_once_however_blocks_are_cut(groups_per_block: int, known: int, tmp_path: Path) -> None:
    """Only the first `known` documents have ids, so blocks differ in whether all documents have one."""
    data, texts = prepared(log(tmp_path), tmp_path / "data"), {"title": ("document_tokens_title",)}
    blocks, everywhere = [], set()
    for block in read_groups(data, periods=data.manifest.periods):
        assert block.doc_ids_N is not None
        ids = block.doc_ids_N.to_pylist()
        everywhere |= set(ids)
        some = replace(block, doc_ids_N=pa.array([i if int(i[1:]) < known else None for i in ids], pa.string()))
        starts = range(0, len(block), groups_per_block)
        blocks += [some.keep(np.arange(len(block)) // groups_per_block == k) for k in range(len(starts))]
    assert {None in block.doc_ids_N.to_pylist() for block in blocks} == {known < 12} | (
        {False} if known == 6 else set()
    )
    assert data.manifest.vocabulary is not None
    (tmp_path / "folder").mkdir()
    found = gather_statistics(blocks, texts, data.manifest.vocabulary, ["w1"], tmp_path / "folder").texts["title"]
    titles = [document["title"] for document in documents() if document["d"] in everywhere]
    assert found.documents == len(titles)
    assert found.occurrences_V.sum() == sum(map(len, titles))


@pytest.mark.slow
def test_later_data_can_have_the_same_statistics(tmp_path: Path) -> None:
    path = log(tmp_path)
    whole = matched(prepared(path, tmp_path / "data").url, tmp_path / "whole")
    table = pq.read_table(path)
    weeks = np.array(table["week"].to_pylist())
    parts = []
    for week in ("w1", "w2"):
        pq.write_table(table.filter(pa.array(weeks == week)), tmp_path / f"{week}.parquet")
        parts.append(prepared(tmp_path / f"{week}.parquet", tmp_path / week).url)
    first = matched(parts[0], tmp_path / "first")
    later = matched(parts[1], tmp_path / "later", counted=[], statistics=first.url)
    last = matched(parts[1], tmp_path / "last", counted=[], statistics=later.url)  # which keeps them too
    both = [row["features"] for part in (first, later) for row in rows_of(part)]
    assert both == [row["features"] for row in rows_of(whole)]
    assert rows_of(later) == rows_of(last)
    assert later.manifest.statistics is not None
    assert first.manifest.statistics is not None
    assert later.manifest.statistics.sha256 == first.manifest.statistics.sha256


def test_damaged_statistics_are_named(tmp_path: Path) -> None:
    data = prepared(log(tmp_path), tmp_path / "data").url
    out = matched(data, tmp_path / "out")
    assert out.manifest.statistics is not None
    path = Path(out.url) / out.manifest.statistics.path
    known = path.read_bytes()
    path.write_bytes(known[:-8])
    with pytest.raises(InputError, match=r"its content is not what was committed"):
        matched(data, tmp_path / "other", counted=[], statistics=out.url)
    for content, message in ((b"\0" * 40, "no statistics of texts"), (known[:-8], "no statistics of texts")):
        place = Path(out.url) / storage.MANIFEST
        values = json.loads(place.read_text())
        path.write_bytes(content)
        values["statistics"] |= {"sha256": storage.sha256(path), "bytes": len(content)}
        place.write_text(json.dumps(values))
        with pytest.raises(InputError, match=message):
            matched(data, tmp_path / "other", counted=[], statistics=out.url)


@pytest.mark.slow
def test_a_relabelled_data_set_keeps_the_statistics(tmp_path: Path) -> None:
    out = matched(prepared(log(tmp_path), tmp_path / "data").url, tmp_path / "out")
    steps = RelabelConfig.model_validate({"steps": [{"kind": "min_docs", "documents": 2}]})
    other = str(tmp_path / "other")
    RelabelJob(relabel=steps, data=out.url, out=other).work({"stage": "relabel"}, lambda _: None)
    again = matched(prepared(log(tmp_path), tmp_path / "more").url, tmp_path / "again", counted=[], statistics=other)
    assert rows_of(again) == rows_of(out)


@pytest.mark.slow
def test_appending_features_changes_no_label_that_a_later_step_draws(tmp_path: Path) -> None:
    data, steps = prepared(log(tmp_path), tmp_path / "data").url, [{"kind": "labelled_fraction", "fraction": 0.5}]
    RelabelJob.model_validate({"data": data, "out": str(tmp_path / "alone"), "relabel": {"steps": steps}}).run()
    alone, beside = rows_of(open_dataset(str(tmp_path / "alone"))), rows_of(matched(data, tmp_path / "beside", *steps))
    assert [row["labels"] for row in alone] == [row["labels"] for row in beside]


@pytest.mark.slow
def test_later_steps_read_the_new_features(tmp_path: Path) -> None:
    data, order = prepared(log(tmp_path), tmp_path / "data").url, {"kind": "click_order", "feature": "bm25_all"}
    once, first = matched(data, tmp_path / "once", order), matched(data, tmp_path / "first").url
    RelabelJob.model_validate({"data": first, "out": str(tmp_path / "twice"), "relabel": {"steps": [order]}}).run()
    assert rows_of(once) == rows_of(open_dataset(str(tmp_path / "twice")))
    assert "relevance" in rows_of(once)[0]
    with pytest.raises(
        InputError, match=r"no standard deviation of feature 'bm25_all'; .* or append it in another job"
    ):
        matched(data, tmp_path / "no", {"kind": "refine", "feature": "bm25_all"})
    with pytest.raises(ValueError, match="match counts the documents before min_docs changes them; put it first"):
        RelabelConfig.model_validate({"steps": [{"kind": "min_docs"}, {"kind": "match", "counted": "w1"}]})


def test_special_tokens_match_nothing(tmp_path: Path) -> None:
    rows = [{"q": "a", "week": "w1", "x": 1.0, "y": 1.0, "words": [0, 1], "d": "1", "title": [0], "body": [1]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    tokens = {
        "tokenizer": {"kind": "ids", "size": SIZE, "special": {"unk": 0}},
        "query": {"words": {"column": "words"}},
        "document": {name: {"column": name} for name in ("title", "body")},
    }
    data = prepared(tmp_path / "log.parquet", tmp_path / "data", tokens=tokens)
    out = matched(data.url, tmp_path / "out", together=False)
    [row] = rows_of(out)
    values = dict(zip((feature.name for feature in out.manifest.features), row["features"], strict=True))
    assert (values["tf_title"], values["tf_body"]) == (0, 1)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"query": "word"}, "no tokens 'word'; did you mean 'words'"),
    ({"documents": ["abstract"]}, "no tokens 'abstract'; there are title, body"),
    ({"counted": ["w3"]}, "there is no period 'w3'"),
    ({"counted": [], "statistics": "DATA"}, "it keeps no statistics of texts"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "message"), BAD)
def test_what_does_not_fit_is_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    data = prepared(log(tmp_path), tmp_path / "data").url
    settings = {name: data if value == "DATA" else value for name, value in settings.items()}
    with pytest.raises(InputError, match=message):
        matched(data, tmp_path / "out", **settings)


@pytest.mark.slow
def test_statistics_of_other_texts_are_refused(tmp_path: Path) -> None:
    data = prepared(log(tmp_path), tmp_path / "data").url
    titles = matched(data, tmp_path / "titles", documents=["title"])
    with pytest.raises(InputError, match="no statistics of text 'body'; it has title"):
        matched(data, tmp_path / "out", counted=[], statistics=titles.url)
    with pytest.raises(InputError, match="has a feature 'tf_title' already"):
        matched(titles.url, tmp_path / "out", documents=["title"])
    tokens = {"tokenizer": {"kind": "ids", "size": SIZE + 1}, "query": {"words": {"column": "words"}}}
    tokens["document"] = {"title": {"column": "title"}}
    other = prepared(log(tmp_path), tmp_path / "other", tokens=tokens).url
    with pytest.raises(InputError, match="its vocabulary is not that of"):
        matched(other, tmp_path / "out", counted=[], statistics=titles.url)
    plain = prepared(log(tmp_path), tmp_path / "plain", tokens=None).url
    with pytest.raises(InputError, match="it has no tokens of queries and documents"):
        matched(plain, tmp_path / "out")


VOCABULARY = 12
texts = st.lists(st.integers(0, VOCABULARY - 1), max_size=8)


def lists(values: list[list[int]]) -> TokenLists:
    flat = np.array([token for value in values for token in value], np.int64)
    return TokenLists(flat, np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype(np.int64))


@given(st.lists(st.tuples(texts, st.lists(texts, max_size=4)), min_size=1, max_size=4), st.lists(texts, min_size=1))
def test_all_measures_are_those_of_the_slow_formulas(
    groups: list[tuple[list[int], list[list[int]]]], known: list[list[int]]
) -> None:
    documents = [document for _, documents in groups for document in documents]
    query_N = np.repeat(np.arange(len(groups)), [len(documents) for _, documents in groups])
    queries, collection = lists([query for query, _ in groups]), collect(lists(known), VOCABULARY)
    found = match_measures(queries, lists(documents), query_N, collection)
    assert tuple(found) == MEASURES
    for n, (q, document) in enumerate(zip(query_N.tolist(), documents, strict=True)):
        expected = slow.measures(groups[q][0], document, known, VOCABULARY)
        assert {name: values[n] for name, values in found.items()} == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(st.lists(texts, min_size=1), st.lists(texts, min_size=1))
def test_collections_add_up(one: list[list[int]], other: list[list[int]]) -> None:
    both, parts = (
        collect(lists(one + other), VOCABULARY),
        merge(collect(lists(one), VOCABULARY), collect(lists(other), VOCABULARY)),
    )
    assert both.documents == parts.documents
    np.testing.assert_array_equal(both.frequency_V, parts.frequency_V)
    np.testing.assert_array_equal(both.occurrences_V, parts.occurrences_V)


@pytest.mark.slow
def test_bm25_is_that_of_bm25s() -> None:
    import bm25s  # loads JAX, which no other process of the tests needs

    rng = np.random.default_rng(0)
    size = 500
    documents = [rng.zipf(1.3, rng.integers(1, 60)).clip(max=size - 1).tolist() for _ in range(300)]
    queries = [rng.choice(size // 4, 6).tolist() for _ in range(20)]
    library = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    library.index([list(map(str, document)) for document in documents], show_progress=False)
    collection = collect(lists(documents), size)
    for query in queries:
        found = match_measures(lists([query]), lists(documents), np.zeros(300, np.int64), collection)
        np.testing.assert_allclose(found["bm25"], library.get_scores(list(map(str, query))), rtol=1e-5, atol=1e-6)


@given(st.permutations(range(5)))
def test_the_order_of_documents_does_not_matter(order: list[int]) -> None:
    documents, collection = [[1, 2], [], [2, 2, 3], [5], [1, 1]], collect(lists([[1, 2], [2, 3]]), VOCABULARY)
    query_N = np.zeros(5, np.int64)
    plain = match_measures(lists([[2, 2, 7]]), lists(documents), query_N, collection)
    moved = match_measures(lists([[2, 2, 7]]), lists([documents[i] for i in order]), query_N, collection)
    for name in MEASURES:
        np.testing.assert_array_equal(moved[name], plain[name][order])
