"""Texts as token ids: tokenizers, columns of texts or ids, and the lists of ids made from them.

Tokenizers are those of the library `tokenizers` (an extra, `text`), in BERT's form: text is cleaned and split at white
space and punctuation, then words are split into pieces of a vocabulary (WordPiece). A column of lists has ids. A column
of text has ids with spaces between them where the tokenizer says `ids`, and raw text otherwise. Texts repeat in a log
(a query has many rows, a document many queries), so each distinct text of a block is tokenized once.

Shapes: N rows, T tokens, K distinct texts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, StringConstraints, model_validator

from ltrscale import storage
from ltrscale.arrays import Bools, Ints, offsets, runs
from ltrscale.config import Config
from ltrscale.data import columns as cols
from ltrscale.data.dataset.columns import LISTS, NAME, SPECIAL, Owner, Special, TokenField, Vocabulary
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.errors import InputError
from ltrscale.ingest.lines import line_blocks

_WORDS: dict[Special, str] = {name: f"[{name.upper()}]" for name in SPECIAL}
_BATCH = 1 << 12
_LETTERS = 1 << 20  # no limit
_EXTRA = "pip install 'ltrscale[text]'"


TextSource = Callable[[], Iterable[Sequence[str]]]
"""Starts a pass through texts, in blocks."""


@dataclass(frozen=True)
class Encoding:
    """A vocabulary, and the content of the tokenizer's file; empty if the input has ids."""

    vocabulary: Vocabulary
    content: bytes = b""

    def __call__(self, texts: Sequence[str]) -> tuple[Ints, Ints]:
        """The ids of all texts, end to end, and the number of ids of each; special tokens are not added."""
        tokenizer = _library().Tokenizer.from_buffer(self.content)
        lists = [
            encoded.ids
            for start in range(0, len(texts), _BATCH)
            for encoded in tokenizer.encode_batch_fast(list(texts[start : start + _BATCH]), add_special_tokens=False)
        ]
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        return np.fromiter(chain.from_iterable(lists), np.int64, int(lengths.sum())), lengths


class Tokenizer(Config):
    """Where the token ids of texts come from."""

    kind: str

    @property
    def learns_from(self) -> tuple[str, ...]:
        """The periods with the texts it is trained on; none for an existing tokenizer."""
        return ()

    def files(self) -> list[str]:
        """The files that it reads."""
        return []

    def open(self, texts: TextSource) -> Encoding:
        """The vocabulary, and what makes ids of texts; `texts` are those of the periods in `learns_from`."""
        raise NotImplementedError

    def limit(self, vocabulary: Vocabulary) -> int:
        """The exclusive upper bound of ids in the input."""
        return vocabulary.size


class ReadyIds(Tokenizer):
    """Ids that are ready in the input, as lists or as text with one space between two ids."""

    kind: Literal["ids"] = "ids"
    size: int = Field(ge=1)
    """Number of ids in the input, which are below it."""
    special: dict[Special, int] = Field(default_factory=dict)
    """Ids of special tokens (pad, unk, cls, sep, mask) among them; those not named get new ids from `size` on."""

    def open(self, texts: TextSource) -> Encoding:  # noqa: ARG002
        """Only a vocabulary; special tokens without an id get ids from `size` on."""
        if out_of_range := [f"{name}: {i}" for name, i in self.special.items() if not 0 <= i < self.size]:
            raise InputError(
                f"tokenizer.special: {out_of_range[0]} is not below size {self.size}; leave it out for a new id"
            )
        new = [name for name in SPECIAL if name not in self.special]
        special = {**self.special, **{name: self.size + i for i, name in enumerate(new)}}
        return Encoding(Vocabulary(size=self.size + len(new), special=special))

    def limit(self, vocabulary: Vocabulary) -> int:  # noqa: ARG002
        """The size, since special tokens with new ids do not occur in the input."""
        return self.size


class WordPieces(Tokenizer):
    """BERT's tokenizer with the word pieces of a file."""

    kind: Literal["wordpiece"] = "wordpiece"
    path: str
    """A file with one word piece per line (vocab.txt), perhaps with .gz or .xz; [PAD], [UNK], [CLS], [SEP] and [MASK]
    among them."""
    lowercase: bool = True
    """Lower the case of letters and strip accents, as the vocabularies called uncased need it."""

    def files(self) -> list[str]:
        """The file of word pieces."""
        return [storage.absolute(self.path)]

    def open(self, texts: TextSource) -> Encoding:  # noqa: ARG002
        """BERT's tokenizer with these pieces."""
        content = b"".join(lines.text for lines in line_blocks(storage.absolute(self.path)))
        try:
            words = content.decode().replace("\r\n", "\n").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            problem = f"no text in UTF-8 ({error}); name a file with one word piece per line"
            raise InputError(f"{self.path}: {problem}") from error
        return _encoding(_bert({word: i for i, word in enumerate(words)}, self.lowercase), self.path)


