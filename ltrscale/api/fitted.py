"""The model of a fitted ranker: in memory, in copies, in files, and explanations of rows by it.

A saved ranker is the files of its bundle, and beside them its arguments and the uses of columns.
"""

import json
import os
import shutil
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import pyarrow as pa

from ltrscale import bundle as bundles
from ltrscale import storage
from ltrscale.bundle import Bundle, with_tokens_of
from ltrscale.bundle.explanations import Explanation, Reasoner
from ltrscale.config import Strict, validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.scored import NamedGroups, read_named
from ltrscale.devices import choose_device
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.serving.columns import uses_in_scoring, with_fills


class Folder:
    """A directory; without a URL, a scratch directory that disappears with this object."""

    def __init__(self, url: str | None = None) -> None:
        self.url = str(storage.scratch.make()) if url is None else url
        if url is None:
            weakref.finalize(self, _remove, self.url, os.getpid())


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # a forked process has a copy of the object, not of the directory
        shutil.rmtree(folder, ignore_errors=True)


class FittedModel:
    """An opened bundle, and how the rows that it learnt from were read; a copy has its own files."""

    def __init__(
        self,
        url: str,
        columns: Mapping[str, Any],
        array_width: int | None = None,
        names: Sequence[str] = (),
        *,
        folder: Folder | None = None,
    ) -> None:
        self.url, self._content, self.bundle = url, bundles.content_hash(url), bundles.load(url)
        self.columns = with_fills(columns, self.bundle)
        self.array_width = array_width
        self.names = tuple(names) or tuple(feature.name for feature in self.bundle.features)
        self._folder = folder  # which lasts as long as this
        self._reading: tuple[str, dict[str, Any], PrepareConfig] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and other processes: the files of the bundle instead of its place."""
        return _restored, (bundles.bundle_files(self.own_files()), self.columns, self.array_width, self.names)

    def own_files(self) -> str:
        """The directory of the bundle, whose files are still those that were opened."""
        if bundles.content_hash(self.url) != self._content:
            raise InputError(f"{self.url}: another fit has replaced this ranker's files; give each its own directory")
        return self.url

    @cached_property
    def scorer(self) -> bundles.Scorer:
        """The function that scores the bundle's features in their order."""
        return self.bundle.scorer(device=choose_device("auto"), threads=1)  # more only wait here

    def reading(
        self, uses: Mapping[str, Any], named: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> tuple[dict[str, Any], PrepareConfig]:
        """The uses of columns in scoring, of which the caller `named` some, and how rows are read; cached."""
        key, last = repr((uses, named, settings)), self._reading
        if last is None or last[0] != key:
            of_scoring = uses_in_scoring(uses, self.bundle, "Ranker", named=named)
            source = {"kind": "items", "columns": {**of_scoring, "item": None}}
            of_rows = {**settings, "duplicates": "reject", "inputs": "X", "source": source}  # each row is a document
            # key and values in one assignment: another thread may ask with other uses
            last = self._reading = key, of_scoring, validate(PrepareConfig, of_rows, "prepare")
        return last[1:]


def _restored(files: Mapping[str, bytes], *read_as: Any) -> FittedModel:
    """A model whose files lie in a scratch directory of this process."""
    folder = Folder()
    for name, content in files.items():
        storage.write_bytes(storage.join(folder.url, name), content)
    return FittedModel(folder.url, *read_as, folder=folder)


_ESTIMATOR = "estimator.json"


class SavedRanker(Strict):
    """`estimator.json`, beside the files of a saved ranker's bundle."""

    arguments: dict[str, Any]
    columns: dict[str, Any]
    array_width: int | None = None
    """Columns of the training array; null for a table, where columns have names."""
    names: tuple[str, ...] = ()
    """`feature_names_in_`; empty in files of older versions, where features are in the order of the bundle."""

    @classmethod
    def read(cls, url: str) -> Self | None:
        """What was saved beside a bundle; None if a job made the bundle."""
        manifest = bundles.read_bundle_manifest(url)
        if _ESTIMATOR not in storage.listed_in(manifest):
            return None
        content = json.loads(storage.read_verified(url, _ESTIMATOR, manifest))
        return validate(cls, content, storage.join(url, _ESTIMATOR))

    def commit(self, url: str, bundle: str) -> None:
        """Commit a copy of a bundle with this beside it."""
        files = bundles.bundle_files(bundle)
        manifest = json.loads(files.pop(storage.MANIFEST))
        plain = self.model_dump(mode="json", fallback=lambda value: value.tolist())  # of numpy, as searches give them
        files[_ESTIMATOR] = json.dumps(plain, indent=1).encode()
        with storage.Commit(url) as commit:
            commit.write(files)
            commit.finish({name: manifest[name] for name in ("format", "version", "made_by")})


def explained(
    bundle: Bundle, split: Split, items: Sequence[str], rows: tuple[int, int] | None, depth: int
) -> list[Explanation]:
    """Explanations of a data set whose documents are named by row number; `items` are the names of the rows.

    They compare two rows, or by default the first item of each query with those of ranks 2 to `depth`.
    """
    selection = with_tokens_of(select(split, labelled=False), [bundle])
    names = open_dataset(split.data[0]).manifest.names_of_categories
    reasoner = Reasoner.from_bundles({bundle.url: bundle}, selection.features, names, device=choose_device("auto"))
    found: list[Explanation] = []
    for part in read_named(selection):
        ids = part.ids.drop(["doc_ids"]).append_column(
            "doc_ids", pa.array([[items[int(row)] for row in of_list.as_py()] for of_list in part.ids["doc_ids"]])
        )
        if rows is None:
            found += reasoner.explain_firsts(part.groups, ids, depth)
        elif (places := _places(part, rows)) is not None:
            found += reasoner.explain(part.groups, ids, [(places[0], places[1:])])
    if rows is not None and not found:
        raise InputError(
            f"rows {rows[0]} and {rows[1]} are no two rows of one query; a score is compared within a query"
        )
    return found


def _places(part: NamedGroups, rows: tuple[int, int]) -> list[int] | None:
    """The documents of two rows in a batch; None if no list has both."""
    for start, of_list in zip(part.groups.offsets_Q1.tolist(), part.ids["doc_ids"].to_pylist(), strict=False):
        if rows[0] != rows[1] and {str(row) for row in rows} <= {*of_list}:
            return [start + of_list.index(str(row)) for row in rows]
    return None
