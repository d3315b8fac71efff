"""Tokens of texts and of ready ids: all forms of a log give the same, and every bad row is named."""

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preparing import prepare, rejected
from token_columns import lists_of

from ltrscale import storage
from ltrscale.data.dataset.columns import TokenSummary
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.data.dataset.origin import prepare_settings_of, read_as
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.source import Needs

IDS = {"kind": "ids", "size": 100}
FIELDS = {
    "tokenizer": IDS,
    "query": {"words": {"column": "words", "max_tokens": 3}},
    "document": {"title": {"column": "title", "max_tokens": 2}, "body": {"column": "body", "missing": "empty"}},
}
ROWS = [
    {"q": "a", "x": 1.0, "words": [1, 2, 3, 4], "title": [5, 6, 7], "body": [8]},
    {"q": "a", "x": 2.0, "words": [99], "title": [9], "body": None},
    {"q": "b", "x": 3.0, "words": [10], "title": [], "body": [11, 12]},
]
TOKENS = {"words": [[1, 2, 3], [10]], "title": [[5, 6], [9], []], "body": [[8], [], [11, 12]]}


def config(path: Path | str, tokens: Mapping[str, Any], kind: str = "items", **more: Any) -> PrepareConfig:
    columns = {"query": "q", "features": ["x"], "tokens": tokens, **more.pop("columns", {})}
    if kind == "groups" and "names" not in columns:
        columns["n_features"] = 1
    source = {"kind": kind, "columns": columns, **more.pop("source", {})}
    return PrepareConfig.model_validate({"inputs": str(path), "source": source, "max_rejected": 0.9, **more})


def tokens_in(dataset: Dataset) -> dict[str, list[list[int]]]:
    """All tokens, by field, in file order."""
    selection = select(Split(data=(dataset.url,)), labelled=False)
    names = {of: [f.name for f in selection.token_fields if f.of == of] for of in ("query", "document")}
    found: dict[str, list[list[int]]] = {name: [] for of in names for name in names[of]}
    for groups in iterate(selection.reading(query=names["query"], document=names["document"])):
        for name, tokens in {**groups.query_tokens, **groups.document_tokens}.items():
            found[name] += lists_of(tokens)
    return found


def as_parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "log.parquet")
    return folder / "log.parquet"


def as_json(folder: Path) -> Path:
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder / "log.jsonl"


def as_text(folder: Path) -> Path:
    rows = [{k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()} for row in ROWS]
    rows[2]["title"] = " "  # empty, and not missing
    lines = ["\t".join("" if value is None else str(value) for value in row.values()) for row in rows]
    (folder / "log.tsv").write_text("\n".join(["\t".join(ROWS[0]), *lines]) + "\n")
    return folder / "log.tsv"


def as_groups(folder: Path) -> Path:
    groups = [
        {
            "q": q,
            "x": [row["x"] for row in ROWS if row["q"] == q],
            "words": next(row["words"] for row in ROWS if row["q"] == q),
            "title": [row["title"] for row in ROWS if row["q"] == q],
            "body": [row["body"] for row in ROWS if row["q"] == q],
        }
        for q in "ab"
    ]
    pq.write_table(pa.Table.from_pylist(groups), folder / "groups.parquet")
    return folder / "groups.parquet"


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("form", [as_parquet, as_json, as_text, as_groups])
def test_all_forms_of_a_log_have_the_same_tokens(form: Any, sort: bool, tmp_path: Path) -> None:
    path = form(tmp_path)
    made = prepare(config(path, FIELDS, "groups" if form is as_groups else "items", sort=sort), str(tmp_path / "set"))
    assert tokens_in(made) == TOKENS
    manifest = made.manifest
    assert [(field.name, field.of, field.max_tokens) for field in manifest.tokens] == [
        ("words", "query", 3),
        ("title", "document", 2),
        ("body", "document", 128),
    ]
    assert manifest.token_summaries["query_tokens_words"] == TokenSummary(
        lists=2, tokens=4, longest=3, cut_lists=1, cut_tokens=1
    )
    assert manifest.token_summaries["document_tokens_title"] == TokenSummary(
        lists=3, empty=1, tokens=3, longest=2, cut_lists=1, cut_tokens=1
    )
    assert manifest.vocabulary is not None
    assert manifest.vocabulary.size == 105
    assert manifest.vocabulary.special == {"pad": 100, "unk": 101, "cls": 102, "sep": 103, "mask": 104}


