"""The origin of an output: the settings that its result depends on, as plain data, with the hashes of its inputs.

A committed directory records its origin, so that the same command finds it up to date.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from pydantic import BaseModel

from ltrscale import storage
from ltrscale.config import Config, ConfigT, is_operational, recordable


def result_of(config: ConfigT) -> ConfigT:
    """The config with all operational keys at their defaults, also in configs below it; equal for equal results.

    Example:
        >>> from ltrscale.config import Config, Operational
        >>> class Job(Config):
        ...     seed: int = 0
        ...     threads: Operational[int] = 4
        >>> result_of(Job(seed=1, threads=8))
        Job(seed=1, threads=4)
    """
    fields = type(config).model_fields
    values = {
        name: field.get_default(call_default_factory=True)
        if is_operational(field) and not field.is_required()
        else _result_of(getattr(config, name))
        for name, field in fields.items()
    }
    return config.model_copy(update=values)


def _result_of(value: Any) -> Any:
    match value:
        case Config():
            return result_of(value)
        case tuple():
            return tuple(map(_result_of, value))
        case dict():
            return {key: _result_of(item) for key, item in value.items()}
        case _:
            return value


def digest(value: Any) -> str:
    """Hash of plain data or a config; independent of key order.

    Example:
        >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
        True
    """
    sha256 = hashlib.sha256()
    for text in _texts(value):
        sha256.update(text.encode())
    return sha256.hexdigest()


class Json(tuple[str, ...]):
    """Serialised JSON in several texts, for values too large as plain data."""

    @classmethod
    def array(cls, elements: Iterable[Sequence[str]]) -> Self:
        """The array of some elements, each JSON itself.

        Example:
            >>> "".join(Json.array([["1"], Json.array([["2"], ["3"]])]))
            '[1, [2, 3]]'
        """
        following = [text for element in elements for text in (", ", *element)]
        return cls(["[", *following[1:], "]"])


def as_text(value: Any) -> str:
    """Plain data or a config as JSON, its keys sorted; values of the outermost object may be `Json`.

    Example:
        >>> as_text({"b": Json(["[1, ", "2]"]), "a": None})
        '{"a": null, "b": [1, 2]}'
    """
    return "".join(_texts(value))


def _texts(value: Any) -> Iterator[str]:
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    if not isinstance(plain, Mapping) or not any(isinstance(each, Json) for each in plain.values()):
        yield json.dumps(plain, sort_keys=True)
        return
    for before, key in zip(itertools.chain("{", itertools.repeat(", ")), sorted(plain), strict=False):
        yield f"{before}{json.dumps(key)}: "
        yield from plain[key] if isinstance(plain[key], Json) else _texts(plain[key])
    yield "}"


def settings_of(config: Config | Mapping[str, Any]) -> dict[str, Any]:
    """What the result depends on, as plain data: operational keys get their defaults, or are dropped if they have none.

    Plain data stay unchanged.

    Example:
        >>> from ltrscale.config import Config, Operational
        >>> class Job(Config):
        ...     out: Operational[str]
        ...     seed: int = 0
        >>> settings_of(Job(out="runs/a", seed=1))
        {'seed': 1}
    """
    if not isinstance(config, Config):
        return dict(config)
    without_default = {
        name for name, field in type(config).model_fields.items() if is_operational(field) and field.is_required()
    }
    return result_of(config).model_dump(mode="json", exclude=without_default)


def made_by(stage: str, settings: Config | Mapping[str, Any], inputs: Mapping[str, str]) -> dict[str, Any]:
    """The origin that a committed directory records: stage, what the result depends on, and hashes of inputs."""
    return recordable({"stage": stage, "config": settings_of(settings), "inputs": dict(inputs)})


def is_current(url: str, origin: Mapping[str, Any]) -> bool:
    """Whether the directory was committed by the same stage with the same config and inputs, and is complete."""
    manifest = storage.read_manifest(url)
    return manifest is not None and is_made_by(manifest, origin) and storage.is_whole(url, manifest)


def is_made_by(manifest: Mapping[str, Any], origin: Mapping[str, Any]) -> bool:
    """Whether a manifest records this origin; inputs are compared by content, not by URL."""
    # through JSON, as the manifest was: tuples become lists
    return bool(by_content(manifest.get("made_by")) == by_content(json.loads(json.dumps(origin))))


def by_content(origin: Any) -> Any:
    """An origin, or a part of one as plain data, with the content of each input instead of its URL.

    Example:
        >>> by_content({"config": {"start": "runs/a"}, "inputs": {"runs/a": "sha"}})
        {'config': {'start': 'sha'}, 'inputs': ['sha']}
    """
    return _by_content(origin, {})


def _by_content(value: Any, contents: Mapping[str, str]) -> Any:
    match value:
        case {"inputs": dict(inputs)}:
            contents = {**contents, **inputs}
            other_settings = {key: _by_content(item, contents) for key, item in value.items() if key != "inputs"}
            return other_settings | {"inputs": sorted(inputs.values())}
        case dict():
            return {key: _by_content(item, contents) for key, item in value.items()}
        case list():
            return [_by_content(item, contents) for item in value]
        case str():
            return contents.get(value, value)
        case _:
            return value
