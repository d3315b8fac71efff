"""Several models of LightGBM as one, whose score is their mean: all their trees, with leaves divided by their number.

Each model numbers the codes of its categories by a list of its own; the one model has the union of the lists. A code
that a model has not learnt goes where its missing value goes, which is out of every set of codes.
"""

import json
import re
from collections.abc import Mapping, Sequence

_CODES = "\npandas_categorical:"
_OF_SPLITS = 1
"""The bit of `decision_type` of a split by a set of codes."""
_WORD = 32
"""Bits of a word of such a set."""

_Codes = list[list[int]]


def merged_lightgbm(texts: Sequence[str], categorical: Sequence[int]) -> str:
    """The text of one model; `categorical` are the columns that hold categories, which the lists of codes are of."""
    own = [_codes(text) for text in texts]
    union = [list(dict.fromkeys(code for codes in lists for code in codes)) for lists in zip(*own, strict=True)]
    head = re.sub(r"^tree_sizes=.*\n", "", texts[0].partition("\nTree=0\n")[0], flags=re.MULTILINE)
    trees: list[str] = []
    for text, lists in zip(texts, own, strict=True):
        renumbered = {
            column: [places[code] for code in codes]
            for column, codes, places in zip(categorical, lists, map(_places, union), strict=True)
        }
        blocks = re.split(r"^Tree=\d+\n", text.partition("\nend of trees\n")[0], flags=re.MULTILINE)[1:]
        trees += [_tree(block, renumbered, len(texts)) for block in blocks]
    body = "".join(f"Tree={i}\n{tree}" for i, tree in enumerate(trees))
    tail = texts[0].partition("\nend of trees\n")[2].partition(_CODES)[0]
    return f"{head}\n\n{body}end of trees\n{tail}{_CODES}{json.dumps(union)}\n"


def _codes(text: str) -> _Codes:
    found: _Codes | None = json.loads(text.rpartition(_CODES)[2].partition("\n")[0])
    return found or []


def _places(codes: Sequence[int]) -> dict[int, int]:
    return {code: place for place, code in enumerate(codes)}


def _tree(block: str, renumbered: Mapping[int, Sequence[int]], models: int) -> str:
    """A tree's text with its share of the mean, and with the sets of codes of its splits in the common numbers."""
    lines = [line.partition("=") for line in block.splitlines() if line]
    values = {name: value.split(" ") for name, _, value in lines}
    for name in ("leaf_value", "internal_value"):
        if name in values:
            values[name] = [repr(float(value) / models) if value else "" for value in values[name]]
    if values["num_cat"] != ["0"]:
        _renumber(values, renumbered)
    return "".join(f"{name}={' '.join(value)}\n" for name, value in values.items()) + "\n\n"


def _renumber(values: dict[str, list[str]], renumbered: Mapping[int, Sequence[int]]) -> None:
    """Replace the sets of codes of a tree."""
    bounds, words = (list(map(int, values[name])) for name in ("cat_boundaries", "cat_threshold"))
    sets: list[list[int]] = [[] for _ in bounds[1:]]
    splits = zip(values["split_feature"], values["threshold"], values["decision_type"], strict=True)
    for column, threshold, decision in splits:
        if int(decision) & _OF_SPLITS:
            number = int(float(threshold))
            bits = sum(word << (_WORD * i) for i, word in enumerate(words[bounds[number] : bounds[number + 1]]))
            new = sum(1 << place for old, place in enumerate(renumbered[int(column)]) if bits >> old & 1)
            count = max(1, -(-new.bit_length() // _WORD))
            sets[number] = [new >> (_WORD * i) & ((1 << _WORD) - 1) for i in range(count)]
    ends = [0]
    for each in sets:
        ends.append(ends[-1] + len(each))
    values["cat_boundaries"] = list(map(str, ends))
    values["cat_threshold"] = [str(word) for each in sets for word in each]
