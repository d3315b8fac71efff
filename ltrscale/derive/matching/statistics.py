"""Statistics of the texts of a data set: counted over its different documents, and kept in a file of a data set.

Shapes: N documents, K kept ones, V ids of the vocabulary.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from ltrscale import storage
from ltrscale.data.dataset.manifest import Dataset, ListedFile
from ltrscale.data.dataset.tokens import Vocabulary
from ltrscale.data.ids import SeenHashes, hash_ids
from ltrscale.derive.matching.measures import Collection, TokenLists, collect, merge
from ltrscale.derive.rewrite import GroupBlock
from ltrscale.errors import InputError

_VERSION = 1


@dataclass(frozen=True)
class CollectionStatistics:
    """The collection of each text by its name, the vocabulary that they count, and the periods that they come from."""

    texts: Mapping[str, Collection]
    vocabulary: Vocabulary
    periods: tuple[str, ...]

    def put(self, commit: storage.Commit) -> ListedFile:
        """Write the file of a data set."""
        arrays = {f"frequency.{name}": text.frequency_V for name, text in self.texts.items()}
        arrays |= {f"occurrences.{name}": text.occurrences_V for name, text in self.texts.items()}
        about = {
            "version": _VERSION,
            "documents": {name: text.documents for name, text in self.texts.items()},
            "periods": self.periods,
            "vocabulary": self.vocabulary.model_dump(mode="json"),
        }
        # one entry: the library writes several in an order that changes from run to run, and so the file's hash would
        metadata = {"about": json.dumps(about)}
        with commit.file("statistics-{hash}.safetensors") as path:
            path.write_bytes(safetensors.numpy.save(arrays, metadata=metadata))
        placed = commit.files[-1]
        return ListedFile(path=placed.path, bytes=placed.bytes, sha256=placed.sha256)


def token_texts_of(block: GroupBlock, texts: Mapping[str, Sequence[str]]) -> dict[str, TokenLists]:
    """The tokens of each document of a block, by the name of a text: the columns that it names, end to end."""
    found = {}
    for name, columns in texts.items():
        lists = [block.tokens_N[column] for column in columns]
        lengths = [pc.list_value_length(column).to_numpy().astype(np.int64) for column in lists]
        values = [column.flatten().to_numpy().astype(np.int64) for column in lists]
        ends_N1 = np.concatenate([[0], np.cumsum(sum(lengths[1:], lengths[0]))])
        ids_T, before_N = np.empty(int(ends_N1[-1]), np.int64), np.zeros(block.n_documents, np.int64)
        for length_N, value_T in zip(lengths, values, strict=True):
            start_N = ends_N1[:-1] + before_N - (np.cumsum(length_N) - length_N)
            ids_T[np.repeat(start_N, length_N) + np.arange(len(value_T))] = value_T
            before_N = before_N + length_N
        found[name] = TokenLists(ids_T, ends_N1)
    return found


def gather_statistics(
    blocks: Iterable[GroupBlock],
    texts: Mapping[str, Sequence[str]],
    vocabulary: Vocabulary,
    periods: Sequence[str],
    folder: Path,
) -> CollectionStatistics:
    """Count the texts of all documents of some blocks, each document once, however the blocks are cut.

    Rows with the same id are one document, whatever their tokens, and so are rows without an id and with the same
    tokens. What an id says is kept apart from what tokens say: two documents may have the same text.

    Memory holds the counts of the vocabulary and eight bytes for each of a million documents; `folder` takes the rest.
    """
    none = np.zeros(vocabulary.size, np.int64)
    collections = {name: Collection(0, none, none) for name in texts}
    seen = SeenHashes(folder)
    for block in blocks:
        new_N = ~seen.add(_identities(block))
        for name, lists in token_texts_of(block, texts).items():
            collections[name] = merge(collections[name], collect(_kept(lists, new_N), vocabulary.size))
    return CollectionStatistics(collections, vocabulary, tuple(sorted(periods)))


def read_statistics(dataset: Dataset) -> CollectionStatistics:
    """The statistics that a data set keeps.

    Raises:
        InputError: it keeps none, or the file is damaged, was changed, or is of another version.
    """
    listed = dataset.manifest.statistics
    if listed is None:
        raise InputError(f"{dataset.url}: it keeps no statistics of texts; name a data set that jobs.match has made")
    data = storage.read_verified(dataset.url, listed.path, dataset.manifest.model_dump(mode="json"))
    where = storage.join(dataset.url, listed.path)
    try:
        arrays = safetensors.numpy.load(data)
        about = _about(data)
        if about["version"] != _VERSION:
            raise InputError(f"{where}: statistics of version {about['version']}; this package reads {_VERSION}")
        texts = {
            name: Collection(documents, arrays[f"frequency.{name}"], arrays[f"occurrences.{name}"])
            for name, documents in about["documents"].items()
        }
        return CollectionStatistics(texts, Vocabulary.model_validate(about["vocabulary"]), tuple(about["periods"]))
    except (SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{where}: no statistics of texts ({error}); make the data set again") from error


def _about(data: bytes) -> dict[str, Any]:
    """What stands beside the arrays of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    about: dict[str, Any] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["about"])
    return about


def _identities(block: GroupBlock) -> NDArray[np.uint64]:
    """A hash of each document: of its id, or of its tokens, which the leading NUL keeps apart from any id."""
    known = pa.nulls(block.n_documents, pa.string()) if block.doc_ids_N is None else block.doc_ids_N
    ids = known.to_pylist()
    if None not in ids:
        return hash_ids(ids)
    contents = zip(*(lists.to_pylist() for lists in block.tokens_N.values()), strict=True)
    return hash_ids(f"\0{content}" if name is None else name for name, content in zip(ids, contents, strict=True))


def _kept(lists: TokenLists, keep_N: NDArray[np.bool_]) -> TokenLists:
    """The lists of some documents."""
    lengths_N = np.diff(lists.offsets_R1)
    return TokenLists(
        lists.ids_T[np.repeat(keep_N, lengths_N)], np.concatenate([[0], np.cumsum(lengths_N[keep_N])]).astype(np.int64)
    )
