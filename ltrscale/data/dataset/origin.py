"""The origin of a data set: its commands, the data sets it was relabelled from, and how its raw rows were read."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import pyarrow.compute as pc

from ltrscale import storage
from ltrscale.data.dataset.files import ADDITION
from ltrscale.data.dataset.manifest import ADDED, Dataset, Manifest, open_dataset, read_dataset
from ltrscale.errors import InputError
from ltrscale.origin import as_text

_NOT_OF_ROWS = {
    *("inputs", "add", "expect", "max_rejected"),
    *("sort_memory", "compression", "row_group_mb", "file_mb", "unit_mb"),
}
"""Settings of `prepare` that say which files it read or how it wrote, not what a row means."""


MadeFirst = Literal["rows", "history"]
"""What `prepare` makes first of raw rows: rows of events, or the features of history."""
STATISTICS = "statistics"
"""The name of an input that is not a data set: the statistics that features were made with."""


def place_beside(data: str, made: MadeFirst) -> str:
    """The directory of what is made first for a data set."""
    return f"{data.rstrip('/')}-{made}"


def origins(dataset: Dataset) -> Callable[[str], set[str]]:
    """A function from a period to hashes: data sets that share a hash for a period have the same documents.

    These are the hashes of the period's content and of the whole data set. For a relabelled data set they include the
    hashes of its sources, as far as these can be followed, whether or not the sources have changed since.
    """
    manifests = [source.manifest for source in _lineage(dataset)]
    source_hashes = {str(hash_before) for manifest in manifests for hash_before in _sources(manifest).values()}
    hashes = {manifest.hash for manifest in manifests} | source_hashes
    return lambda period: hashes | {m.hashes[period] for m in manifests if period in m.hashes}


RAW = "raw"
"""The key in the result of `read_as` that is not a setting: the columns of the raw rows."""


def prepare_settings_of(read_as: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only the settings of `prepare` from a result of `read_as`."""
    return {name: value for name, value in read_as.items() if name != RAW}


def fills_of(read_as: Mapping[str, Any]) -> dict[str, float] | None:
    """The fill values of missing values, by feature, from a result of `read_as`; None if that is empty."""
    return dict(read_as["source"]["columns"]["fill"]) if RAW in read_as else None


def read_as(dataset: Dataset) -> dict[str, Any]:
    """The settings that `prepare` read the raw rows of a data set with; empty if they are not known.

    A data set that was made from another has the settings of its source, while that exists. Texts are read with the
    tokenizer stored in the data set itself, and missing values are filled with its numbers. The columns of the rows are
    under `raw`.
    """
    try:
        *_, source = _lineage(dataset)
    except InputError:
        return {}
    last = source.manifest
    # a newer command may make features that the first one does not know
    made_by = last.made_by[ADDED][-1] if last.lacking and last.made_by.get(ADDED) else last.made_by
    settings = made_by.get("config") if made_by.get("stage") == "prepare" else None
    if not isinstance(settings, Mapping):
        return {}
    rows = {k: v for k, v in settings.items() if k not in _NOT_OF_ROWS}
    if last.raw is not None:
        columns = {name: value for name, value in rows["source"]["columns"].items() if name != "fill_periods"}
        rows["source"] = {**rows["source"], "columns": {**columns, "fill": last.fills}}
        rows[RAW] = last.raw.model_dump(mode="json")
    return _with_tokenizer(rows, dataset)


def inputs_of(dataset: Dataset) -> list[dict[str, Any]]:
    """The inputs that a data set was prepared from, or the data set that it was made of; they may no longer exist."""
    made_by = map(json.loads, commands(first_source(dataset)))
    prepared = [command["config"] for command in made_by if command.get("stage") == "prepare"]
    return [dict(each) for config in prepared for each in config["inputs"]]


def _with_tokenizer(settings: dict[str, Any], dataset: Dataset) -> dict[str, Any]:
    """Use the tokenizer stored in the data set: a trained one must not be trained again."""
    vocabulary = dataset.manifest.vocabulary
    if vocabulary is None or vocabulary.path is None:
        return settings
    source = settings["source"]
    tokens = {**source["columns"]["tokens"], "tokenizer": {"kind": "known", "path": storage.absolute(dataset.url)}}
    return {**settings, "source": {**source, "columns": {**source["columns"], "tokens": tokens}}}


def first_source(dataset: Dataset) -> Dataset:
    """The data set that was relabelled into this one, over however many steps, while it exists; else the last found."""
    *_, last = _lineage(dataset)
    return last


def _lineage(dataset: Dataset) -> Iterator[Dataset]:
    """A data set, then the sources that it was relabelled from, while they exist."""
    followed = set[str]()
    yield dataset
    while sources := _sources(dataset.manifest):
        (url,) = sources
        if url in followed or not storage.exists(storage.join(url, storage.MANIFEST)):
            return
        followed.add(url)
        dataset = open_dataset(url)
        yield dataset


def _sources(manifest: Manifest) -> Mapping[str, Any]:
    """The source of a data set made by relabelling or adding features, with the source's hash at that time."""
    inputs = manifest.made_by.get("inputs") if manifest.made_by.get("stage") in ("relabel", "match") else None
    sources = (
        {url: digest for url, digest in inputs.items() if url != STATISTICS} if isinstance(inputs, Mapping) else {}
    )
    return sources if len(sources) == 1 else {}


def commands(dataset: Dataset) -> Iterator[str]:
    """The commands that made a data set and each addition to it (`made_by`), as JSON with sorted keys, oldest first.

    Raises:
        InputError: a part of the manifest cannot be read, and no later addition has replaced it.
    """
    manifest, number = dataset.manifest, 0
    try:
        for command in _commands(dataset):
            yield command
            number += 1
    except InputError:
        now = read_dataset(dataset.url)
        if now.manifest.parts == manifest.parts or next(_commands(now)) != next(_commands(dataset)):
            raise
        # later additions have replaced the part by a longer one, so the current commands begin with the earlier ones
        added = sum(part.additions for part in manifest.parts) + len(manifest.made_by.get(ADDED, []))
        yield from itertools.islice(_commands(now), number, 1 + added)


def _commands(dataset: Dataset) -> Iterator[str]:
    yield as_text({key: value for key, value in dataset.manifest.made_by.items() if key != ADDED})
    for part in dataset.manifest.parts:
        if part.additions:
            rows = storage.read_manifest_part(dataset.url, vars(part), ["kind", "made_by"])
            yield from rows.filter(pc.equal(rows["kind"], ADDITION))["made_by"].to_pylist()
    yield from map(as_text, dataset.manifest.made_by.get(ADDED, []))