class TrainedPieces(Tokenizer):
    """BERT's tokenizer with word pieces that are learnt from the texts of some periods."""

    kind: Literal["train"] = "train"
    size: int = Field(default=30_000, ge=100)
    """The most word pieces."""
    periods: tuple[str, ...] = Field(min_length=1)
    """The periods whose texts are read for it, each different text once: those of training, so that nothing of later
    periods is known."""
    lowercase: bool = True
    """As for `wordpiece`."""

    @property
    def learns_from(self) -> tuple[str, ...]:
        """The periods of the config."""
        return self.periods

    def open(self, texts: TextSource) -> Encoding:
        """BERT's tokenizer with newly trained pieces, the same ones each time.

        The library counts letters in an order that changes from run to run, and numbers pieces in that order. So a
        first pass only finds the letters, and a second one starts with them in sorted order.
        """
        words = list(_WORDS.values())
        letters = sorted(set(_learnt(words, 0, self.lowercase, texts())) - {*words})
        if not letters:
            periods = ", ".join(self.periods)
            raise InputError(f"tokenizer.periods: {periods} have no text to train on; name periods of the inputs")
        if len(words) + len(letters) >= self.size:
            raise InputError(f"tokenizer.size: the texts have {len(letters):,} different letters; raise it above these")
        pieces = _learnt(words + letters, self.size, self.lowercase, texts())
        return _encoding(_bert(pieces, self.lowercase), "the trained tokenizer")


class KnownTokenizer(Tokenizer):
    """The tokenizer of another data set, or a file of the library `tokenizers`."""

    kind: Literal["known"] = "known"
    path: str
    """A data set directory with tokens, or a tokenizer.json."""

    def files(self) -> list[str]:
        """The manifest of the data set, or the file."""
        path = self.path
        return [storage.absolute(path if path.endswith(".json") else storage.join(path, storage.MANIFEST))]

    def open(self, texts: TextSource) -> Encoding:  # noqa: ARG002
        """The encoding of the data set or file."""
        if not self.path.endswith(".json"):
            return encoding_of(self.path)
        library, content = _library(), storage.read_bytes(self.path)
        try:
            tokenizer = library.Tokenizer.from_buffer(content)
        except Exception as error:  # the library has no narrower class
            problem = f"no tokenizer of the library tokenizers ({error}); name a tokenizer.json"
            raise InputError(f"{self.path}: {problem}") from error
        return _encoding(tokenizer, self.path)


TokenizerConfig = Annotated[ReadyIds | WordPieces | TrainedPieces | KnownTokenizer, Field(discriminator="kind")]


def encoding_of(url: str) -> Encoding:
    """The encoding of a data set with tokens."""
    vocabulary = open_dataset(url).manifest.vocabulary
    if vocabulary is None:
        raise InputError(f"{url}: this data set has no tokens; name one that has, or another kind of tokenizer")
    if vocabulary.path is None:
        return Encoding(vocabulary)
    manifest = storage.read_manifest(url) or {}
    return Encoding(vocabulary, storage.read_verified(url, vocabulary.path, manifest))


def _learnt(first: Sequence[str], size: int, lowercase: bool, texts: Iterable[Sequence[str]]) -> dict[str, int]:
    """The pieces trained on texts, with their ids; pieces in `first` come first."""
    tokenizer = _bert({piece: i for i, piece in enumerate(first)}, lowercase)
    trainer = _library().trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=list(first), limit_alphabet=_LETTERS, show_progress=False
    )
    tokenizer.train_from_iterator(chain.from_iterable(texts), trainer)
    return dict(tokenizer.get_vocab())


def _encoding(tokenizer: Any, where: str) -> Encoding:
    """A tokenizer with its vocabulary, without padding, truncation or added tokens."""
    special = {name: tokenizer.token_to_id(word) for name, word in _WORDS.items()}
    if missing := [_WORDS[name] for name, i in special.items() if i is None]:
        raise InputError(f"{where}: no token {', '.join(missing)}; use the vocabulary of a model of the BERT family")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    content = tokenizer.to_str(pretty=True).encode()
    return Encoding(Vocabulary(size=tokenizer.get_vocab_size(), special=special), content)


