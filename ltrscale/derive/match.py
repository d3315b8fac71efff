"""Appends exact-match features to a data set with tokens: a new data set directory with more features.

The statistics of the texts come from the training periods alone and are kept with the output, so that later data get
features by the same statistics.

Shapes: N documents, Q groups, F features before, K new ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Self

import numpy as np
import pyarrow.compute as pc
from pydantic import model_validator

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Accounting, Dataset, Feature, open_dataset
from ltrscale.data.dataset.origin import STATISTICS
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
from ltrscale.derive.rewrite import Derivation, GroupBlock, GroupWriter, periods_of, read_groups
from ltrscale.errors import InputError, suggestion
from ltrscale.progress import Report, log, progress
from ltrscale.stages.stage import Origin

_TOGETHER = "all"
"""The name of the text of all fields together."""


class MatchConfig(Config):
    """The texts to compare, and where their statistics come from."""

    query: str | None = None
    """The token field of queries; may be left out if there is one."""
    documents: Texts = ()
    """The token fields of documents, each a text to compare; all by default."""
    together: bool = True
    """Compare the fields end to end as one more text too, if there are several."""
    periods: PeriodTexts = ()
    """Periods, as in a split, whose documents are counted: those of training."""
    statistics: str | None = None
    """Data set that jobs.match has made, whose statistics serve this one too, instead of `periods`."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if bool(self.periods) == (self.statistics is not None):
            raise ValueError("name the periods of training under periods, or an earlier output under statistics")
        return self


class MatchJob(Derivation):
    """Append exact-match features to a data set."""

    stage: ClassVar = "match"
    match: MatchConfig

    def inputs(self) -> dict[str, str]:
        """Content of the data set, and of the statistics of another."""
        inputs = super().inputs()
        if self.match.statistics is not None:
            statistics = open_dataset(self.match.statistics).manifest.statistics
            inputs[STATISTICS] = statistics.sha256 if statistics else ""
        return inputs

    def work(self, origin: Origin, report: Report) -> None:
        """Make the data set with more features; `report` receives the counts.

        Raises:
            InputError: the data set has no such tokens or features of these names, a period does not exist, or the
                statistics are of other texts or of another vocabulary.
        """
        dataset = open_dataset(self.data)
        query, texts = _texts(self.match, dataset)
        features = (*dataset.manifest.features, *_features(dataset, texts))
        totals = dataset.manifest.counts()
        with storage.Commit(self.out) as commit:
            statistics = _statistics(self.match, dataset, texts)
            writer = GroupWriter(commit, dataset, features=features, renumber=False, statistics=statistics.put(commit))
            with progress("match", totals.documents) as advance:
                for block in read_groups(dataset, periods=frozenset(dataset.manifest.periods)):
                    writer.add(_appended(block, query, texts, statistics))
                    advance(block.n_documents)
            counts = {"rows_in": totals.documents, "rows_kept": totals.documents}
            counts |= {"groups_in": totals.groups, "groups_kept": totals.groups}
            writer.finish(Accounting(**counts), origin)
        documents, new = next(iter(statistics.texts.values())).documents, len(features) - len(dataset.manifest.features)
        log.info(
            "match: %s features of %s texts, by the statistics of %s documents of %s",
            *(new, len(texts), f"{documents:,}", ", ".join(statistics.periods)),
        )
        report({"stage": "match", "documents": totals.documents, "counted": documents, "texts": len(texts)})


def _texts(config: MatchConfig, dataset: Dataset) -> tuple[str, dict[str, tuple[str, ...]]]:
    """The column of the query's tokens, and the columns of each text of documents, by its name."""
    fields = dataset.manifest.tokens
    queries = {field.name: field.column for field in fields if field.of == "query"}
    documents = {field.name: field.column for field in fields if field.of == "document"}
    if not queries or not documents:
        raise InputError(f"{dataset.url}: it has no tokens of queries and documents; prepare it with columns.tokens")
    if config.query is None and len(queries) > 1:
        raise InputError(f"match.query: there are {', '.join(queries)}; name one")
    query = config.query or next(iter(queries))
    for name, named in ((query, queries), *((name, documents) for name in config.documents)):
        if name not in named:
            raise InputError(f"{dataset.url}: no tokens {name!r}; {suggestion(name, named, 'there are')}")
    names = config.documents or tuple(documents)
    texts: dict[str, tuple[str, ...]] = {name: (documents[name],) for name in names}
    if config.together and len(names) > 1:
        if _TOGETHER in texts:
            raise InputError(f"match.together: a field is named {_TOGETHER!r}; set together to false")
        texts[_TOGETHER] = tuple(documents[name] for name in names)
    return queries[query], texts


def _features(dataset: Dataset, texts: Mapping[str, Sequence[str]]) -> list[Feature]:
    new = [Feature(name=f"{name}_{text}") for text in texts for name in MEASURES]
    existing = {feature.name for feature in dataset.manifest.features}
    if duplicates := [feature.name for feature in new if feature.name in existing]:
        raise InputError(
            f"{dataset.url}: it has a feature {duplicates[0]!r} already; start from a data set without these"
        )
    return new


def _statistics(config: MatchConfig, dataset: Dataset, texts: Mapping[str, Sequence[str]]) -> CollectionStatistics:
    """The statistics of the texts: of an earlier output, or counted now."""
    vocabulary = dataset.manifest.vocabulary
    assert vocabulary is not None
    if config.statistics is None:
        periods = periods_of(dataset, config.periods)
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


def _appended(
    block: GroupBlock, query: str, texts: Mapping[str, Sequence[str]], statistics: CollectionStatistics
) -> GroupBlock:
    """A block with the new features after its own."""
    column = block.rows_Q.column(query).combine_chunks()
    lengths_Q = pc.list_value_length(column).to_numpy()
    ids_T = column.flatten().to_numpy().astype(np.int64)
    # a special token, such as that of unknown words, matches nothing
    plain_T = ~np.isin(ids_T, list(statistics.vocabulary.special.values()))
    of_query_T = np.repeat(np.arange(len(block)), lengths_Q)[plain_T]
    bounds_Q1 = np.concatenate([[0], np.cumsum(np.bincount(of_query_T, minlength=len(block)))])
    queries = TokenLists(ids_T[plain_T], bounds_Q1)
    columns = [block.features_NF]
    for name, documents in token_texts_of(block, texts).items():
        values = match_measures(queries, documents, block.group_N, statistics.texts[name])
        columns += [values[each].astype(np.float32)[:, None] for each in MEASURES]
    return replace(block, features_NF=np.concatenate(columns, axis=1))
