"""Configs: frozen pydantic models, read from YAML at any URL, with overrides from the command line.

Every config derives from `Config` and lives beside the function that reads it. `--help` shows the string under a field.
An unknown key is an error that names the nearest known key, or the value that a former key is fixed at.

What was recorded earlier (a bundle, a data set, the config of a run) may still hold a key whose value has become a
constant of the code since. With any other value it is an error, which names the constant.

At the end are the places below a config: what a dotted key, or a location of one of pydantic's errors, may hold.
"""

import inspect
import json
import re
import typing
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from ltrscale import storage
from ltrscale.errors import InputError, nearest, suggestion, without_credentials
from ltrscale.texts import parse_yaml, read_yaml


class Strict(BaseModel):
    """Base of what programs write and read back, such as manifests: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def replace(self, **changes: Any) -> Self:
        """A copy with other values, validated."""
        return type(self).model_validate({**self.model_dump(), **changes})


class Config(Strict):
    """Base of all configs, which users write: a nested key that is left out has the default of its place."""

    fixed: ClassVar[Mapping[str, Any]] = {}
    """Former keys, each with the value, as JSON has it, that is a constant of the code now."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Drop former keys, and fill the missing keys of a nested config from the default of its field here."""
        if not isinstance(values, Mapping):
            return values
        values = {name: value for name, value in values.items() if name not in cls.fixed or cls.fixed[name] != value}
        defaults = {name: cls.model_fields[name].default for name in values if name in cls.model_fields}
        return overlay({name: value for name, value in defaults.items() if isinstance(value, Config)}, values)


ConfigT = TypeVar("ConfigT", bound=Config)
StrictT = TypeVar("StrictT", bound=Strict)

CHECK = "# CHECK"
"""Starts the comment of a YAML line that the user has to check; the user removes it after checking."""


class _Operational:
    """The marker in `Operational`."""


T = TypeVar("T")
Operational = Annotated[T, _Operational()]
"""Marks a key, and all keys below it, that says how the work is done, not what the result is.

An output stays up to date, and an interrupted run resumes, if only such keys change. A change of any other key makes a
new result.
"""


def is_operational(field: FieldInfo) -> bool:
    """Whether a key is marked as `Operational`."""
    return any(isinstance(mark, _Operational) for mark in field.metadata)


