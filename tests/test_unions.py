"""A choice implements itself: outside the files of a union, no code asks which member it has.

The files of a union are those that define it and its members. Asking is an `isinstance`, a `case` of a class, or the
comparison of a `kind` or a `library` with the name of a member.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
AGREED = {
    "ltrscale/bundle/files.py": "only the encoder of text reads tokens, and has a vocabulary to compare",
    "ltrscale/bundle/networks.py": "weights of one architecture are one ranker; mypy has to know",
    "ltrscale/evaluation/measure/explain.py": "an encoder ranks nothing, so that another question is answered of it",
    "ltrscale/experiments/methods/single.py": "presets read settings before they are validated; networks have students "
    "of other settings than trees",
    "ltrscale/experiments/report/make.py": "a report that lacks a part says so in a section of its own",
    "ltrscale/experiments/report/differences.py": "only a log with one item a row names a column of the item",
    "ltrscale/runtime/under_ray.py": "messages are data that cross processes, and the driver alone acts on them",
    "ltrscale/ranking/libraries.py": "rules of other programs are known for a few metrics, and differ between these",
    "ltrscale/reports/render.py": "blocks are data; one function writes them as Markdown and for the terminal",
    "ltrscale/serving/raw.py": "only rows of a log with one item a row are read again by an export",
    "ltrscale/training/fitting.py": "models read no files, so what the encoder of text needs of them is found here",
}
"""Why a file may ask for members of a union of other files."""

Member = tuple[str, str]
"""The file of a class, and its name."""


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax trees of the package and of the command lines, by path."""
    paths = sorted(path for folder in ("ltrscale", "jobs") for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


@cache
def names_in(path: str) -> dict[str, ast.ClassDef | ast.expr | Member]:
    """What the names of a file stand for: its classes, values, and what it imports from the package."""
    found: dict[str, ast.ClassDef | ast.expr | Member] = {}
    for node in trees()[path].body:
        match node:
            case ast.ImportFrom(module=str(module), names=names, level=0):
                at = module.replace(".", "/")
                for name in names:
                    for file in (f"{at}.py", f"{at}/__init__.py"):
                        if file in trees():
                            found[name.asname or name.name] = (file, name.name)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.ClassDef(name=name):
                found[name] = node
    return found


def members(path: str, node: ast.AST) -> list[Member]:
    """The classes of the package that an expression in a file names, through the names of unions."""
    match node:
        case ast.Name(id=name):
            return _members_of((path, name))
        case ast.Attribute(value=ast.Name(id=package), attr=name):
            there = names_in(path).get(package)
            return _members_of((f"ltrscale/{package}/__init__.py", name)) if isinstance(there, tuple) else []
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return members(path, left) + members(path, right)
        case ast.Tuple(elts=several):
            return [member for each in several for member in members(path, each)]
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[first, *_])):
            return members(path, first)
    return []


def _members_of(name: Member) -> list[Member]:
    path, own = name
    match names_in(path).get(own) if path in trees() else None:
        case ast.ClassDef():
            return [name]
        case (str(file), str(other)):
            return _members_of((file, other))
        case ast.expr() as value:
            return members(path, value)
    return []


@cache
def unions() -> list[tuple[set[Member], set[str]]]:
    """The members and the files of each union: those that have a name, and those that are distinguished by the kind."""
    found = []
    for path, tree in trees().items():
        values = {value for value in names_in(path).values() if isinstance(value, ast.expr)}
        for node in ast.walk(tree):
            if node in values or _has_discriminator(node):
                of_union = set(members(path, node))
                if len(of_union) > 1:
                    found.append((of_union, {path, *(file for file, _ in of_union)}))
    bundles = {each for each in classes() if _is_bundle(each)}
    return [*found, (bundles, {file for file in trees() if file.startswith("ltrscale/bundle/")})]


def _has_discriminator(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[_, ast.Call(keywords=keywords), *_])):
            return any(keyword.arg == "discriminator" for keyword in keywords)
    return False


def classes() -> list[Member]:
    """All classes."""
    return [(path, name) for path in trees() for name, of in names_in(path).items() if isinstance(of, ast.ClassDef)]


def _is_bundle(member: Member) -> bool:
    """Whether a class is a bundle of some kind."""
    bases = [base for node in _nodes(member) for base in node.bases]
    return any(
        above == "Bundle" or _is_bundle((file, above)) for base in bases for file, above in members(member[0], base)
    )


def _nodes(member: Member) -> list[ast.ClassDef]:
    node = names_in(member[0])[member[1]]
    return [node] if isinstance(node, ast.ClassDef) else []


def homes() -> dict[Member | str, set[str]]:
    """The files that may ask for each class, and for each kind."""
    found: dict[Member | str, set[str]] = {}
    for of_union, files in unions():
        for member in of_union:
            for key in (member, *(kind for node in _nodes(member) for kind in kinds(node))):
                found.setdefault(key, set()).update(files)
    return found


def kinds(node: ast.ClassDef) -> Iterator[str]:
    """The `kind` of a class."""
    for line in node.body:
        match line:
            case ast.AnnAssign(target=ast.Name(id="kind"), value=ast.Constant(value=kind)):
                yield str(kind)


def asked(path: str) -> Iterator[tuple[int, Member | str]]:
    """Each class and each kind that a file asks for, with the line."""
    for node in ast.walk(trees()[path]):
        match node:
            case ast.MatchClass(cls=cls) | ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, cls]):
                yield from ((node.lineno, member) for member in members(path, cls))
            case ast.Compare(left=left, comparators=[right]) if _is_kind(left) or _is_kind(right):
                values = [part for side in (left, right) for part in ast.walk(side)]
                yield from ((node.lineno, str(part.value)) for part in values if isinstance(part, ast.Constant))
            case ast.Match(subject=subject, cases=cases) if any(map(_is_kind, ast.walk(subject))):
                values = [part for case in cases for part in ast.walk(case.pattern)]
                yield from (
                    (part.lineno, ast.literal_eval(part.value)) for part in values if isinstance(part, ast.MatchValue)
                )


def _is_kind(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in ("kind", "library")


@cache
def switches() -> dict[str, list[str]]:
    """The places that ask for a member of a union of other files, by file."""
    known, found = homes(), dict[str, list[str]]()
    for path in trees():
        for line, wanted in asked(path):
            if path not in known.get(wanted, {path}):
                name = wanted if isinstance(wanted, str) else wanted[1]
                found.setdefault(path, []).append(f"line {line} asks for {name}")
    return found


@pytest.mark.slow
def test_the_unions_are_found() -> None:
    names = {name for of_union, _ in unions() for _, name in of_union}
    assert {"LambdaRankConfig", "NDCGConfig", "ResNetConfig", "RankFormerConfig", "SimCLRRankConfig"} <= names
    assert {"MixupConfig", "NeuralMethod", "Letor", "BinaryFeedback", "LightGBMConfig", "OnnxFormat"} <= names
    assert {"TreesBundle", "PositionBased", "FinetuneSearch", "StepDecayConfig", "KnownTokenizer"} <= names


@pytest.mark.slow
def test_a_choice_implements_itself() -> None:
    assert {path: lines for path, lines in switches().items() if path not in AGREED} == {}


@pytest.mark.slow
def test_every_exception_is_needed() -> None:
    assert AGREED.keys() - switches().keys() == set()