def test_a_data_set_read_back_as_group_rows_is_the_same_data_set(tmp_path: Path) -> None:
    first = prepare(config(as_parquet(tmp_path), FIELDS), str(tmp_path / "one"))
    fields = {
        "tokenizer": {"kind": "known", "path": first.url},
        "query": {"words": {"column": "query_tokens_words", "max_tokens": 3}},
        "document": {
            "title": {"column": "document_tokens_title", "lengths": "document_lengths_title", "max_tokens": 2},
            "body": {"column": "document_tokens_body", "lengths": "document_lengths_body"},
        },
    }
    columns = {"query": "query_id", "features": ["features"], "names": ["x"], "period_column": "period"}
    second = prepare(
        config(f"{first.url}/period=*/*.parquet", fields, "groups", columns=columns), str(tmp_path / "two")
    )
    assert second.manifest.hash == first.manifest.hash
    assert tokens_in(second) == TOKENS


BAD = [
    ([100], r"title: token 100 is not in the vocabulary of 100 ids"),
    ([-1], r"title: token -1 is not in the vocabulary"),
    ([1.5], r"title has a token that is no whole number"),
    ([None], r"title has a token that is no whole number"),
    (None, r"title has no text"),
]


@pytest.mark.parametrize(("value", "message"), BAD)
@pytest.mark.parametrize("kind", ["items", "groups"])
def test_a_bad_row_is_named_with_its_field_and_value(kind: str, value: Any, message: str, tmp_path: Path) -> None:
    fields = {"tokenizer": IDS | {"special": {"unk": 0, "pad": 1, "cls": 2, "sep": 3, "mask": 4}}}
    fields["document"] = {"title": {"column": "title"}}
    rows = [
        {"q": "a", "x": 1.0, "title": [1]},
        {"q": "b", "x": 1.0, "title": value},
        {"q": "c", "x": 1.0, "title": [2]},
    ]
    if kind == "groups":
        rows = [{"q": row["q"], "x": [row["x"]], "title": [row["title"]]} for row in rows]
    ids = pa.list_(pa.float64())
    schema = pa.schema([("q", pa.string()), ("x", pa.float64()), ("title", ids)])
    if kind == "groups":
        schema = pa.schema([("q", pa.string()), ("x", pa.list_(pa.float64())), ("title", pa.list_(ids))])
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "log.parquet")
    made = prepare(config(tmp_path / "log.parquet", fields, kind), str(tmp_path / "set"))
    [(line, rule, found)] = rejected(made)
    assert (line, rule) == (2, "bad_tokens")
    assert re.match(message.removesuffix(" ids"), found)
    assert tokens_in(made) == {"title": [[1], [2]]}
    assert made.manifest.accounting.rows_rejected == 1


def test_text_that_is_no_id_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("q,x,title\na,1,1 2\nb,1,1 two\nc,1,\nd,1,7\n")
    fields = {"tokenizer": IDS, "document": {"title": {"column": "title"}}}
    made = prepare(config(tmp_path / "log.csv", fields), str(tmp_path / "set"))
    assert rejected(made) == [
        (3, "bad_tokens", "title has 'two', which is no token id"),
        (4, "bad_tokens", "title has no text"),
    ]
    assert tokens_in(made) == {"title": [[1, 2], [7]]}


