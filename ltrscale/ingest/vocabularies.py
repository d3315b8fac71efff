"""Vocabularies: where token ids come from, and turning texts into ids.

Tokenizers are those of the library `tokenizers` (an extra, `text`), in BERT's form: text is cleaned and split at white
space and punctuation, then words are split into pieces of a vocabulary (WordPiece).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.tokens import SPECIAL, Special, Vocabulary
from ltrscale.errors import InputError
from ltrscale.ingest.lines import UTF8, read_lines

_WORDS: dict[Special, str] = {name: f"[{name.upper()}]" for name in SPECIAL}
_BATCH = 1 << 12
_LETTERS = 1 << 20  # no limit
_EXTRA = "pip install 'ltrscale[text]'"


TextSource = Callable[[], Iterable[Sequence[str]]]
"""Starts a pass through texts, in blocks."""


@dataclass(frozen=True)
class Encoding:
    """A vocabulary, and the tokenizer's file that makes ids of texts; empty where ids are ready."""

    vocabulary: Vocabulary
    content: bytes = b""

    def __call__(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of all texts, end to end, and the number of ids of each; special tokens are not added."""
        tokenizer = _library().Tokenizer.from_buffer(self.content)
        found = (
            encoded.ids
            for start in range(0, len(texts), _BATCH)
            for encoded in tokenizer.encode_batch_fast(list(texts[start : start + _BATCH]), add_special_tokens=False)
        )
        lists = list(found)
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        return np.fromiter(chain.from_iterable(lists), np.int64, int(lengths.sum())), lengths


class Tokenizer(Config):
    """Where the token ids of texts come from."""

    kind: str

    @property
    def learns_from(self) -> tuple[str, ...]:
        """The periods whose texts it is made of; none for one that is there already."""
        return ()

    def files(self) -> list[str]:
        """The files that it is made of."""
        return []

    def open(self, texts: TextSource) -> Encoding:
        """The vocabulary, and what makes ids of texts.

        Args:
            texts: starts a pass through the texts of the periods that it learns from, in blocks.

        Raises:
            InputError: a file is missing or no vocabulary, a special token is missing, there is no text to learn from,
                or the library is not installed.
        """
        raise NotImplementedError

    def limit(self, vocabulary: Vocabulary) -> int:
        """The number above all ids that the input may hold."""
        return vocabulary.size


class ReadyIds(Tokenizer):
    """Ids that are ready in the input, as lists or as text with one space between two ids."""

    kind: Literal["ids"] = "ids"
    size: int = Field(ge=1)
    """Number of ids in the input, which are below it."""
    special: dict[Special, int] = Field(default_factory=dict)
    """Ids of special tokens (pad, unk, cls, sep, mask) among them; those not named get new ids from `size` on."""

    def open(self, texts: TextSource) -> Encoding:  # noqa: ARG002
        """A vocabulary alone."""
        return Encoding(_numbered(self.size, self.special))

    def limit(self, vocabulary: Vocabulary) -> int:  # noqa: ARG002
        """Special tokens that got new ids are not in the input."""
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
        words = _words(self.path)
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
        """Its periods."""
        return self.periods

    def open(self, texts: TextSource) -> Encoding:
        """BERT's tokenizer with pieces that are learnt now."""
        return _trained(self, texts)


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
        """That tokenizer."""
        if self.path.endswith(".json"):
            return _encoding(_parsed(storage.read_bytes(self.path), self.path), self.path)
        return encoding_of(self.path)


TokenizerConfig = Annotated[ReadyIds | WordPieces | TrainedPieces | KnownTokenizer, Field(discriminator="kind")]


def encoding_of(url: str) -> Encoding:
    """The encoding of a data set with tokens.

    Raises:
        InputError: it has no tokens, or its tokenizer was changed.
    """
    vocabulary = open_dataset(url).manifest.vocabulary
    if vocabulary is None:
        raise InputError(f"{url}: this data set has no tokens; name one that has, or another kind of tokenizer")
    if vocabulary.path is None:
        return Encoding(vocabulary)
    manifest = storage.read_manifest(url) or {}
    return Encoding(vocabulary, storage.read_verified(url, vocabulary.path, manifest))


def _numbered(size: int, special: dict[Special, int]) -> Vocabulary:
    """A vocabulary of ids; special tokens that have none get the ids from `size` on."""
    if bad := [f"{name}: {i}" for name, i in special.items() if not 0 <= i < size]:
        raise InputError(f"tokenizer.special: {bad[0]} is not below size {size}; leave it out for a new id")
    new = [name for name in SPECIAL if name not in special]
    return Vocabulary(size=size + len(new), special={**special, **{name: size + i for i, name in enumerate(new)}})


def _words(path: str) -> list[str]:
    text = b"".join(block for block, _ in read_lines(storage.absolute(path), size=1 << 22, encoding=UTF8))
    try:
        return text.decode().replace("\r\n", "\n").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: no text in UTF-8 ({error}); name a file with one word piece per line") from error


def _trained(config: TrainedPieces, texts: TextSource) -> Encoding:
    """Word pieces learnt from texts, the same ones each time.

    The library counts letters in an order that changes from run to run, and numbers pieces in that order. So a first
    pass only finds the letters, and a second one begins with them in sorted order.
    """
    words = list(_WORDS.values())
    letters = sorted(set(_learnt(words, 0, config.lowercase, texts())) - {*words})
    if not letters:
        raise InputError(
            f"tokenizer.periods: {', '.join(config.periods)} have no text to train on; name periods of the inputs"
        )
    if len(words) + len(letters) >= config.size:
        raise InputError(f"tokenizer.size: the texts have {len(letters):,} different letters; raise it above these")
    pieces = _learnt(words + letters, config.size, config.lowercase, texts())
    return _encoding(_bert(pieces, config.lowercase), "the trained tokenizer")


def _learnt(first: Sequence[str], size: int, lowercase: bool, texts: Iterable[Sequence[str]]) -> dict[str, int]:
    """The pieces learnt from texts, by id; those in `first` come first."""
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


def _parsed(content: bytes, where: str) -> Any:
    library = _library()
    try:
        return library.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises no narrower class
        raise InputError(f"{where}: no tokenizer of the library tokenizers ({error}); name a tokenizer.json") from error


def _library() -> Any:
    try:
        import tokenizers  # imported late: only texts need it
        from tokenizers import models, normalizers, pre_tokenizers, trainers  # noqa: F401
    except ImportError as error:
        raise InputError(f"texts need the library tokenizers, which is not installed; {_EXTRA}") from error
    return tokenizers
