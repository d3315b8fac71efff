"""The uses of a raw log's columns: the configs that state them; `resolve` finds them in a file."""

import operator
import re
import urllib.parse
import zoneinfo
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from ltrscale.arrays import HIGHEST_LABEL
from ltrscale.config import Config
from ltrscale.data.columns import Similarity
from ltrscale.data.dataset.columns import GOAL, GoalName, TokenField
from ltrscale.data.dataset.manifest import Feature, matching
from ltrscale.data.dataset.split import Relative, Texts
from ltrscale.data.times import ISO, Clock, DatePart, PeriodUnit
from ltrscale.errors import InputError
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.lines import UTF8
from ltrscale.ingest.tables import usual_delimiter
from ltrscale.ingest.texts import TextColumn, TokenColumns
from ltrscale.ingest.validate import Unjudged

_LARGEST = float(np.finfo(np.float32).max)
PeriodKind = PeriodUnit | Literal["part"]
"""What a log is divided by: units of time, or parts of its queries."""
Fill = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)] | Literal["median"]
"""The value to use for a missing one."""
Side = Literal["positions", "clicks", "weights", "gains"]
"""Further columns of documents, by their names in a data set."""
Use = str
"""What a column is for, a key of the types that fit it in `resolve`, and the word for it in errors."""