def test_lengths_that_do_not_fit_are_named(tmp_path: Path) -> None:
    rows = [
        {"q": "a", "x": [1.0, 2.0], "t": [1, 2, 3], "n": [1, 2]},
        {"q": "b", "x": [1.0, 2.0], "t": [1, 2, 3], "n": [1, 1]},
        {"q": "c", "x": [1.0, 2.0], "t": [1, 2, 3], "n": [3]},
        {"q": "d", "x": [1.0], "t": [4], "n": [1]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    fields = {"tokenizer": IDS, "document": {"t": {"column": "t", "lengths": "n"}}}
    made = prepare(config(tmp_path / "log.parquet", fields, "groups"), str(tmp_path / "set"))
    assert [line for line, _, _ in rejected(made)] == [2, 3]
    assert tokens_in(made) == {"t": [[1], [2, 3], [4]]}


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "run", "##ning", "cafe", ".", "the"]


def pieces_of(text: str) -> list[int]:
    """WordPiece as its paper says it: the longest piece first, the whole word unknown if a rest has none."""
    ids = []
    for word in re.findall(r"\w+|[^\w\s]", text.lower().replace("é", "e")):
        found, start = [], 0
        while start < len(word):
            ends = range(len(word), start, -1)
            marked = [("##" if start else "") + word[start:end] for end in ends]
            end = next((e for e, piece in zip(ends, marked, strict=True) if piece in PIECES), None)
            if end is None:
                found = [1]
                break
            found.append(PIECES.index(("##" if start else "") + word[start:end]))
            start = end
        ids += found
    return ids


def write_texts(path: Path, texts: Sequence[str], periods: Sequence[str] = ()) -> Path:
    periods = periods or ["all"] * len(texts)
    table = {"q": [f"q{i}" for i in range(len(texts))], "x": [1.0] * len(texts), "text": texts, "week": periods}
    pq.write_table(pa.table(table), path)
    return path


def test_word_pieces_are_those_of_a_slow_tokenizer(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "vocab.txt.gz", "wt") as stream:
        stream.write("\n".join(PIECES) + "\n")
    texts = ["The unaffable café.", "running the run", "unknown", "the  the\tthe", "unaffx the", "!", ""]
    fields = {
        "tokenizer": {"kind": "wordpiece", "path": str(tmp_path / "vocab.txt.gz")},
        "document": {"text": {"column": "text", "missing": "empty"}},
    }
    made = prepare(config(write_texts(tmp_path / "log.parquet", texts), fields), str(tmp_path / "set"))
    assert tokens_in(made) == {"text": [pieces_of(text) for text in texts]}
    vocabulary = made.manifest.vocabulary
    assert vocabulary is not None
    assert (vocabulary.size, vocabulary.special["mask"]) == (len(PIECES), 4)
    assert storage.read_bytes(storage.join(made.url, str(vocabulary.path)))


def test_a_vocabulary_without_special_tokens_is_named(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\nthe\n")
    fields = {
        "tokenizer": {"kind": "wordpiece", "path": str(tmp_path / "vocab.txt")},
        "document": {"text": {"column": "text"}},
    }
    with pytest.raises(InputError, match=r"vocab.txt: no token \[CLS\], \[SEP\], \[MASK\]"):
        prepare(config(write_texts(tmp_path / "log.parquet", ["the"]), fields), str(tmp_path / "set"))


def trained(path: Path, out: Path, *periods: str, **more: Any) -> Dataset:
    fields = {
        "tokenizer": {"kind": "train", "size": 200, "periods": list(periods)},
        "document": {"text": {"column": "text"}},
    }
    columns = {"period_column": "week", "meta": more.pop("meta", [])}
    return prepare(config(path, fields, columns=columns, **more), str(out))


def test_a_tokenizer_is_trained_on_the_texts_of_its_periods_alone(tmp_path: Path) -> None:
    texts = ["wing flow wing", "flow over wings", "heat heat heater", "wing flow wing"]
    weeks = ["w1", "w1", "w2", "w2"]
    one = trained(write_texts(tmp_path / "log.parquet", texts, weeks), tmp_path / "one", "w1")
    vocabulary = one.manifest.vocabulary
    assert vocabulary is not None
    pieces = json.loads(storage.read_bytes(storage.join(one.url, str(vocabulary.path))))["model"]["vocab"]
    assert "wing" in pieces
    assert "heat" not in pieces
    assert not {"t", "##t"} & pieces.keys()  # no letter of the later week either
    again = trained(tmp_path / "log.parquet", tmp_path / "two", "w1")
    assert again.manifest.vocabulary is not None
    assert again.manifest.vocabulary.sha256 == vocabulary.sha256
    assert again.manifest.hash == one.manifest.hash
    changed = write_texts(tmp_path / "later.parquet", [*texts[:2], "other words", "of week two"], weeks)
    later = trained(changed, tmp_path / "three", "w1").manifest.vocabulary
    assert later is not None
    assert later.sha256 == vocabulary.sha256


@pytest.mark.parametrize("values", [[7, 8], ["heat", "zebra"]])
def test_a_tokenizer_learns_nothing_from_what_the_data_set_only_keeps(values: list[Any], tmp_path: Path) -> None:
    """As it was: a number ended in a traceback, and a text was learnt, where the name of its column had _tokens_."""
    log = write_texts(tmp_path / "log.parquet", ["wing flow", "flow over"], ["w1", "w1"])
    expected = trained(log, tmp_path / "without", "w1").manifest.vocabulary
    pq.write_table(pq.read_table(log).append_column("prompt_tokens_used", pa.array(values)), log)
    made = trained(log, tmp_path / "with", "w1", meta=["prompt_tokens_used"])
    assert expected is not None
    assert expected.same_as(made.manifest.vocabulary)


def test_a_vocabulary_too_small_for_the_letters_is_named(tmp_path: Path) -> None:
    letters = " ".join(map(chr, range(0x4E00, 0x4E00 + 150)))
    path = write_texts(tmp_path / "log.parquet", [letters])
    fields = {
        "tokenizer": {"kind": "train", "size": 150, "periods": ["all"]},
        "document": {"text": {"column": "text"}},
    }
    with pytest.raises(InputError, match=r"tokenizer\.size: the texts have 150 different letters; raise it"):
        prepare(config(path, fields), str(tmp_path / "set"))


def test_periods_without_text_are_named(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "log.parquet", ["wing"], ["w1"])
    with pytest.raises(InputError, match=r"tokenizer\.periods: w2 have no text to train on"):
        trained(path, tmp_path / "set", "w2")


def test_added_periods_have_the_vocabulary_of_the_data_set(tmp_path: Path) -> None:
    first = trained(write_texts(tmp_path / "a.parquet", ["wing flow wing"], ["w1"]), tmp_path / "set", "w1")
    more = write_texts(tmp_path / "b.parquet", ["wing heat"], ["w2"])
    table = pq.read_table(more)
    pq.write_table(table.set_column(0, "q", pa.array(["new"])), more)
    added = trained(more, tmp_path / "set", "w1", add=True)
    assert added.manifest.vocabulary == first.manifest.vocabulary
    assert added.manifest.token_summaries["document_tokens_text"].lists == 2
    assert storage.is_whole(added.url, storage.read_manifest(added.url) or {})
    wing = tokens_in(first)["text"][0][0]
    unknown = (first.manifest.vocabulary or pytest.fail("no vocabulary")).special["unk"]
    assert tokens_in(added)["text"][1] == [wing, unknown]
    other = {"tokenizer": IDS, "document": {"title": {"column": "text"}}}
    with pytest.raises(InputError, match=r"tokens 'title' of each document .* are in the inputs only"):
        prepare(config(more, other, columns={"period_column": "week"}, add=True), str(tmp_path / "set"))


def test_new_rows_are_read_with_the_tokenizer_of_the_data_set(tmp_path: Path) -> None:
    made = trained(
        write_texts(tmp_path / "log.parquet", ["wing flow wing", "heat"], ["w1", "w2"]), tmp_path / "set", "w1"
    )
    settings = prepare_settings_of(read_as(made))
    assert settings["source"]["columns"]["tokens"]["tokenizer"] == {"kind": "known", "path": str(tmp_path / "set")}
    new = write_texts(tmp_path / "new.parquet", ["flow of wing"], ["w9"])
    again = prepare(PrepareConfig.model_validate({**settings, "inputs": str(new)}), str(tmp_path / "new"))
    vocabularies = [each.manifest.vocabulary or pytest.fail("no vocabulary") for each in (made, again)]
    assert vocabularies[0].same_as(vocabularies[1])
    source = PrepareConfig.model_validate({**settings, "inputs": str(new)}).source
    features = made.manifest.features
    for tokens in (False, True):
        scored = source.for_scoring(Needs(features, dated=True, tokens=tokens))
        assert (scored.token_columns is not None) == tokens


def test_a_changed_vocabulary_is_noticed(tmp_path: Path) -> None:
    made = trained(write_texts(tmp_path / "log.parquet", ["wing flow wing"], ["w1"]), tmp_path / "set", "w1")
    assert made.manifest.vocabulary is not None
    path = Path(made.url) / str(made.manifest.vocabulary.path)
    path.write_text(path.read_text().replace("wing", "king"))
    known = {"tokenizer": {"kind": "known", "path": made.url}, "document": {"text": {"column": "text"}}}
    with pytest.raises(InputError, match="its content is not what was committed"):
        prepare(config(tmp_path / "log.parquet", known), str(tmp_path / "other"))
    path.unlink()  # then the data set is not whole, and made again
    again = trained(tmp_path / "log.parquet", tmp_path / "set", "w1")
    assert again.manifest.hash == made.manifest.hash
    assert storage.is_whole(again.url, storage.read_manifest(again.url) or {})


@pytest.mark.s3
@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.usefixtures("s3", "ray_cluster")
def test_tokens_stream_from_s3_and_ray_writes_the_same(s3: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    words = [f"word{i}" for i in range(50)]
    texts = [" ".join(rng.choice(words, 8)) for _ in range(300)]
    for i in range(3):
        table = pq.read_table(write_texts(tmp_path / "log.parquet", texts[100 * i :][:100]))
        ids = pa.array([f"q{i}-{n // 5}" for n in range(100)])
        pq.write_table(table.set_column(0, "q", ids), tmp_path / f"log-{i}.parquet")
    fields = {
        "tokenizer": {"kind": "train", "size": 100, "periods": ["all"]},
        "query": {"first": {"column": "text", "max_tokens": 5}},
        "document": {"text": {"column": "text", "max_tokens": 6}},
    }
    settings = config(str(tmp_path / "log-*.parquet"), fields, unit_mb=1e-6)
    here, there = prepare(settings, str(tmp_path / "set")), prepare(settings, f"{s3}/texts", ray=True)
    for one, other in zip(here.manifest.files, there.manifest.files, strict=True):
        assert (one.period, one.sha256, one.row_groups) == (other.period, other.sha256, other.row_groups)
    assert here.manifest.hash == there.manifest.hash
    assert here.manifest.token_summaries == there.manifest.token_summaries
    assert tokens_in(here) == tokens_in(there)
    assert len(tokens_in(there)["text"]) == 300
