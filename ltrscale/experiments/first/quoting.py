r"""Escapes for foreign texts in a config: values are quoted, and no text breaks its line, not even in a comment.

YAML also breaks lines at a carriage return and at three Unicode characters, and refuses other control characters. All
of them are written as escapes, which YAML reads back in quoted values.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

import yaml


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
