"""The code blocks of the README and the docs."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    every = [Block(page, text[: m.start(2)].count("\n") + 1, m[1], m[2]) for m in found]
    return [block for block in every if block.language in languages]


def configs(page: Path) -> dict[str, str]:
    """The YAML blocks of a page that are files, by the names in their first lines."""
    named = ((re.match(r"# (\w+\.yaml)\b", block.text), block.text) for block in blocks(page, "yaml"))
    return {name[1]: text for name, text in named if name}


def lines(text: str) -> Iterator[str]:
    """The commands of a shell block, with continued lines joined and without comments alone."""
    for line in text.replace("\\\n", " ").splitlines():
        if shlex.split(line, comments=True):
            yield line


def commands(page: Path) -> Iterator[list[str]]:
    """The words of the commands of a page; after a submission, those of its job."""
    for line in (line for block in blocks(page, "sh") for line in lines(block.text)):
        words = shlex.split(line, comments=True)
        yield words
        if words[2:3] == ["jobs.submit"] and "--" in words:
            job, *arguments = words[words.index("--") + 1 :]
            yield ["python", "-m", f"jobs.{job}", *arguments]
