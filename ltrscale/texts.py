"""YAML of users: bounded in size and depth, without repeated keys, each alias with a value of its own.

And YAML and Markdown that are written for them. In Markdown a name, a URL or an error stays plain text, whatever
characters it has. In YAML foreign texts are quoted, and none breaks its line, not even in a comment. YAML also
breaks lines at a carriage return and at three Unicode characters, and refuses other control characters. All of them are
written as escapes, which YAML reads back in quoted values.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from ltrscale import storage
from ltrscale.errors import InputError

MOST_BYTES = 1 << 19
"""Maximum size of a config file."""
_MOST_DEPTH = 50
_MOST_UNSHARED = 1 << 22
"""Characters of all scalars plus `_OF_A_NODE` per node, with every alias written out: nested aliases grow fast."""
_OF_A_NODE = 32


def read_yaml(url: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        InputError: the file is missing, too large, not YAML, or no mapping.
    """
    storage.check_scheme(url)  # no web server: its answer may change, and come from anybody
    try:
        if storage.size(url) > MOST_BYTES:
            raise InputError(f"{url}: more than {MOST_BYTES:,} bytes; a config is smaller, check the path")
        text = storage.read_bytes(url).decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{url}: not text in UTF-8 ({error}); save it as UTF-8") from error
    values = parse_yaml(text, url)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{url}: a config is a mapping of keys to values, this is a {type(values).__name__}")
    return values


class _Loader(yaml.SafeLoader):
    """YAML with bounded size after expanding aliases, and without repeated keys, of which PyYAML keeps the last."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _measure(node, {})
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        # PyYAML lets Python's own errors through, such as that for a number with thousands of digits
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(problem=f"no {kind} ({error})", problem_mark=node.start_mark) from error

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands here twice", problem_mark=key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return node


def _measure(node: yaml.Node, cache: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Size and depth of a node with every alias written out; `cache` keeps them by the node's id."""
    if id(node) not in cache:
        cache[id(node)] = None  # in progress: meeting this again means that the node contains itself
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        below = [_measure(n, cache) for part in parts for n in (part if isinstance(part, tuple) else (part,))]
        own_size = _OF_A_NODE + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
        cache[id(node)] = own_size + sum(size for size, _ in below), 1 + max((depth for _, depth in below), default=0)
    measured = cache[id(node)]
    if measured is None or measured[0] > _MOST_UNSHARED or measured[1] > _MOST_DEPTH:
        problem = "an alias inside its own value" if measured is None else "too large or too deep for a config"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return measured


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; an `InputError` that starts with `where` if it is none."""
    try:
        return _unshared(yaml.load(text, _Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InputError(f"{where}: not YAML: {position}{error.problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{where}: not YAML: {error}") from error


def _unshared(value: Any) -> Any:
    """A copy in which every YAML alias (`*name`) has its own value, so that an override changes one place only."""
    if isinstance(value, dict):
        return {key: _unshared(inner) for key, inner in value.items()}
    return [_unshared(inner) for inner in value] if isinstance(value, list) else value


def escaped(text: str) -> str:
    r"""The text with invisible characters escaped, so that it is one line.

    Example:
        >>> escaped("# two\nlines, \x85 or\u2028more")
        '# two\\x0alines, \\x85 or\\u2028more'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(ord(c)) for c in text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def yaml_text(lines: Iterable[str]) -> str:
    """Join the lines of a config, escaped so that each stays one line."""
    return "".join(f"{escaped(line)}\n" for line in lines)


def flow(value: Mapping[str, object] | Sequence[object] | str) -> str:
    """A list, mapping or text as YAML in one line; texts and keys are quoted because of words such as yes."""
    return escaped(json.dumps(value, ensure_ascii=False))


_PLAIN = re.compile(r"(\.{0,2}/|[A-Za-z_])[\w./-]*")
_RESOLVER, _TEXT = yaml.resolver.Resolver(), "tag:yaml.org,2002:str"


def plain_yaml(value: str) -> str:
    """A name or path as YAML, quoted where it must be.

    Example:
        >>> [plain_yaml(value) for value in ("price", "./log.csv", "yes", "a: b")]
        ['price', './log.csv', '"yes"', '"a: b"']
    """
    if not value.isprintable() or not _PLAIN.fullmatch(value):
        return flow(value)
    tag = _RESOLVER.resolve(yaml.ScalarNode, value, (True, False))  # type: ignore[no-untyped-call]
    return value if tag == _TEXT else flow(value)


_MARKUP = re.compile(r"[\\`|]|<(?=[A-Za-z/!?])|](?=[(\[:])")


def escape(text: str) -> str:
    r"""The text in one line, escaped so that it makes no code, column, tag or link, without control characters.

    Example:
        >>> escape("[a](javascript:b) | <script> < 5 [0.1, 0.2]")
        '[a\\](javascript:b) \\| &lt;script> < 5 [0.1, 0.2]'
    """
    return _MARKUP.sub(lambda match: "&lt;" if match[0] == "<" else f"\\{match[0]}", one_line(text))


def as_code(text: str) -> str:
    """The text in one line as code.

    Example:
        >>> as_code("s3://bucket/a`b")
        "`s3://bucket/a'b`"
    """
    return f"`{one_line(text).replace('`', chr(39))}`"


def one_line(text: str) -> str:
    """The text without control characters."""
    return "".join(c if c.isprintable() else " " for c in text)