def _bert(words: dict[str, int], lowercase: bool) -> Any:
    library = _library()
    model = library.models.WordPiece(words, unk_token=_WORDS["unk"], max_input_chars_per_word=100)
    tokenizer = library.Tokenizer(model)
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _library() -> Any:
    try:
        import tokenizers  # only texts need it
        from tokenizers import models, normalizers, pre_tokenizers, trainers  # noqa: F401
    except ImportError as error:
        raise InputError(f"texts need the library tokenizers, which is not installed; {_EXTRA}") from error
    return tokenizers


FULL = "full_"
"""Prefix of `RowBlock` columns with the number of tokens of a text before it was cut."""
_SHOWN = 40

FieldName = Annotated[str, StringConstraints(pattern=NAME)]


class TextColumn(Config):
    """A column with texts or ids, and what becomes of them."""

    column: str
    """The column."""
    max_tokens: int = Field(default=128, ge=1)
    """The most tokens that are kept, the first ones; the manifest counts what is cut."""
    missing: Literal["reject", "empty"] = "reject"
    """A row without a text (null or empty) is rejected, or kept with no tokens."""
    lengths: str | None = None
    """For `groups`, where `column` has the ids of all documents end to end: the column with the ids of each."""


class TokenColumns(Config):
    """The token fields of a log, and the tokenizer that they share."""

    tokenizer: TokenizerConfig
    """What makes ids of texts, or `ids` that are ready."""
    query: dict[FieldName, TextColumn] = Field(default_factory=dict)
    """Fields of the query, by name: the first row of a group has the text."""
    document: dict[FieldName, TextColumn] = Field(default_factory=dict)
    """Fields of documents, by name, such as title and body."""

    @model_validator(mode="after")
    def _some_field(self) -> Self:
        if not self.query and not self.document:
            raise ValueError("tokens: name at least one field under query or document")
        if lengths := [name for name, text in self.query.items() if text.lengths is not None]:
            raise ValueError(f"query.{lengths[0]}: lengths are those of documents; leave them out")
        return self

    def fields(self) -> dict[TokenField, TextColumn]:
        """The fields of the data set, with the columns that they are read from."""
        owners: dict[Owner, Mapping[str, TextColumn]] = {"query": self.query, "document": self.document}
        return {
            TokenField(name=name, of=owner, max_tokens=text.max_tokens): text
            for owner, named in owners.items()
            for name, text in named.items()
        }

    @property
    def columns(self) -> list[str]:
        """All columns that are read."""
        texts = self.fields().values()
        return [column for text in texts for column in (text.column, text.lengths) if column is not None]


def read_tokens(
    values: pa.Array, field: TokenField, text: TextColumn, tokenizer: Tokenizer, encoding: Encoding | None
) -> tuple[dict[str, pa.Array], dict[int, str]]:
    """The columns of a `RowBlock` for one field, as lists of ids, and the faults of unusable rows.

    `values` has a text or a list of ids in each row. Without an encoding texts stay, to train a tokenizer on.
    """
    if encoding is None:
        is_text = cols.is_text(cols.value_type(values.type))
        return {field.column: cols.texts(values)[0] if is_text else pa.nulls(len(values), pa.string())}, {}
    ids = _list_ids(values) if cols.is_list(values.type) else _text_ids(cols.texts(values)[0], encoding)
    faults = {i: f"{field.name} {fault}" for i, fault in ids.faults.items()}
    if text.missing == "reject":
        faults |= dict.fromkeys(np.flatnonzero(ids.missing_N).tolist(), f"{field.name} has no text")
    faults |= _outside(field.name, ids, tokenizer.limit(encoding.vocabulary))
    return _cut(field, ids), faults


def _text_ids(texts: pa.StringArray, encoding: Encoding) -> "_Ids":
    """The ids of texts; each distinct text is tokenized once."""
    coded = texts.dictionary_encode()
    if not encoding.content:
        distinct = _number_ids(coded.dictionary)
    else:
        ids_T, lengths_K = encoding(coded.dictionary.to_pylist())
        distinct = _Ids(ids_T, lengths_K, np.zeros(len(lengths_K), bool), {})
    missing_N = pc.or_kleene(texts.is_null(), pc.equal(texts, "")).to_numpy(zero_copy_only=False)
    place_N = coded.indices.fill_null(0).to_numpy().astype(np.int64)
    return distinct.take(place_N, missing_N)