def overlay(settings: Config | Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings `given` over `settings`, key by key; a part of another kind replaces the whole part.

    Example:
        >>> overlay({"a": {"kind": "x", "b": 1}, "c": 2}, {"a": {"b": 3}})
        {'a': {'kind': 'x', 'b': 3}, 'c': 2}
        >>> overlay({"a": {"kind": "x", "b": 1}}, {"a": {"kind": "y"}})
        {'a': {'kind': 'y'}}
    """
    merged = dict(settings)
    # a mapping by names that is the default of a config has its entries replaced together
    parts = Config if isinstance(settings, Config) else Config | Mapping
    for key, value in given.items():
        below = merged.get(key)
        if isinstance(below, parts) and isinstance(value, Mapping):
            kind = dict(below).get("kind")
            merged[key] = overlay(below, value) if value.get("kind", kind) == kind else value
        else:
            merged[key] = value
    return merged


def load(cls: type[ConfigT], urls: str | Sequence[str] = (), overrides: Sequence[str] = ()) -> ConfigT:
    """Read a config from YAML and apply `a.b=c` overrides, whose values are YAML too.

    Each of several files is laid over the files before it. An override with the value null removes an entry of a
    mapping by names, such as `methods.pretrained=null`.

    Raises:
        InputError: a file is missing or not YAML, a key is unknown, or a value does not fit; in one line.

    Example:
        >>> class Model(Config):
        ...     width: int = 136
        >>> class Job(Config):
        ...     model: Model = Model()
        >>> load(Job, overrides=["model.width=64"]).model.width
        64
        >>> load(Job, overrides=["model.widht=64"])
        Traceback (most recent call last):
        ltrscale.errors.InputError: command line: model.widht: unknown key; did you mean 'model.width'?
    """
    values: dict[str, Any] = {}
    urls = [urls] if isinstance(urls, str) else urls
    for url in urls:
        values = overlay(values, read_yaml(url))
    for override in overrides:
        _apply(cls, values, override)
    where = " with ".join([*urls, "--set"] if overrides else urls) if urls else "command line"
    return validate(cls, values, where)


def to_check(urls: Sequence[str]) -> list[str]:
    """The lines of configs that are still marked by `CHECK`, each with its file and number."""
    lines = [(url, n, text) for url in urls for n, text in enumerate(storage.read_bytes(url).decode().splitlines(), 1)]
    return [f"{url}:{n}: {text.strip()}" for url, n, text in lines if re.search(rf"{CHECK}\b", text)]


def validate(cls: type[StrictT], values: Mapping[str, Any], where: str) -> StrictT:
    """Build a config or another strict model; one `InputError`, starting with `where`, names all problems."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        # a union has a problem for each type; equal texts are given once
        problems = dict.fromkeys(_explain(cls, problem) for problem in error.errors())
        raise InputError(f"{where}: {'; '.join(problems)}") from error


def check_keys(cls: type[Config], values: Mapping[str, Any], where: str) -> None:
    """Refuse unknown keys as `validate` does, and nothing else: the values may be incomplete.

    Example:
        >>> class Model(Config):
        ...     width: int
        >>> check_keys(Model, {"widht": 1}, "model")
        Traceback (most recent call last):
        ltrscale.errors.InputError: model: widht: unknown key; did you mean 'width'?
    """
    try:
        cls.model_validate(values)
    except ValidationError as error:
        unknown = [_unknown_key(cls, each["loc"]) for each in error.errors() if each["type"] == "extra_forbidden"]
        if unknown:
            raise InputError(f"{where}: {'; '.join(unknown)}") from error


def dump(config: Config) -> str:
    """The config as YAML, with every value; `load` reads it back equal, except for credentials in URLs."""
    return str(yaml.safe_dump(recordable(config.model_dump(mode="json")), sort_keys=False, width=120))


def recordable(values: dict[str, Any]) -> dict[str, Any]:
    """Plain values without the credentials of URLs."""
    return dict(json.loads(without_credentials(json.dumps(values))))


def members(annotation: Any) -> tuple[type[Any], ...]:
    """The configs that an annotation mentions, in its order: of a union, also inside lists, mappings and `Annotated`.

    Example:
        >>> class A(Config): ...
        >>> class B(Config): ...
        >>> [member.__name__ for member in members(A | dict[str, B])]
        ['A', 'B']
    """
    own = (annotation,) if inspect.isclass(annotation) and issubclass(annotation, BaseModel) else ()
    return own + tuple(member for argument in typing.get_args(annotation) for member in members(argument))


def kind_of(cls: type[BaseModel]) -> str:
    """The `kind` of a config, which identifies it in its union."""
    return str(cls.model_fields["kind"].default)


def by_kind(union: Any) -> dict[str, type[Any]]:
    """The configs of a closed union by their kinds, in its order."""
    return {kind_of(cls): cls for cls in members(union)}


def _apply(cls: type[Config], values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise InputError(f"--set {override}: write it as key=value, for example --set finetune.epochs=10")
    *path, last = key.split(".")
    target: Any = values
    for part in path:
        slot = _slot(target, part, override)
        if isinstance(target, dict) and target.get(slot) is None:
            target[slot] = {}
        target = target[slot]
    slot, value = _slot(target, last, override), parse_yaml(text, f"--set {override}")
    if value is None and isinstance(target, dict) and _holds_entries(cls, path):
        if slot not in target:
            raise InputError(
                f"--set {override}: no entry of that name to remove; {suggestion(slot, target, 'there are')}"
            )
        del target[slot]
    else:
        target[slot] = value


def _holds_entries(cls: type[Config], path: Sequence[str]) -> bool:
    """Whether a place of a config is a mapping by names, whose entries cannot be null."""
    plain = (str, int, float, bool, type(None))  # these have no entries at all
    types = [kind for kind in place_at(cls, path).types if kind not in plain]
    if not types or any(typing.get_origin(kind) is not dict for kind in types):
        return False
    entries = [entry for kind in types for entry in alternatives(typing.get_args(kind)[1])]
    return Any not in entries and type(None) not in entries


def _slot(container: Any, part: str, override: str) -> Any:
    """The key of a mapping, or the index of a list, that a part of a dotted key names."""
    if isinstance(container, dict):
        return part
    if not isinstance(container, list):
        raise InputError(f"--set {override}: {part!r} is below a plain value; check the dots")
    if not part.isdecimal() or int(part) >= len(container):
        raise InputError(
            f"--set {override}: {part!r} is not an index of a list of {len(container)}; count from 0, or set "
            "the whole list"
        )
    return int(part)


def _explain(cls: type[BaseModel], problem: Any) -> str:
    """One validation problem of pydantic's as `key: problem`."""
    if problem["type"] == "extra_forbidden":
        return _unknown_key(cls, problem["loc"])
    place, value, message = place_at(cls, problem["loc"]), problem["input"], str(problem["msg"])
    shown = f" (given {value!r})" if isinstance(value, str | int | float | bool) else ""
    message = message.removeprefix("Value error, ")
    if problem["type"] == "missing":
        message = "missing, and has no default; set it (--help all explains every key)"
    elif problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
        message = "Input should be a mapping of keys to values"
    elif problem["type"].startswith("union_tag"):
        kinds, tag = [kind_of(config) for config in place.configs()], problem["ctx"].get("tag")
        message = f"has no kind; set {'.'.join([*place.key, 'kind'])} to one of {', '.join(kinds)}"
        if tag is not None:
            message = f"kind {tag!r} is unknown; {suggestion(tag, kinds, 'the kinds are')}"
    return f"{'.'.join(place.key)}: {message}{shown}" if place.key else message


def _unknown_key(cls: type[BaseModel], location: Sequence[str | int]) -> str:
    """The line for a key that no config has there: a former key, one of another kind, or the nearest known key."""
    *above, key = place_at(cls, location).key
    place, key_path = place_at(cls, location[:-1]), ".".join([*above, key])
    configs = place.configs()
    fixed = {name: value for config in configs if issubclass(config, Config) for name, value in config.fixed.items()}
    if key in fixed:
        return f"{key_path}: no longer a key, because its value is fixed at {json.dumps(fixed[key])}; remove it"
    if kinds := [kind_of(other) for other in place.others if key in other.model_fields]:
        chosen, kind = ".".join([*above, "kind"]), kind_of(configs[0])
        return f"{key_path}: a key of kind {', '.join(kinds)}, and {chosen} is {kind}; change one of the two"
    names = sorted({name for config in configs for name in config.model_fields})
    closest = nearest(key, names, alike=0.5)
    hint = f"did you mean {'.'.join([*above, closest])!r}?" if closest else f"the keys here are {', '.join(names)}"
    return f"{key_path}: unknown key; {hint}"


class KeyPlace(NamedTuple):
    """A place below a config."""

    key: tuple[str, ...]
    """The parts of its dotted key, as people write it."""
    types: Sequence[Any]
    """The types that the value there may have."""
    others: Sequence[type[BaseModel]] = ()
    """Configs of other kinds than the chosen one."""

    def configs(self) -> list[type[BaseModel]]:
        """The configs that the value may be."""
        return [t for t in self.types if inspect.isclass(t) and issubclass(t, BaseModel)]


def place_at(root: type[BaseModel], location: Sequence[str | int]) -> KeyPlace:
    """The place at a location of pydantic's, which also names the kind of each config on the way, or at a key."""
    place = KeyPlace((), (root,))
    for part in location:
        configs = place.configs()
        chosen = [c for c in configs if "kind" in c.model_fields and c.model_fields["kind"].default == part]
        if chosen and len(configs) > 1:
            place = KeyPlace(place.key, chosen, [config for config in configs if config not in chosen])
            continue
        fields = [config.model_fields[part].annotation for config in configs if part in config.model_fields]
        if not fields and len(place.types) > 1 and (branch := _branch(place.types, part)):
            place = KeyPlace(place.key, branch)
            continue
        items = [typing.get_args(t)[typing.get_origin(t) is dict] for t in place.types if _holds_items(t)]
        below = [t for inner in fields or items for t in alternatives(inner)]
        place = KeyPlace((*place.key, str(part)), below or place.types)
    return place


_BRANCH = re.compile(r"(constrained|function|is-instance|lax-or-strict|nullable)\W.*|(literal|dict|list|tuple|set)\[.*")
"""Names that pydantic gives to the types of a union, which no user has typed."""


def _branch(here: Sequence[Any], part: str | int) -> Sequence[Any]:
    """The types of a union that a part of a place names; empty if the part is a key."""
    names = {getattr(t, "__name__", ""): t for t in here if not _holds_items(t)}
    if part in names:
        return [names[str(part)]]
    if not isinstance(part, str) or not _BRANCH.fullmatch(part):
        return []
    origin = part.partition("[")[0]
    return [t for t in here if getattr(typing.get_origin(t), "__name__", "") == origin] or here


def _holds_items(annotation: Any) -> bool:
    return bool(typing.get_args(annotation)) and inspect.isclass(typing.get_origin(annotation))


def alternatives(annotation: Any) -> list[Any]:
    """The types of a union, without `Annotated`; the type itself if it is not a union."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return alternatives(inner[0])
    return [t for a in inner for t in alternatives(a)] if origin in (typing.Union, UnionType) else [annotation]
