"""One word, one thing: a name at the top level of two modules means the same in both."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "contributing.md").read_text()
SAME = {
    "T": "any type, as everywhere in Python",
    "document": "the report of an analysis, as data",
    "boost": "grows trees with the library of its module",
    "load": "reads a config, and opens a bundle",
    "Ranker": "scores documents: the network, and the class that users import",
}
"""Names that several modules may define, with what all of them mean."""


def defined() -> Iterator[tuple[str, str]]:
    """The public names at the top level of each module, with the module."""
    for path in sorted((ROOT / "ltrscale").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    names = [name]
                case ast.Assign(value=ast.Call(func=ast.Name(id="Late"))):
                    names = []  # an import
                case ast.Assign(targets=targets):
                    names = [target.id for target in targets if isinstance(target, ast.Name)]
                case _:
                    names = []
            yield from ((name, str(path.relative_to(ROOT))) for name in names if not name.startswith("_"))


@pytest.mark.slow
def test_a_name_has_one_meaning() -> None:
    places = defaultdict(set)
    for name, path in defined():
        places[name].add(path)
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert {name: paths for name, paths in twice.items() if name not in SAME} == {}, (
        "rename one of each, or list it in SAME with the reason"
    )
    assert SAME.keys() <= twice.keys(), "a name that no two modules define any more leaves the list"


def test_the_glossary_is_in_order_and_has_each_word_once() -> None:
    table = PAGE.partition("## Glossary")[2].partition("\n## ")[0]
    words = re.findall(r"^\| ([a-z][\w ,-]*) \|", table, re.MULTILINE)[1:]
    assert len(words) > 50
    assert words == sorted(words)
    assert len(set(words)) == len(words)
