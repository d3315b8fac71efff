"""Untrusted texts in Markdown: a name, a URL or an error stays plain text, whatever characters it has."""

import re

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
