"""Appends exact-match features to a data set with tokens.

The statistics of the texts come from the training periods alone and are kept with the output, so that later data get
features by the same statistics.

Shapes: N documents, Q groups, T tokens of queries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import pyarrow.compute as pc
from pydantic import model_validator

from ltrscale import storage
from ltrscale.data.dataset.manifest import Dataset, Feature, open_dataset
from ltrscale.data.dataset.split import PeriodTexts, Texts
from ltrscale.derive.measures import (
    MEASURES,
    CollectionStatistics,
    TokenLists,
    gather_statistics,
    match_measures,
    read_statistics,
    token_texts_of,
)
from ltrscale.derive.rewrite import GroupBlock, periods_of, read_groups
from ltrscale.derive.step import Changed, Changes, RelabelStep, StepStart
from ltrscale.errors import InputError, suggestion
from ltrscale.progress import log

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

    def transform(self, start: StepStart) -> "Appending":
        """Count the texts, or read the statistics of another data set.

        Raises:
            InputError: the data set has no such tokens or has features of these names, a period does not exist, or the
                statistics are of other texts or of another vocabulary.
        """
        query, texts = _texts(self, start.dataset)
        features = tuple(Feature(name=f"{name}_{text}") for text in texts for name in MEASURES)
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
        return Appending(query, texts, features, statistics)


@dataclass(frozen=True)
class Appending:
    """The transform of `Match`: appends the features of its texts to a block."""

    query: str
    """The column of the query's tokens."""
    texts: Mapping[str, Sequence[str]]
    """The columns of each text of documents, by its name."""
    features: tuple[Feature, ...]
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

    def extended(self, dataset: Dataset) -> Dataset:
        """The data set with the new features, as later steps and the output have it."""
        features = (*dataset.manifest.features, *self.features)
        return replace(dataset, manifest=dataset.manifest.model_copy(update={"features": features}))


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
