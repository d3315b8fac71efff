"""Token fields in the manifest: their identity, their vocabulary's file, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_columns import FIELDS, TITLE, add_tokens

from ltrscale import storage
from ltrscale.data.dataset.columns import LISTS, Vocabulary, from_columns, put_vocabulary, summarise, to_columns
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.decoder import memory_for
from ltrscale.errors import InputError

Make = Callable[..., Any]
tokens = st.lists(st.integers(0, 99), max_size=4)


@given(st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=5))
def test_columns_of_documents_are_lists_of_tokens_and_back(groups: list[list[list[int]]]) -> None:
    lists = pa.array([document for group in groups for document in group], LISTS)
    offsets = np.concatenate([[0], np.cumsum([len(group) for group in groups])])
    columns = to_columns(TITLE.column, lists, offsets)
    assert columns[TITLE.column].to_pylist() == [[t for document in group for t in document] for group in groups]
    assert from_columns(*columns.values()).equals(lists)
    middle = [column.slice(1) for column in columns.values()]  # whose buffers hold more
    assert from_columns(*middle).to_pylist() == [document for group in groups[1:] for document in group]
    found = summarise(pa.table(columns))[TITLE.column]
    flat = [len(document) for group in groups for document in group]
    assert (found.lists, found.tokens, found.longest, found.empty) == (len(flat), sum(flat), max(flat), flat.count(0))


def test_lengths_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="do not add up"):
        from_columns(pa.array([[1, 2]], LISTS), pa.array([[1]], LISTS))


def test_a_hash_names_fields_and_vocabulary(make_dataset: Make) -> None:
    made = make_dataset({"a": [[2, 1]]})
    manifest = open_dataset(made.url).manifest
    words = Vocabulary(size=10, special={"pad": 0})
    with_texts = manifest.replace(tokens=FIELDS, vocabulary=words)
    hashes = {
        manifest.hash,
        with_texts.hash,
        with_texts.replace(tokens=FIELDS[:1]).hash,
        with_texts.replace(vocabulary=words.replace(size=11)).hash,
        with_texts.replace(vocabulary=words.replace(sha256="0" * 64)).hash,
    }
    assert len(hashes) == 5
    assert with_texts.replace(vocabulary=words.replace(path="other.json")).hash == with_texts.hash


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../b"])
def test_a_vocabulary_elsewhere_is_refused(path: str, make_dataset: Make) -> None:
    made = make_dataset({"a": [[1]]})
    add_tokens(made.url, [1])
    place = Path(made.url) / storage.MANIFEST
    values = json.loads(place.read_text())
    values["vocabulary"] |= {"path": path, "sha256": "0" * 64, "bytes": 1}
    place.write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"do not use the directory, make it again"):
        open_dataset(made.url)


def test_the_file_of_a_replaced_vocabulary_is_deleted(tmp_path: Path) -> None:
    url, names = str(tmp_path / "set"), []
    for content in (b"{}", b"[]"):
        with storage.Commit(url) as commit:
            vocabulary = put_vocabulary(Vocabulary(size=1, special={}), content, commit)
            names.append(vocabulary.path)
            commit.finish({"files": [], "vocabulary": vocabulary.model_dump(mode="json")})
    assert [path.name for path in Path(url).glob("tokenizer-*")] == [names[1]]
    (Path(url) / str(names[1])).unlink()
    assert not storage.is_whole(url, storage.read_manifest(url) or {})


def test_tokens_count_for_the_memory_of_labelled_groups(make_dataset: Make) -> None:
    made = make_dataset({"a": [[4, 4]]})
    add_tokens(made.url, [4, 4])
    selection = select(Split(data=(made.url,)), labelled=True)
    memory = 1e-9 * 4 * 8 * 3  # of the features
    assert memory_for(selection, memory) is not None
    assert memory_for(selection.reading(document=["title"]), memory) is None
