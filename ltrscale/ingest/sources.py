"""The formats that `prepare` reads: their configs, their features, and their blocks of rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Feature, RawColumns
from ltrscale.errors import InputError
from ltrscale.ingest import parquet
from ltrscale.ingest.baidu import FEATURES, BaiduUltr, read_baidu
from ltrscale.ingest.categories import CategoryEncoder
from ltrscale.ingest.grouplogs import group_features, read_groups
from ltrscale.ingest.joins import Join, load
from ltrscale.ingest.letor import infer_features, read_letor
from ltrscale.ingest.logs import item_features, item_schema, raw_columns, read_items
from ltrscale.ingest.mapping import ColumnMapping, GroupColumns, missing
from ltrscale.ingest.rows import RowBlock
from ltrscale.ingest.texts import TokenColumns
from ltrscale.ingest.vocabularies import Encoding, files_of

_BLOCK_BYTES = 1 << 22  # larger blocks are no faster and take more memory
_ROWS = 1 << 14


class Letor(Config):
    """LETOR or svmlight text, plain, gzip or xz."""

    kind: Literal["letor"] = "letor"
    dense: bool = True
    """Whether every row states every feature; if not, omitted features are 0."""
    n_features: int | None = Field(default=None, ge=1)
    """Number of features; inferred from the first good row by default, for dense rows only."""
    feature_names: tuple[str, ...] | None = None
    """Names of the features, in order; 1, 2, ... if not given."""


class Items(Config):
    """Parquet, CSV or JSON lines with one item (document) per row."""

    kind: Literal["items"] = "items"
    columns: ColumnMapping
    """The uses of the columns."""
    joins: tuple[Join, ...] = ()
    """Tables whose columns join the rows, one after the other, such as the texts of documents."""


class GroupRows(Config):
    """Parquet with one query group per row, in list columns."""

    kind: Literal["groups"] = "groups"
    columns: GroupColumns
    """The uses of the columns."""


Source = Annotated[Letor | Items | GroupRows | BaiduUltr, Field(discriminator="kind")]


class File(Config):
    """One input file."""

    url: str
    """The place of the file."""
    period: str | None = None
    """The fixed period of its rows."""
    group_sizes: str | None = None
    """The file with the sizes of its groups."""
    version: str | None = None
    """The version of the table that it belongs to."""


Reader = Callable[[File], Iterator[RowBlock]]


def find_features(source: Source, files: Sequence[File]) -> tuple[Feature, ...]:
    """The features of the first file, or of all files if they must be inferred from rows.

    Raises:
        InputError: the features cannot be inferred, or those of LETOR files differ.
    """
    match source:
        case Letor():
            return _letor_features(source, files)
        case Items(columns=columns, joins=joins):
            return tuple(item_features(files[0].url, columns, joins))
        case GroupRows(columns=groups):
            return tuple(group_features(files[0].url, groups))
        case BaiduUltr():
            return FEATURES


def fills_of(source: Source) -> dict[str, float]:
    """The numbers for missing values, by feature, once `fills.find_fills` has found the medians."""
    fill = source.columns.fill if isinstance(source, Items) else {}
    return {name: value for name, value in fill.items() if value != "median"}


def raw_of(source: Source, features: Sequence[Feature], url: str) -> RawColumns | None:
    """How a file has the columns that features are made of; None if its rows are no items."""
    match source:
        case Items(columns=columns, joins=joins):
            return raw_columns(url, columns, joins, features)
        case Letor() | GroupRows() | BaiduUltr():
            return None


def for_scoring(
    source: Source,
    features: Sequence[Feature],
    *,
    meta: Sequence[str],
    positions: bool,
    dated: bool,
    tokens: bool = False,
    fills: Mapping[str, float] | None = None,
) -> Source:
    """The same reading of rows that need nothing but what scoring needs.

    Columns are found by name, so their order does not matter, and further ones are not read. LETOR text, and lists of
    features in one column, have their features in the order of the training data.

    Args:
        source: how the training data were read.
        features: of the model; columns with these names are read, and no others.
        meta: the group columns to keep.
        positions: whether the model reads positions; otherwise the rows need not have them.
        dated: whether the rows determine their period; otherwise they need no time stamp.
        tokens: whether the model reads tokens; otherwise the rows need no texts.
        fills: the numbers for missing values of the training data, by feature; None if the columns have them.

    Raises:
        InputError: the columns ask for a median, which would be that of the rows to score.
    """
    dropped = [
        "clicks",
        "weights",
        "gain",
        *([] if tokens else ["tokens"]),
        *([] if positions else ["positions"]),
        *([] if dated else ["time", "period_column"]),
    ]
    without: dict[str, Any] = {"meta": tuple(meta), **dict.fromkeys(dropped)}
    named: dict[str, tuple[str, ...]] = {
        "features": tuple(feature.name for feature in features if feature.kind == "numeric"),
        "categorical": tuple(feature.name for feature in features if feature.kind == "categorical"),
    }
    match source:
        case Letor() | BaiduUltr():
            return source
        case Items(columns=columns):
            of_dates, read = columns.date_features(), {feature.name for feature in features}
            dates: dict[str, list[str]] = {}
            for name in of_dates.keys() & read:
                column, part = of_dates[name]
                dates.setdefault(column, []).append(part)
            if any("days_before" in parts for parts in dates.values()):
                without.pop("time", None)
            named = {kind: tuple(name for name in names if name not in of_dates) for kind, names in named.items()}
            wanted = {each.name: columns.fill_of(each) if fills is None else fills.get(each.name) for each in features}
            fill = {name: value for name, value in wanted.items() if value is not None}
            if "median" in fill.values():
                raise InputError(
                    "source.columns.fill: a median is that of the training data, which the bundle does not record; "
                    "write its number"
                )
            columns = columns.replace(
                label=None, grades=None, exclude=(), dates=dates, fill=fill, fill_periods=(), **without, **named
            )
            return source.replace(columns=columns, joins=_needed(source.joins, columns))
        case GroupRows(columns=groups):
            return source.replace(columns=groups.replace(labels=None, **without, **({} if groups.matrix else named)))


def _needed(joins: Sequence[Join], columns: ColumnMapping) -> tuple[Join, ...]:
    """The tables that have a column in use; such as not one that only had labels."""
    used = {*columns.named().values(), *columns.features, *columns.categorical, *columns.dates, *columns.meta}
    used |= {*(columns.tokens.columns if columns.tokens else ())}
    needed: list[Join] = []
    for join in reversed(joins):
        if used & join.columns.keys():
            needed.append(join)
            used |= join.key.keys()  # which an earlier table may have
    return tuple(reversed(needed))


def tokens_of(source: Source) -> TokenColumns | None:
    """The token fields that a source has."""
    match source:
        case Letor():
            return None
        case Items(columns=columns):
            return columns.tokens
        case GroupRows(columns=groups):
            return groups.tokens
        case BaiduUltr():
            return source.tokens


def files_beside(source: Source) -> list[str]:
    """The files that a source reads besides the inputs: the tables that join, and those of a tokenizer."""
    tokens, joins = tokens_of(source), source.joins if isinstance(source, Items) else ()
    own = files_of(tokens.tokenizer) if tokens else []
    return [url for join in joins for url in storage.list_files(join.path)] + own


def missing_columns(source: Source, url: str) -> list[str]:
    """The columns that a source names, no patterns, and a file lacks, each with its use; none of text without names."""
    match source:
        case Letor() | BaiduUltr():
            return []
        case Items(columns=columns, joins=joins):
            return missing(item_schema(url, columns, joins), columns, url)
        case GroupRows(columns=groups):
            return missing(parquet.read_schema(url), groups, url)


def takes_any_order(source: Source) -> bool:
    """Whether a reader finds features by the names of their columns."""
    return source.kind == "items" or (source.kind == "groups" and not source.columns.matrix)


def open_source(
    source: Source,
    features: Sequence[Feature],
    *,
    first: str,
    encoders: dict[str, CategoryEncoder],
    encoding: Encoding | None = None,
) -> Reader:
    """The reader of files that have these features, which are those of the file `first`; it fills `encoders`.

    The reader raises InputError for a file without them. `encoders` are by feature; `encoding` is as for `read_items`.
    """
    match source:
        case Letor(dense=dense):
            n, size = len(features), _BLOCK_BYTES
            return lambda file: read_letor(
                file.url, n_features=n, dense=dense, group_sizes=file.group_sizes, block_bytes=size
            )
        case Items(columns=columns, joins=joins):
            joined = [load(join, columns.dialect) for join in joins]
            read = partial(read_items, mapping=columns, features=features, first=first, encoders=encoders)
            read = partial(read, joined=joined, encoding=encoding, batch_rows=_ROWS)
            return lambda file: read(file.url)
        case GroupRows(columns=groups):
            read_rows = partial(read_groups, mapping=groups, features=features, first=first, encoders=encoders)
            return lambda file: read_rows(file.url, encoding=encoding)
        case BaiduUltr():
            return lambda file: read_baidu(file.url, source, encoding=encoding, encoders=encoders)


def _letor_features(source: Letor, files: Sequence[File]) -> tuple[Feature, ...]:
    """The features of LETOR files: by the config, or else by the first good row of each file."""
    names = source.feature_names
    n_features = source.n_features or (len(names) if names else _infer_features(source, files))
    names = names or tuple(str(i + 1) for i in range(n_features))
    if len(names) != n_features or len(set(names)) != n_features:
        raise InputError(f"source.feature_names: {len(set(names))} names for {n_features} features; name each one once")
    return tuple(Feature(name=name) for name in names)


def _infer_features(source: Letor, files: Sequence[File]) -> int:
    if not source.dense:
        raise InputError("source.n_features: sparse rows do not state how many features there are; set it")
    n_features, first = 0, ""
    for file in files:
        found = infer_features(file.url, qid=file.group_sizes is None)
        if found is not None and not n_features:
            n_features, first = found, file.url
        elif found is not None and found != n_features:
            raise InputError(
                f"{file.url}: column {min(found, n_features) + 1}: the first row has {found} features, that of {first} "
                f"has {n_features}; mend the file, prepare it apart, or set source.n_features"
            )
    return n_features or 1  # without a good row all are rejected, with any number