class _Columns(Config):
    """The settings that item and group logs share."""

    time: str | None = None
    """Column with the time stamp, which determines the period."""
    time_format: tuple[str, ...] = (ISO,)
    """Formats of times that are text, tried in order, as in Python's strptime: "%d.%m.%Y %H:%M"; `iso` stands for
    ISO 8601 and for numbers since 1970. Days that are written as numbers, such as 20260214, need "%Y%m%d"."""
    time_zone: str = "UTC"
    """The log's zone, such as Europe/Berlin: of times that do not state one, and that in which days begin."""
    period: PeriodKind = "week"
    """The period of a time stamp: week (2026-W07, ISO), day (2026-02-14) or hour (2026-02-14T09). Or `part`, for a log
    without times: the queries are dealt to part-1 to part-6 by the hash of their ids."""
    period_column: str | None = None
    """Column that has the period itself, or a part of the path that does (.../name=value/...)."""
    positions: str | None = None
    """Column with the position at which a document was shown."""
    clicks: str | None = None
    """Column with clicks."""
    weights: str | None = None
    """Column with weights of documents, 0 or more, by which trainers multiply, 1 where it is empty; what a document is
    worth is its `gain`."""
    gain: str | None = None
    """Column with what a document is worth, such as its revenue, 0 or more: `evaluate.gains: column` measures by it,
    and nothing trains on it."""
    meta: tuple[str, ...] = ()
    """Columns of whole groups to keep in the data set, as `meta_NAME`."""
    tokens: TokenColumns | None = None
    """Columns with texts of queries and documents, or with their token ids."""

    @field_validator("time_format", mode="before")
    @classmethod
    def _formats(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("time_format")
    @classmethod
    def _known_formats(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            if each != ISO and "%" not in each:
                raise ValueError(f"{each!r} has no code of strptime; write for example %d.%m.%Y, or {ISO}")
        return value or (ISO,)

    @field_validator("time_zone")
    @classmethod
    def _known_zone(cls, value: str) -> str:
        try:
            zoneinfo.ZoneInfo(value)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError("no time zone of this machine; write it as UTC or Europe/Berlin") from None
        return value

    @model_validator(mode="after")
    def _one_period(self) -> Self:
        if self.time is not None and self.period_column is not None:
            raise ValueError("give time or period_column, not both")
        if self.period == "part" and self.period_column is not None:
            raise ValueError("period: part deals queries to periods, and period_column names these; leave one out")
        return self

    @property
    def clock(self) -> Clock:
        """The log's time formats and zone."""
        return Clock(self.time_zone, self.time_format)

    def _check_side(self, features: Sequence[str]) -> None:
        """Refuse features that are known only after a list was shown: the position, the click or the gain."""
        nouns = {"positions": "place on the page", "clicks": "click", "gain": "gain"}
        for (use, noun), name in zip(nouns.items(), (self.positions, self.clicks, self.gain), strict=True):
            if name is not None and name in features:
                raise ValueError(
                    f"{name!r} is the {noun} of a document ({use}) and cannot be a feature too: nobody knows it "
                    "when a list is to be ranked; leave it out of the features"
                )

    @property
    def goals(self) -> dict[str, str]:
        """The columns of the labels by their names, if several are named."""
        raise NotImplementedError

    @property
    def label_column(self) -> str | None:
        """The column of the label, the first of several."""
        raise NotImplementedError

    @property
    def further_labels(self) -> dict[str, str]:
        """The labels beside it: name in the data set -> column."""
        return {f"{GOAL}{name}": column for name, column in [*self.goals.items()][1:]}

    @property
    def of_documents(self) -> dict[str, str]:
        """All columns of documents to keep beside the label: name in the data set -> column."""
        named: list[tuple[str, str]] = [*self.side().items(), *self.further_labels.items()]
        return dict(named)

    @property
    def token_fields(self) -> dict[TokenField, TextColumn]:
        """The token fields, with the columns that they are read from."""
        return self.tokens.fields() if self.tokens else {}

    @property
    def token_columns(self) -> list[str]:
        """The columns that tokens are read from."""
        return self.tokens.columns if self.tokens else []

    def named(self) -> list[tuple[str, Use]]:
        """The columns that the config names for one use each, with the use, without features."""
        raise NotImplementedError

    def named_in(self, names: Sequence[str], url: str) -> list[tuple[str, Use]]:
        """The same for one file, with the columns to keep; its path may have the period instead."""
        in_path = self.period_column not in names and self.path_period(url)
        named = [(name, use) for name, use in self.named() if not (use == "period_column" and in_path)]
        named += [(name, "meta") for name in self.meta]
        return named

    def path_period(self, url: str) -> str:
        """The period of a file with `period_column=value` in its path, as in Hive partitions, else nothing."""
        match = re.search(rf"(?:^|/){re.escape(self.period_column or '')}=([^/]+)/", url)
        return urllib.parse.unquote(match[1]) if match else ""

    def sources(self) -> dict[str, tuple[str, ...]]:
        """The features that are made of columns: name -> columns; any other feature is a column itself."""
        return {}

    def beside_features(self) -> set[str]:
        """All columns with a use of their own, besides features."""
        return {*(name for name, _ in self.named()), *self.meta, *self.token_columns}

    def side(self) -> dict[Side, str]:
        """Further columns of documents to keep: name in the data set -> column."""
        named: dict[Side, str | None] = {
            "positions": self.positions,
            "clicks": self.clicks,
            "weights": self.weights,
            "gains": self.gain,
        }
        return {name: column for name, column in named.items() if column is not None}


class ColumnMapping(_Columns):
    """The uses of the columns of a log with one item per row.

    Features are named exactly or by a prefix and `*`; `*` alone means every numeric column that has a name. A pattern
    takes no column with another use, such as a meta column or a key by which tables join. Their order is that of this
    config, numeric ones first: a pattern stands for its matches in the order of their names, except columns that are
    named exactly, which keep their own place. The order of columns in a file does not matter.
    """

    query: str
    """Column with the query id."""
    within: tuple[str, ...] = ()
    """Further columns that make the query id with it, such as the day of a customer's visit: rows that agree in all of
    them are one query, with the id `customer|day`."""
    item: str | None = None
    """Column with the document id."""
    label: str | None = None
    """Column with the label; a row without one is unlabelled."""
    labels: dict[GoalName, str] = Field(default_factory=dict, exclude_if=operator.not_)
    """Several labels by name instead of the one, such as {click: clicked, order: ordered, revenue: brought}: goals, of
    which a job names the one that it reads, or a weighted sum. A row has labels if the first one has a value, which
    `grades` and `unjudged` are about; an empty value of the others counts 0."""
    grades: dict[str, float | None] | tuple[float, ...] | None = None
    """Grades instead of the column's values: of each value, as {view: 0, cart: 1, purchase: 2} (quote yes and no; null
    is no label), or by rising cut points, as [1, 20, 100] for a revenue: the grade is the number of cut points that it
    reaches."""
    unjudged: Unjudged = "reject"
    """Rows without a label in a query where others have one: they count 0, make their whole query unlabelled, or are
    rejected. A query without any label is unlabelled."""
    features: tuple[str, ...] = ()
    """Numeric features, such as price or f_*."""
    categorical: tuple[str, ...] = ()
    """Categorical features, such as country or c_*."""
    dates: dict[str, tuple[DatePart, ...]] = Field(default_factory=dict)
    """Features of columns with times or dates, such as {listed: [days_before], sent: [weekday, hour]}: the days from it
    to the row's own `time`, a number; the weekday (Monday is 0) or hour, a category."""
    vectors: dict[str, Annotated[int, Field(ge=1, le=1 << 16)]] = Field(default_factory=dict)
    """Numeric features of columns with a list of numbers in each row, such as embeddings, by the length of the lists:
    {emb: 64} makes emb.0 to emb.63. `exclude` leaves out those that it names."""
    similarities: dict[Similarity, tuple[tuple[str, str], ...]] = Field(default_factory=dict)
    """Numeric features of two such columns of a row, under vectors or not: {cosine: [[query_emb, emb]]} makes
    query_emb.cosine.emb, and `dot` their dot product."""
    fill: dict[str, Fill] = Field(default_factory=dict)
    """Values of numeric features where they are missing, for engines without missing values: a number, or `median`, by
    feature, by a prefix and `*`, or for all as {numeric: median}. A data set keeps its medians: periods that are
    added later, and rows that are ranked, are filled with the same."""
    fill_periods: Texts = ()
    """The periods, or ranges A..B, whose rows have these medians: those of training. By default all rows of the inputs
    that make the data set."""
    optional: tuple[str, ...] = ()
    """Columns of features that a file may lack, such as those that later files add: they are missing values there."""
    exclude: tuple[str, ...] = ()
    """Columns, or prefixes with *, that patterns do not match."""
    delimiter: Literal[",", ";", "\t", "|"] | None = None
    """Separator of CSV fields; by default a tab in files named .tsv, otherwise a comma, or a semicolon if the comma
    is the decimal mark."""
    quotes: bool = True
    """Whether quotes enclose fields of CSV files; false reads a quote as any other character of a text."""
    decimal: Literal[".", ","] = "."
    """Decimal mark of numbers in CSV files; no mark separates thousands."""
    encoding: str = UTF8
    """Encoding of CSV files, such as cp1252 (Excel in Western Europe), latin-1 or utf-16."""
    header: tuple[str, ...] = ()
    """Names of the columns of CSV files whose first line is a row; by default the first line has the names."""

    @field_validator("fill_periods")
    @classmethod
    def _named_periods(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if relative := [each for each in value if Relative.parse(each)]:
            raise ValueError(f"{relative[0]!r} counts periods that are not made yet; name them, or a range A..B")
        return value

    @model_validator(mode="after")
    def _uses_fit_each_other(self) -> Self:
        if not (self.features or self.categorical or self.sources()):
            raise ValueError('name at least one feature; features: ["*"] takes every numeric column')
        if self.time is None and any("days_before" in parts for parts in self.dates.values()):
            raise ValueError("dates: days_before is the time up to the row's own; name its column under time")
        if self.query in self.within or len({*self.within}) < len(self.within):
            raise ValueError("within names a column twice, or that of query; name each column of the id once")
        named = {"query": self.query, "item": self.item, "time": self.time, "period_column": self.period_column}
        for use, name in named.items():
            if name in self.features:
                raise ValueError(f"{name!r} is the {use} and cannot be a numeric feature")
        if self.labels and self.label is not None:
            raise ValueError("label and labels both name the label; leave label out")
        for name in (self.label, *self.labels.values()):
            if name is not None and name in (*self.features, *self.categorical):
                raise ValueError(f"{name!r} is the label and cannot be a feature")
        self._check_side((*self.features, *self.categorical))
        for name in self.optional:
            if name.endswith("*") or name not in (*self.features, *self.categorical, *self.dates, *self.vectors):
                raise ValueError(
                    f"optional: {name!r} is not named under features, categorical, dates or vectors; name it there, "
                    "not by a pattern, since a file may lack it"
                )
        if self.unjudged != "reject" and self.label_column is None:
            raise ValueError("unjudged needs label, the column that some rows have no value of")
        if alike := [one for _, one, other in self.similarity_features().values() if one == other]:
            raise ValueError(f"similarities compares {alike[0]!r} with itself; name two columns")
        if self.decimal == "," and self.delimiter == ",":
            raise ValueError("decimal and delimiter are both a comma; set the delimiter that the file has")
        return self

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, value: str) -> str:
        try:
            "".encode(value)
        except LookupError:
            raise ValueError("no encoding of text that Python knows; write it as utf-8 or cp1252") from None
        return value

    @field_validator("grades", mode="before")
    @classmethod
    def _keys_as_text(cls, value: Any) -> Any:
        """Values as text, in the form used to compare numbers and booleans."""
        if not isinstance(value, Mapping):
            return value
        texts = {key: str(key).lower() if isinstance(key, bool) else str(key).removesuffix(".0") for key in value}
        return {texts[key]: grade for key, grade in value.items()}

    @model_validator(mode="after")
    def _fitting_grades(self) -> Self:
        if self.grades is None:
            return self
        if self.label_column is None:
            raise ValueError("grades needs label, the column whose values have grades")
        if isinstance(self.grades, dict):
            for value, grade in self.grades.items():
                if grade is not None and not 0 <= grade <= HIGHEST_LABEL:
                    problem = f"{value}: {grade:g} is no grade"
                    raise ValueError(f"grades: {problem}; give each value one from 0 to {HIGHEST_LABEL}")
        elif list(self.grades) != sorted(set(self.grades)):
            raise ValueError("grades: cut points must rise")
        if not self.grades:
            raise ValueError("grades: give a grade to each value, or at least one cut point")
        return self

    def dialect(self, url: str) -> Dialect:
        """The form of a CSV file."""
        delimiter = self.delimiter or usual_delimiter(url, self.decimal)
        return Dialect(delimiter, self.decimal, self.encoding, self.quotes, self.header)

    def named(self) -> list[tuple[str, Use]]:
        """Query, document, label, times, and the side columns; each column of the query id has that use."""
        single: dict[Use, str | None] = {
            "query": self.query,
            "item": self.item,
            "graded label" if isinstance(self.grades, dict) else "label": self.label_column,
            "time": self.time,
            "period_column": self.period_column,
        }
        named = [(name, use) for use, name in single.items() if name is not None]
        named += [(name, "query") for name in self.within]
        named += [(name, "label") for name in self.further_labels.values()]
        named += [(name, use) for use, name in self.side().items()]
        return named

    @property
    def goals(self) -> dict[str, str]:
        """The columns of the labels by their names, if several are named."""
        return self.labels

    @property
    def label_column(self) -> str | None:
        """The column of the label, the first of several."""
        return next(iter(self.labels.values()), self.label)

    def date_features(self) -> dict[str, tuple[str, DatePart]]:
        """The features of dates, by their names: column and part."""
        return {f"{column}.{part}": (column, part) for column, parts in self.dates.items() for part in parts}

    def vector_features(self) -> dict[str, tuple[str, int]]:
        """The features of vectors, by their names: column and place."""
        found = {f"{column}.{i}": (column, i) for column, size in self.vectors.items() for i in range(size)}
        left_out = found.keys() & {*self.exclude}
        return {name: of for name, of in found.items() if name not in left_out} if left_out else found

    def similarity_features(self) -> dict[str, tuple[Similarity, str, str]]:
        """The features of two vectors, by their names: the kind and both columns."""
        triples = [(kind, *pair) for kind, pairs in self.similarities.items() for pair in pairs]
        return {f"{one}.{kind}.{other}": (kind, one, other) for kind, one, other in triples}

    @property
    def vector_columns(self) -> dict[str, int | None]:
        """The vector columns that features are made of, with their stated length."""
        columns = [column for column, _ in self.vector_features().values()]
        columns += [column for _, *pair in self.similarity_features().values() for column in pair]
        return {column: self.vectors.get(column) for column in columns}

    def sources(self) -> dict[str, tuple[str, ...]]:
        """The features that are made of columns: name -> columns; any other feature is a column itself."""
        made: dict[str, tuple[str, ...]] = {name: (column,) for name, (column, _) in self.vector_features().items()}
        made |= {name: (one, other) for name, (_, one, other) in self.similarity_features().items()}
        return made | {name: (column,) for name, (column, _) in self.date_features().items()}

    def sources_of(self, names: Iterable[str]) -> dict[str, None]:
        """The columns that some features are, or are made of, in the order of the features."""
        made = self.sources()
        return dict.fromkeys(column for name in names for column in made.get(name, (name,)))

    def used(self) -> set[str]:
        """All columns with a use, and the patterns of features."""
        return {*self.beside_features(), *self.features, *self.categorical, *self.dates, *self.vector_columns}

    def fill_of(self, feature: Feature) -> Fill | None:
        """The fill of a feature's missing values, by its name, else by the first pattern; None if not filled."""
        if feature.kind != "numeric":
            return None
        for pattern, value in sorted(self.fill.items(), key=lambda item: item[0] != feature.name):
            prefix = pattern[:-1] if pattern.endswith("*") else None
            if pattern in (feature.name, "numeric") or (prefix is not None and feature.name.startswith(prefix)):
                return value
        return None

    def fills_of(self, features: Sequence[Feature]) -> dict[str, Fill]:
        """The fill of each feature that has one; an InputError if a setting fits no numeric feature."""
        numeric = [feature for feature in features if feature.kind == "numeric"]
        categories = {feature.name for feature in features if feature.kind == "categorical"}
        for pattern in self.fill:
            if pattern in categories:
                raise InputError(
                    f"fill: {pattern!r} is a category, and a missing one is a value of its own; leave it out"
                )
            matching(pattern, numeric, key="source.columns.fill")
        fills = ((feature.name, self.fill_of(feature)) for feature in numeric)
        return {name: value for name, value in fills if value is not None}


class ListColumns(_Columns):
    """The uses of the columns of a Parquet file with one query group per row; columns of documents hold lists.

    The defaults read the files of a data set directory again; set `n_features` or `names`, and `labels`, `docs` and
    `period_column: period` as needed.
    """

    query: str = "query_id"
    """Column with the query id."""
    features: tuple[str, ...] = ("features",)
    """One column with all features: a list per document, or one list, document after document. Or one column for each
    numeric feature."""
    categorical: tuple[str, ...] = ()
    """Names of the categorical features; if each feature has its own column, these come after the numeric ones."""
    names: tuple[str, ...] = ()
    """Names of the features in the one column, in order; 1, 2, ... if not given."""
    n_features: int | None = Field(default=None, ge=1)
    """Number of features in the one column, if `names` is not given."""
    labels: str | dict[GoalName, str] | None = None
    """Column with labels; null for an unlabelled group. Or several by name, the first of which says which groups have
    labels; a null in the others counts 0."""
    docs: str | None = None
    """Column with document ids."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.names or self.n_features) and len(self.features) != 1:
            raise ValueError("names and n_features describe one column of features; name one under features")
        if self.names and self.n_features not in (None, len(self.names)):
            raise ValueError(f"there are {len(self.names)} names for n_features {self.n_features}; drop n_features")
        if len(set(self.names)) < len(self.names):
            raise ValueError("names has a name twice; name each feature once")
        if not self.features and not self.categorical:
            raise ValueError("name at least one column of features")
        self._check_side((*self.features, *([] if self.matrix else self.categorical)))
        return self

    @property
    def goals(self) -> dict[str, str]:
        """The columns of the labels by their names, if several are named."""
        return self.labels if isinstance(self.labels, dict) else {}

    @property
    def label_column(self) -> str | None:
        """The column of the labels, the first of several."""
        return next(iter(self.labels.values()), None) if isinstance(self.labels, dict) else self.labels

    @property
    def matrix(self) -> bool:
        """True if all features are in one column."""
        return len(self.features) == 1 and bool(self.names or self.n_features or not self.categorical)

    def feature_columns(self, schema: pa.Schema) -> list[str]:
        """The columns that hold features, in the order that ColumnMapping states."""
        if self.matrix:
            return list(self.features)
        categorical = named_columns(schema.names, self.categorical)
        return [name for name in named_columns(schema.names, self.features) if name not in categorical] + categorical

    def named(self) -> list[tuple[str, Use]]:
        """Query, document, label, times, and the side columns."""
        single: dict[Use, str | None] = {
            "query": self.query,
            "labels": self.label_column,
            "docs": self.docs,
            "time": self.time,
            "period_column": self.period_column,
        }
        named = [(name, use) for use, name in single.items() if name is not None]
        named += [(name, "labels") for name in self.further_labels.values()]
        return named + [(name, f"list of {side}") for side, name in self.side().items()]


def named_columns(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that match the patterns, each once, in the order that ColumnMapping states."""
    present, matched, each = set(names), dict[str, None](), set(patterns)
    for pattern in patterns:
        if pattern.endswith("*"):
            matched |= dict.fromkeys(n for n in sorted(present - each) if n.startswith(pattern[:-1]))
        elif pattern in present:
            matched[pattern] = None
    return list(matched)
