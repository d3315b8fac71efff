"""The outcome of a round, as texts that can be compared with those of another round.

The content of the manifests counts, in their order. Names of data files do not, because they may contain a writer's
token. Times, logs and locations of inputs are left out.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ltrscale import storage
from ltrscale.data.dataset.manifest import open_dataset

_RUN = "run/"  # `_run/` too: log, metrics over time, environment: they describe the run, not its outcome
_PLACE = re.compile(r"(?:^|/)(?:service/([0-9a-f]{64})|candidates/([0-9a-f]{12}))(?:/|$)")
"""A directory named with a hash of what it was made of, settings with URLs among it, which differ between rounds."""
_MODEL_FILES = re.compile(r"\.(safetensors|txt|json|ubj|cbm)$")
_OF_THE_DATA = ("features", "summaries", "label_counts", "accounting")
_OF_A_BUNDLE = ("kind", "features", "part", "metrics")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a finished round."""

    facts: dict[str, str]
    """Hashes of contents, and values, by name; they must be the same in every round."""
    unlisted: tuple[str, ...]
    """Files that no manifest lists, except those of the run directories."""
    damage: tuple[str, ...]
    """Files that a manifest lists but that are missing or have another content."""


def outcome(url: str, *, killed: Collection[int] = ()) -> Outcome:
    """Read everything below the URL of a round.

    Args:
        url: the URL of the round.
        killed: process ids of killed commands. The last command of a directory may leave its lease there if it was
            killed; such a lease does not count, since it lapses.
    """
    names = [name.removeprefix(f"{url}/") for name in _files(url) if not name.endswith("/interrupted.json")]
    places = {url: "ROUND", **_models(url, names)}
    facts: dict[str, str] = {}
    damage: list[str] = []
    listed: set[str] = set()
    for name in names:
        folder, _, last = name.rpartition("/")
        if last in (storage.MANIFEST, storage.HIDDEN_MANIFEST):
            manifest = storage.read_manifest(f"{url}/{folder}", last) or {}
            hashes, contents = storage.listed_in(manifest), dict[str, bytes]()
            if manifest.get("format") == "ltrscale-dataset":  # parts of its manifest list files too
                dataset = open_dataset(f"{url}/{folder}").manifest
                hashes |= zip(dataset.files.paths, dataset.files.sha256, strict=True)
                manifest = {**manifest, "dataset": dataset}
            for path, sha256 in hashes.items():
                data = storage.read_bytes(f"{url}/{folder}/{path}") if f"{folder}/{path}" in names else None
                if data is None or hashlib.sha256(data).hexdigest() != sha256:
                    damage.append(f"{folder}/{path}: {'missing' if data is None else 'not what the manifest lists'}")
                contents[path] = data or b""
            listed.update((name, *(f"{folder}/{path}" for path in storage.sizes_in(f"{url}/{folder}", manifest))))
            facts |= {f"{folder}: {k}": _plain(v, places) for k, v in _facts(manifest, contents)}
        elif last in ("trial.json", "result.json"):
            values = json.loads(storage.read_bytes(f"{url}/{name}"))
            # no curve: the record of a run that was killed may lack its last minute, and so that of a resumed trial
            facts[name] = _plain({k: v for k, v in values.items() if k not in ("seconds", "curve")}, places)
        elif last == "best.yaml":
            facts[name] = _plain(storage.read_bytes(f"{url}/{name}").decode(), places)
    unlisted = [name for name in names if name not in listed and _RUN not in name and not _lapses(url, name, killed)]
    facts = {_named(name, places): fact for name, fact in facts.items()}
    return Outcome(facts, tuple(sorted(_named(name, places) for name in unlisted)), tuple(damage))


def _models(url: str, names: Collection[str]) -> dict[str, str]:
    """What distinguishes directories that are named with hashes: the model in them, by the hash."""
    models = {}
    for name in names:
        if (place := _PLACE.search(name)) and name.endswith("/model.txt"):
            sha256 = hashlib.sha256(storage.read_bytes(f"{url}/{name}")).hexdigest()
            models[place[1] or place[2]] = f"of-model-{sha256[:12]}"
    return models


def _named(text: str, places: Mapping[str, str]) -> str:
    """A text with the names of places that every round has."""
    for here, everywhere in places.items():
        text = text.replace(here, everywhere)
    return text


def _lapses(url: str, name: str, killed: Collection[int]) -> bool:
    """Whether a file is the lease of a process that was killed."""
    if name.rpartition("/")[2] != storage.lease.LEASE:
        return False
    return json.loads(storage.read_bytes(f"{url}/{name}"))["pid"] in killed


def _files(url: str) -> list[str]:
    """All files, including hidden ones."""
    fs, path = storage.filesystem(url)
    found = fs.find(path)
    return sorted(name if storage.is_local(url) else fs.unstrip_protocol(name) for name in found)


def _facts(manifest: Mapping[str, Any], contents: Mapping[str, bytes]) -> Iterator[tuple[str, Any]]:
    """The content of a committed directory, by name."""
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    match manifest.get("format"):
        case "ltrscale-dataset":
            dataset = manifest["dataset"]
            yield from ((key, manifest[key]) for key in _OF_THE_DATA)
            yield "longest", dataset.files.longest
            yield "query ids", [hashes[file.path] for file in dataset.query_ids]
            for i, file in enumerate(dataset.files):
                yield f"file {i}", [file.period, hashes[file.path], file.row_groups]
        case "ltrscale-bundle":
            config = json.loads(contents["config.json"] or b"{}")
            yield from ((key, config.get(key)) for key in _OF_A_BUNDLE)
            yield from ((name, h) for name, h in hashes.items() if _MODEL_FILES.search(name) and name != "config.json")
        case "ltrscale-scores":
            yield "groups and documents", [manifest["groups"], manifest["documents"]]
            yield "files", [hashes[file["path"]] for file in manifest["files"]]
        case "ltrscale-log":
            yield "files", list(hashes.values())
        case _:
            for name, data in contents.items():
                match name.rpartition(".")[2]:
                    case "json":
                        yield name, json.loads(data or b"{}")
                    case "parquet":
                        yield name, hashes[name]


def _plain(value: Any, places: Mapping[str, str]) -> str:
    """A value as text, without what only this round's places are called; a hash if the text is long."""
    text = _named(json.dumps(value, sort_keys=True), places)
    return text if len(text) <= 200 else f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def differences(mine: Outcome, undisturbed: Outcome) -> list[str]:
    """The differences from the undisturbed round, one line each."""
    lines = [f"damaged: {line}" for line in mine.damage]
    for name in sorted(mine.facts.keys() | undisturbed.facts.keys()):
        here, there = mine.facts.get(name, "nothing"), undisturbed.facts.get(name, "nothing")
        if here != there:
            lines.append(f"different: {name}: {here}, undisturbed {there}")
    lines += [f"left over: {name}" for name in sorted(set(mine.unlisted) - set(undisturbed.unlisted))]
    lines += [f"missing: {name}" for name in sorted(set(undisturbed.unlisted) - set(mine.unlisted))]
    return lines
