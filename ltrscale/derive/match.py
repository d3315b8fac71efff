"""Appends exact-match features to a data set with tokens: TF, IDF, TF-IDF, BM25 and query likelihood.

Statistics are counted over the different documents of the training periods alone and kept in a file of the output, so
that later data get features by the same statistics.

Shapes: N documents, Q queries (groups), T tokens, R lists, V ids of the vocabulary, C columns of a text, P pairs of a
document and a token of its query (one for each time that the query has the token), U pairs of a document and one of its
different tokens.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import safetensors.numpy
from pydantic import model_validator
from safetensors import SafetensorError

from ltrscale import storage
from ltrscale.arrays import Bits, Doubles, Ints, offsets, runs
from ltrscale.data.dataset.columns import Vocabulary
from ltrscale.data.dataset.manifest import Dataset, Feature, open_dataset
from ltrscale.data.dataset.origin import STATISTICS
from ltrscale.data.dataset.split import PeriodTexts, Texts
from ltrscale.data.ids import SeenHashes, hash_ids
from ltrscale.derive.rewrite import GroupBlock, periods_of, read_groups
from ltrscale.derive.step import Changed, Changes, RelabelStep, StepStart
from ltrscale.errors import InputError, suggestion
from ltrscale.progress import log

_VERSION = 1
MEASURES = ("tf", "idf", "tf_idf", "bm25", "lm_jm", "lm_dir", "lm_abs")
"""The measures, in the order of their columns."""
_K1, _B = 1.2, 0.75
"""BM25: how soon further occurrences of a token stop counting, and how much length counts; the values of Lucene."""
_LAMBDA, _MU, _DELTA = 0.1, 2000.0, 0.7
"""Language models of Zhai and Lafferty: weight of the collection (.1 is theirs for short queries), tokens of the
collection that are added to each document, and what is taken from the count of each token."""


class TokenLists(NamedTuple):
    """Lists of tokens, end to end; list r has `ids_T[offsets_R1[r]:offsets_R1[r + 1]]`."""

    ids_T: Ints
    offsets_R1: Ints


@dataclass(frozen=True)
class Collection:
    """Statistics of a collection of texts: for each token the documents that have it, and its occurrences."""

    documents: int
    frequency_V: Ints
    occurrences_V: Ints

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return int(self.occurrences_V.sum())

    def idf(self, tokens_P: Ints) -> Doubles:
        """`log(1 + (D - df + 1/2) / (df + 1/2))` of each token, as in Lucene: never below 0.

        Example:
            >>> Collection(3, np.array([3, 1]), np.array([5, 1])).idf(np.array([0, 1])).round(3).tolist()
            [0.134, 0.981]
        """
        df_P = self.frequency_V[tokens_P]
        return np.asarray(np.log1p((self.documents - df_P + 0.5) / (df_P + 0.5)))

    def probability(self, tokens_P: Ints) -> Doubles:
        """The share of each token in the collection, with one occurrence added to each: never 0."""
        return np.asarray((self.occurrences_V[tokens_P] + 1) / (self.tokens + len(self.occurrences_V)))


def _distinct(texts: TokenLists, size: int) -> tuple[Ints, Ints, Ints]:
    """The different tokens of each text: its number [U], the token [U] and how often it occurs there [U], sorted."""
    text_T = np.repeat(np.arange(len(texts.offsets_R1) - 1), np.diff(texts.offsets_R1))
    keys_U, counts_U = np.unique(text_T * size + texts.ids_T, return_counts=True)
    texts_U, tokens_U = np.divmod(keys_U, size)
    return texts_U, tokens_U, counts_U


def collect(texts: TokenLists, size: int) -> Collection:
    """The statistics of some texts over a vocabulary of this size."""
    _, tokens_U, counts_U = _distinct(texts, size)
    occurrences_V = np.bincount(tokens_U, weights=counts_U, minlength=size).astype(np.int64)
    return Collection(len(texts.offsets_R1) - 1, np.bincount(tokens_U, minlength=size), occurrences_V)


def merge(one: Collection, other: Collection) -> Collection:
    """The statistics of two collections that share no text."""
    return Collection(
        one.documents + other.documents,
        one.frequency_V + other.frequency_V,
        one.occurrences_V + other.occurrences_V,
    )


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


def token_texts_of(tokens_N: Mapping[str, pa.ListArray], texts: Mapping[str, Sequence[str]]) -> dict[str, TokenLists]:
    """The tokens of each document, by the name of a text: those of the columns that it names, end to end."""
    tokens = {}
    for name, columns in texts.items():
        lists = pa.concat_arrays([tokens_N[column] for column in columns])
        lists_NC = lists.take(pa.array(np.arange(len(lists)).reshape(len(columns), -1).T.ravel()))
        lengths_NC = pc.list_value_length(lists_NC).to_numpy().reshape(-1, len(columns))
        tokens[name] = TokenLists(lists_NC.flatten().to_numpy().astype(np.int64), offsets(lengths_NC.sum(axis=1)))
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
        new_N = pa.array(~seen.add(_identities(block)))
        tokens_N = {column: lists.filter(new_N) for column, lists in block.tokens_N.items()}
        for name, lists in token_texts_of(tokens_N, texts).items():
            collections[name] = merge(collections[name], collect(lists, vocabulary.size))
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
        queries = TokenLists(ids_T[plain_T], offsets(np.bincount(of_query_T, minlength=len(block))))
        columns = [block.features_NF]
        for name, documents in token_texts_of(block.tokens_N, self.texts).items():
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


def match_measures(
    queries: TokenLists, documents: TokenLists, query_N: Ints, collection: Collection
) -> Mapping[str, Doubles]:
    """All measures of all documents for their queries, by the names of `MEASURES`, each of shape [N].

    A token that a query has twice counts twice. With c the count of token t in document d of |d| tokens, |d|' of them
    different, mean length m, and p(t) the share of t in the collection, a measure is the sum over the query's tokens of

        tf      c
        idf     idf(t) if c > 0
        tf_idf  c idf(t)
        bm25    idf(t) c / (c + k1 (1 - b + b |d| / m))                Robertson and Zaragoza 2009, as in Lucene
        lm_jm   log((1 - lambda) c / |d| + lambda p(t))                Zhai and Lafferty 2001, Jelinek-Mercer
        lm_dir  log((c + mu p(t)) / (|d| + mu))                        Dirichlet
        lm_abs  log(max(c - delta, 0) / |d| + delta |d|' / |d| p(t))   absolute discounting

    The last three are log p(t) in an empty document. A query without tokens has 0 everywhere. The collection may
    lack some of the tokens.
    """
    size, n = len(collection.frequency_V), len(query_N)
    lengths_Q = np.diff(queries.offsets_R1)
    document_P = np.repeat(np.arange(n), lengths_Q[query_N])
    tokens_P = queries.ids_T[runs(queries.offsets_R1[query_N], lengths_Q[query_N])]
    texts_U, tokens_U, counts_U = _distinct(documents, size)
    keys_U, keys_P = texts_U * size + tokens_U, document_P * size + tokens_P
    place_P = np.searchsorted(keys_U, keys_P)
    has_P = np.append(keys_U, -1)[place_P] == keys_P
    count_P = np.where(has_P, np.append(counts_U, 0)[place_P], 0).astype(np.float64)

    lengths_N = np.diff(documents.offsets_R1).astype(np.float64)
    length_P, different_P = lengths_N[document_P], np.bincount(texts_U, minlength=n)[document_P]
    idf_P, p_P = collection.idf(tokens_P), collection.probability(tokens_P)
    mean = collection.tokens / max(collection.documents, 1) or 1.0
    pull_P = _K1 * (1 - _B + _B * length_P / mean)
    empty_P, some_P = length_P == 0, np.maximum(length_P, 1)
    discounted_P = np.maximum(count_P - _DELTA, 0) / some_P + _DELTA * different_P / some_P * p_P
    values_P = {
        "tf": count_P,
        "idf": np.where(has_P, idf_P, 0.0),
        "tf_idf": count_P * idf_P,
        "bm25": np.where(has_P, idf_P * count_P / np.where(has_P, count_P + pull_P, 1.0), 0.0),
        "lm_jm": np.log(np.where(empty_P, p_P, (1 - _LAMBDA) * count_P / some_P + _LAMBDA * p_P)),
        "lm_dir": np.log((count_P + _MU * p_P) / (length_P + _MU)),
        "lm_abs": np.log(np.where(empty_P, p_P, discounted_P)),
    }
    return {name: np.asarray(np.bincount(document_P, values_P[name], n), np.float64) for name in MEASURES}
