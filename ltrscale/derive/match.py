"""Appends exact-match features to a data set with tokens.

Statistics are counted over the different documents of the training periods alone and kept in a file of the output, so
that later data get features by the same statistics.

Shapes: N documents, Q queries (groups), T tokens, R lists.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

import numpy as np
import pyarrow.compute as pc
import safetensors.numpy
from pydantic import model_validator
from safetensors import SafetensorError

from ltrscale import storage
from ltrscale.arrays import Bits, Bools
from ltrscale.data.dataset.manifest import Dataset, Feature, open_dataset
from ltrscale.data.dataset.origin import STATISTICS
from ltrscale.data.dataset.split import PeriodTexts, Texts
from ltrscale.data.dataset.tokens import Vocabulary
from ltrscale.data.ids import SeenHashes, hash_ids
from ltrscale.derive.match_measures import MEASURES, Collection, TokenLists, collect, match_measures, merge
from ltrscale.derive.rewrite import GroupBlock, periods_of, read_groups
from ltrscale.derive.step import Changed, Changes, RelabelStep, StepStart
from ltrscale.errors import InputError, suggestion
from ltrscale.progress import log

_VERSION = 1


@dataclass(frozen=True)
class CollectionStatistics:
    """The collection of each text by its name, the vocabulary that they count, and the periods that they come from."""

    texts: Mapping[str, Collection]
    vocabulary: Vocabulary
    periods: tuple[str, ...]

    def put(self, commit: storage.Commit) -> storage.Placed:
        """Write the statistics as a file of a data set."""
        arrays = {f"frequency.{name}": text.frequency_V for name, text in self.texts.items()}
        arrays |= {f"occurrences.{name}": text.occurrences_V for name, text in self.texts.items()}
        header = {
            "version": _VERSION,
            "documents": {name: text.documents for name, text in self.texts.items()},
            "periods": self.periods,
            "vocabulary": self.vocabulary.model_dump(mode="json"),
        }
        # one entry: the library writes several in random order, which would change the file's hash
        metadata = {"about": json.dumps(header)}
        with commit.file("statistics-{hash}.safetensors") as path:
            path.write_bytes(safetensors.numpy.save(arrays, metadata=metadata))
        return commit.files[-1]


def token_texts_of(block: GroupBlock, texts: Mapping[str, Sequence[str]]) -> dict[str, TokenLists]:
    """The tokens of each document of a block, by the name of a text: the columns that it names, end to end."""
    tokens = {}
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
        tokens[name] = TokenLists(ids_T, ends_N1)
    return tokens


def gather_statistics(
    blocks: Iterable[GroupBlock],
    texts: Mapping[str, Sequence[str]],
    vocabulary: Vocabulary,
    periods: Sequence[str],
    folder: Path,
) -> CollectionStatistics:
    """Count the texts of all documents of some blocks, each document once, however the blocks are cut.

    Rows with the same id are one document, whatever their tokens, and so are rows without an id and with the same
    tokens. Documents with ids and documents without are counted apart, because two documents may have the same text.

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
        raise InputError(f"{dataset.url}: it keeps no statistics of texts; name one with features of exact match")
    data = storage.read_verified(dataset.url, listed.path, dataset.manifest.model_dump(mode="json"))
    path = storage.join(dataset.url, listed.path)
    try:
        arrays = safetensors.numpy.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # metadata beside the arrays
        about = json.loads(header["__metadata__"]["about"])
        if about["version"] != _VERSION:
            raise InputError(f"{path}: statistics of version {about['version']}; this package reads {_VERSION}")
        texts = {
            name: Collection(documents, arrays[f"frequency.{name}"], arrays[f"occurrences.{name}"])
            for name, documents in about["documents"].items()
        }
        return CollectionStatistics(texts, Vocabulary.model_validate(about["vocabulary"]), tuple(about["periods"]))
    except (SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{path}: no statistics of texts ({error}); make the data set again") from error


def _identities(block: GroupBlock) -> Bits:
    """A hash of each document: of its id, or of its tokens after a NUL, so that it equals no id's hash."""
    if block.doc_ids_N is not None and not block.doc_ids_N.null_count:
        return hash_ids(block.doc_ids_N.to_pylist())
    ids = [None] * block.n_documents if block.doc_ids_N is None else block.doc_ids_N.to_pylist()
    contents = zip(*(lists.to_pylist() for lists in block.tokens_N.values()), strict=True)
    return hash_ids(f"\0{content}" if name is None else name for name, content in zip(ids, contents, strict=True))


def _kept(lists: TokenLists, keep_N: Bools) -> TokenLists:
    lengths_N = np.diff(lists.offsets_R1)
    return TokenLists(
        lists.ids_T[np.repeat(keep_N, lengths_N)], np.concatenate([[0], np.cumsum(lengths_N[keep_N])]).astype(np.int64)
    )


_TOGETHER = "all"
"""The name of the text of all fields together."""


class Match(RelabelStep):
    """Append exact-match features (TF, IDF, TF-IDF, BM25, query likelihood) of the data set's tokens."""

    kind: Literal["match"] = "match"
    query: str | None = None
    """The token field of queries; may be left out if there is one."""
    documents: Texts = ()
    """The token fields of documents, each a text to compare; all by default."""
    together: bool = True
    """Compare the fields end to end as one more text too, if there are several."""
    counted: PeriodTexts = ()
    """Periods, as in a split, whose documents are counted: those of training."""
    statistics: str | None = None
    """Data set with such features, whose statistics serve this one too, instead of `counted`."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if bool(self.counted) == (self.statistics is not None):
            raise ValueError("name the periods of training under counted, or an earlier output under statistics")
        return self

    def check_after(self, before: Sequence[RelabelStep]) -> None:
        """Refuse any step before it, as it counts the documents of the data set itself."""
        if before:
            raise ValueError(f"match counts the documents before {before[0].kind} changes them; put it first")

    def further_inputs(self) -> dict[str, str]:
        """The content of the statistics of another data set."""
        if self.statistics is None:
            return {}
        statistics = open_dataset(self.statistics).manifest.statistics
        return {STATISTICS: statistics.sha256 if statistics else ""}

    def extended(self, dataset: Dataset) -> Dataset:
        """The data set with the features of its texts after its own."""
        _, texts = _texts(self, dataset)
        features = (*dataset.manifest.features, *_features(texts))
        return replace(dataset, manifest=dataset.manifest.model_copy(update={"features": features}))

    def transform(self, start: StepStart) -> "Appending":
        """Count the texts, or read the statistics of another data set.

        Raises:
            InputError: the data set has no such tokens or has features of these names, a period does not exist, or the
                statistics are of other texts or of another vocabulary.
        """
        query, texts = _texts(self, start.dataset)
        features = _features(texts)
        existing = {feature.name for feature in start.dataset.manifest.features}
        if duplicate := next((feature.name for feature in features if feature.name in existing), None):
            raise InputError(
                f"{start.dataset.url}: it has a feature {duplicate!r} already; start from a data set without these"
            )
        statistics = _statistics(self, start.dataset, texts)
        documents = next(iter(statistics.texts.values())).documents
        log.info(
            "relabel: match: %s features of %s texts, by the statistics of %s documents of %s",
            *(len(features), len(texts), f"{documents:,}", ", ".join(statistics.periods)),
        )
        return Appending(query, texts, statistics)


@dataclass(frozen=True)
class Appending:
    """The transform of `Match`: appends the features of its texts to a block."""

    query: str
    """The column of the query's tokens."""
    texts: Mapping[str, Sequence[str]]
    """The columns of each text of documents, by its name."""
    statistics: CollectionStatistics

    def __call__(self, block: GroupBlock) -> Changed:
        """The block with the new features after its own."""
        column = block.rows_Q.column(self.query).combine_chunks()
        lengths_Q = pc.list_value_length(column).to_numpy()
        ids_T = column.flatten().to_numpy().astype(np.int64)
        # a special token, such as that of unknown words, matches nothing
        plain_T = ~np.isin(ids_T, list(self.statistics.vocabulary.special.values()))
        of_query_T = np.repeat(np.arange(len(block)), lengths_Q)[plain_T]
        bounds_Q1 = np.concatenate([[0], np.cumsum(np.bincount(of_query_T, minlength=len(block)))])
        queries = TokenLists(ids_T[plain_T], bounds_Q1)
        columns = [block.features_NF]
        for name, documents in token_texts_of(block, self.texts).items():
            values = match_measures(queries, documents, block.group_N, self.statistics.texts[name])
            columns += [values[each].astype(np.float32)[:, None] for each in MEASURES]
        yield replace(block, features_NF=np.concatenate(columns, axis=1)), Changes()


def _features(texts: Iterable[str]) -> tuple[Feature, ...]:
    return tuple(Feature(name=f"{name}_{text}") for text in texts for name in MEASURES)


def _texts(config: Match, dataset: Dataset) -> tuple[str, dict[str, tuple[str, ...]]]:
    """The column of the query's tokens, and the columns of each text of documents, by its name."""
    fields = dataset.manifest.tokens
    queries = {field.name: field.column for field in fields if field.of == "query"}
    documents = {field.name: field.column for field in fields if field.of == "document"}
    if not queries or not documents:
        raise InputError(f"{dataset.url}: it has no tokens of queries and documents; prepare it with columns.tokens")
    if config.query is None and len(queries) > 1:
        raise InputError(f"query: there are {', '.join(queries)}; name one")
    query = config.query or next(iter(queries))
    for name, named in ((query, queries), *((name, documents) for name in config.documents)):
        if name not in named:
            raise InputError(f"{dataset.url}: no tokens {name!r}; {suggestion(name, named, 'there are')}")
    names = config.documents or tuple(documents)
    texts: dict[str, tuple[str, ...]] = {name: (documents[name],) for name in names}
    if config.together and len(names) > 1:
        if _TOGETHER in texts:
            raise InputError(f"together: a field is named {_TOGETHER!r}; set together to false")
        texts[_TOGETHER] = tuple(documents[name] for name in names)
    return queries[query], texts


def _statistics(config: Match, dataset: Dataset, texts: Mapping[str, Sequence[str]]) -> CollectionStatistics:
    """The statistics of the texts: of an earlier output, or counted now."""
    vocabulary = dataset.manifest.vocabulary
    assert vocabulary is not None
    if config.statistics is None:
        periods = periods_of(dataset, config.counted)
        with storage.scratch.directory() as folder:
            return gather_statistics(read_groups(dataset, periods=periods), texts, vocabulary, sorted(periods), folder)
    earlier = read_statistics(open_dataset(config.statistics))
    if not earlier.vocabulary.same_as(vocabulary):
        raise InputError(
            f"{config.statistics}: its vocabulary is not that of {dataset.url}; prepare both with one tokenizer "
            "(kind: known)"
        )
    if missing := [name for name in texts if name not in earlier.texts]:
        available = ", ".join(earlier.texts)
        raise InputError(f"{config.statistics}: no statistics of text {missing[0]!r}; it has {available}")
    return replace(earlier, texts={name: earlier.texts[name] for name in texts})