def _outside(name: str, ids: "_Ids", size: int) -> dict[int, str]:
    """The rows with an id outside the vocabulary."""
    bad_T = (ids.ids_T < 0) | (ids.ids_T >= size)
    if not bad_T.any():
        return {}
    row_T = np.repeat(np.arange(len(ids.lengths_N)), ids.lengths_N)
    rows, first = np.unique(row_T[bad_T], return_index=True)
    values = ids.ids_T[bad_T][first]
    return {
        i: f"{name}: token {value} is not in the vocabulary of {size:,}"
        for i, value in zip(rows.tolist(), values.tolist(), strict=True)
    }


@dataclass(frozen=True)
class _Ids:
    """The ids of some rows end to end, a mask of rows without text, and the faults of unreadable rows."""

    ids_T: Ints
    lengths_N: Ints
    missing_N: Bools
    faults: dict[int, str]

    def take(self, place_N: Ints, missing_N: Bools) -> "_Ids":
        """The row at each place; without ids if a text is missing."""
        if not len(self.lengths_N):
            return _Ids(self.ids_T, np.zeros(len(place_N), np.int64), missing_N, {})
        lengths_N = np.where(missing_N, 0, self.lengths_N[place_N])
        starts_N = offsets(self.lengths_N)[place_N]
        bad_places = np.array(sorted(self.faults), np.int64)
        rows = np.flatnonzero(np.isin(place_N, bad_places) & ~missing_N).tolist()
        faults = {i: self.faults[int(place_N[i])] for i in rows}
        return _Ids(self.ids_T[runs(starts_N, lengths_N)], lengths_N, missing_N, faults)


def _list_ids(values: pa.Array) -> _Ids:
    """The ids of lists."""
    flat, lengths_N = values.flatten(), pc.list_value_length(values).fill_null(0).to_numpy().astype(np.int64)
    missing_N = values.is_null().to_numpy(zero_copy_only=False)
    if not len(flat):
        return _Ids(np.empty(0, np.int64), np.zeros(len(values), np.int64), missing_N, {})
    numbers_T = cols.without_dictionary(flat).cast(pa.float64()).fill_null(np.nan).to_numpy()
    bad_T = numbers_T != np.floor(numbers_T)  # NaN too
    row_T = np.repeat(np.arange(len(values)), lengths_N)
    ids_T = np.where(bad_T, 0, numbers_T).astype(np.int64)
    faults = dict.fromkeys(np.unique(row_T[bad_T]).tolist(), "has a token that is no whole number")
    return _Ids(ids_T, lengths_N, missing_N, faults)


def _number_ids(texts: pa.StringArray) -> _Ids:
    """The ids of texts that are numbers separated by white space."""
    words = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(texts))
    lengths_N = pc.list_value_length(words).fill_null(0).to_numpy().astype(np.int64)
    flat = words.flatten()
    row_T = np.repeat(np.arange(len(texts)), lengths_N)
    empty_T = pc.equal(flat, "").to_numpy(zero_copy_only=False)  # an empty text has one empty part
    good_T = pc.match_substring_regex(flat, r"^-?[0-9]{1,18}$").to_numpy(zero_copy_only=False)
    ids_T = pc.if_else(pa.array(good_T), flat, "0").cast(pa.int64()).to_numpy()[~empty_T]
    bad_rows = np.flatnonzero(~good_T & ~empty_T)
    faults: dict[int, str] = {}
    for i in bad_rows.tolist():
        faults.setdefault(int(row_T[i]), f"has {flat[i].as_py()[:_SHOWN]!r}, which is no token id")
    lengths_N = np.bincount(row_T[~empty_T], minlength=len(texts)).astype(np.int64)
    return _Ids(ids_T, lengths_N, np.zeros(len(texts), bool), faults)


def _cut(field: TokenField, ids: _Ids) -> dict[str, pa.Array]:
    """Each row's first `max_tokens` ids, and the number before the cut."""
    kept_N = np.minimum(ids.lengths_N, field.max_tokens)
    ids_T = ids.ids_T[runs(offsets(ids.lengths_N)[:-1], kept_N)]
    inside_T = np.clip(ids_T, 0, np.iinfo(np.int32).max).astype(np.int32)  # rows with other ids are rejected
    lists = pa.ListArray.from_arrays(pa.array(offsets(kept_N), pa.int32()), pa.array(inside_T))
    return {field.column: lists.cast(LISTS), FULL + field.column: pa.array(ids.lengths_N)}
