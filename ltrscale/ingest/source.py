"""A source: the format of the inputs of `prepare`, which reads its own files.

Shapes: N rows of a block, F features.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import pyarrow as pa

from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Feature, RawColumns
from ltrscale.data.dataset.tokens import TokenField
from ltrscale.ingest.categories import CategoryEncoder
from ltrscale.ingest.history import HistoryConfig
from ltrscale.ingest.mapping import ColumnMapping, ListColumns
from ltrscale.ingest.rows import RowBlock
from ltrscale.ingest.tables import LakeFile
from ltrscale.ingest.texts import Encoding, TokenColumns

Encoders = dict[str, CategoryEncoder]
"""The encoder of each categorical feature, by name."""


@dataclass(frozen=True)
class File:
    """One input file."""

    url: str
    """The place of the file."""
    period: str | None = None
    """The fixed period of its rows."""
    group_sizes: str | None = None
    """The file with the sizes of its groups."""
    version: str | None = None
    """The version of the table that it belongs to."""
    lake: LakeFile | None = field(default=None, compare=False, repr=False)
    """What the table serves of the file; None for all of it."""
    is_rewritten: bool = False
    """Whether it is not to be read, because the table has rewritten rows that were read before."""
    history: tuple[str, ...] = ()
    """The files with features of its rows from earlier events."""


Reader = Callable[[File], Iterator[RowBlock]]


@dataclass(frozen=True)
class Needs:
    """What scoring needs of rows.

    Args:
        features: the model's features; no other feature columns are read.
        meta: the group columns to keep.
        positions: whether the model reads positions; otherwise the rows need not have them.
        dated: whether the rows determine their period; otherwise they need no time stamp.
        tokens: whether the model reads tokens; otherwise the rows need no texts.
        fills: the training data's fill values, by feature; None if the columns have them.
    """

    features: Sequence[Feature]
    meta: Sequence[str] = ()
    positions: bool = False
    dated: bool = False
    tokens: bool = False
    fills: Mapping[str, float] | None = None

    def uses(self, without: Collection[str] = ()) -> dict[str, Any]:
        """The column settings to change for scoring; features `without` some, and None for columns it does not need."""
        idle = ["clicks", "weights", "gain"]
        idle += [] if self.tokens else ["tokens"]
        idle += [] if self.positions else ["positions"]
        idle += [] if self.dated else ["time", "period_column"]
        named = {
            use: tuple(each.name for each in self.features if each.kind == kind and each.name not in without)
            for kind, use in (("numeric", "features"), ("categorical", "categorical"))
        }
        return {"meta": tuple(self.meta), **named, **dict.fromkeys(idle)}


class Source(Config):
    """A format of the inputs: finds the features of files, and reads their rows."""

    kind: str
    missing_labels: ClassVar[bool] = True
    """True if a row may have no label; otherwise such a row is bad."""

    def find_features(self, files: Sequence[File]) -> tuple[Feature, ...]:
        """The features of the first file, or of all files, which must agree, if they are inferred from rows."""
        raise NotImplementedError

    def open(
        self, features: Sequence[Feature], *, first: str, encoders: Encoders, encoding: Encoding | None = None
    ) -> Reader:
        """The reader of files that have these features; it raises InputError for a file without them.

        Args:
            features: the features of the file `first`.
            first: the URL of the first file, for errors.
            encoders: the encoders of the categorical features; the reader fills them.
            encoding: makes tokens of texts; without it the tokens are texts, to train a tokenizer on.
        """
        raise NotImplementedError

    def for_scoring(self, needs: Needs) -> "Source":  # noqa: ARG002
        """The same source, reading only what scoring needs: columns by name, in any order.

        LETOR text, and lists of features in one column, have their features in the order of the training data.
        """
        return self

    def missing_columns(self, file: File) -> list[str]:  # noqa: ARG002
        """The named columns (not patterns) that a file lacks, each with its use; none for text without names."""
        return []

    def files_beside(self) -> list[str]:
        """The files that are read besides the inputs, such as a tokenizer's."""
        return self.token_columns.tokenizer.files() if self.token_columns else []

    def raw_columns(self, features: Sequence[Feature], file: File) -> RawColumns | None:  # noqa: ARG002
        """How a file stores the columns that features are made of; None if its rows are not items."""
        return None

    @property
    def rows(self) -> "Source":
        """The source of the rows that `prepare` groups; another one if the files are events, of which it makes them."""
        return self

    @property
    def uses(self) -> ColumnMapping | ListColumns | None:
        """The uses of the columns; None for text without named columns."""
        return None

    @property
    def mapping(self) -> ColumnMapping | None:
        """The uses of the columns of items; None if the rows are not items."""
        return self.uses if isinstance(self.uses, ColumnMapping) else None

    @property
    def goals(self) -> tuple[str, ...]:
        """The labels by name, if several are named."""
        return tuple(self.uses.goals) if self.uses else ()

    @property
    def known_before(self) -> HistoryConfig | None:
        """The features of the events before a row; None if there are none."""
        return None

    def timed(
        self, file: File, time: str, keys: Collection[str], numbers: Collection[str], *, own: bool
    ) -> Iterator[pa.Table]:
        """The `LINE`, time, keys and numbers of the rows of a file; of events of another table if it is not our `own`.

        A time that is missing or cannot be read is null, and so is a number that is not finite.
        """
        raise NotImplementedError

    @property
    def token_columns(self) -> TokenColumns | None:
        """The columns of tokens."""
        return self.uses.tokens if self.uses else None

    @property
    def token_fields(self) -> tuple[TokenField, ...]:
        """The token fields of the data set."""
        return tuple(self.token_columns.fields()) if self.token_columns else ()

    @property
    def takes_any_order(self) -> bool:
        """True if a reader finds features by the names of their columns."""
        return self.uses is not None and not (isinstance(self.uses, ListColumns) and self.uses.matrix)

    @property
    def fills(self) -> dict[str, float]:
        """The numbers for missing values, by feature; a median only once `filled` has it."""
        fill = self.mapping.fill if self.mapping else {}
        return {name: value for name, value in fill.items() if value != "median"}

    def filled(self, fills: Mapping[str, float]) -> Self:
        """The source with these numbers for missing values."""
        return self.replace(columns=self.mapping.replace(fill=dict(fills))) if self.mapping else self
