"""A first look at each feature of a raw log alone: which of them may be known only after users have acted."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ltrscale.ingest.csvjson import Dialect
from ltrscale.ingest.guess import Guess, grades_of
from ltrscale.ingest.outcome import questions
from ltrscale.ingest.profile import KeyLists, Structure, read_structure
from ltrscale.ranking.alone import alone


def asked_of(found: Guess, log: Structure, urls: Sequence[str], dialect: Dialect) -> dict[str, str]:
    """What to ask of the features that were guessed, by their names; empty without a label.

    Whole lists are looked at, a sample of all: fragments of lists, such as the first rows of a shuffled log have, are
    short, and any order of a short list is near the best one.

    Args:
        found: the uses of columns.
        log: the structure of the query's columns in all rows.
        urls: the files.
        dialect: their form.
    """
    features = [*found.features, *found.categorical]
    if found.label is None or not features:
        return {}
    key = [column.name for column in (found.query, *found.within)]
    names = dict.fromkeys([*key, found.label.name, *(column.name for column in features)])
    lists_N = log.joined(key[0], key[1:])
    kept_N = np.zeros(len(lists_N), np.bool_)
    kept_N[KeyLists.of(lists_N).rows_L] = True
    seen = read_structure(urls, [*names], dialect, kept_N=kept_N)
    query_N, labels_N = seen.joined(key[0], key[1:]), _labels(found, seen)
    rows_L = np.flatnonzero((query_N >= 0) & np.isfinite(labels_N) & (labels_N >= 0))
    rows_L = rows_L[np.argsort(query_N[rows_L], kind="stable")]
    codes = [column in found.categorical for column in features]
    x_LF = [_values(column.name, seen, coded=coded)[rows_L] for column, coded in zip(features, codes, strict=True)]
    lengths_Q = np.unique(query_N[rows_L], return_counts=True)[1]
    return questions(
        alone(
            torch.from_numpy(np.stack(x_LF, axis=1).astype(np.float32)),
            torch.from_numpy(labels_N[rows_L].astype(np.float32)),
            torch.from_numpy(np.append(0, np.cumsum(lengths_Q))),
            names=[column.name for column in features],
            categorical=codes,
        )
    )


def _labels(found: Guess, seen: Structure) -> NDArray[np.float64]:
    """The label of each row as prepare would read it, NaN for none."""
    assert found.label is not None
    grades, name = grades_of(found.label), found.label.name
    if isinstance(grades, dict):
        by_code = [grades.get(text, np.nan) for text in map(str, seen.values[name].to_pylist())]
        return np.append(by_code, np.nan)[seen.codes[name]]
    labels_N = seen.numbers(name)
    if grades is None:
        return labels_N
    return np.where(np.isnan(labels_N), np.nan, np.searchsorted(grades, labels_N, side="right").astype(np.float64))


def _values(name: str, seen: Structure, *, coded: bool) -> NDArray[np.float64]:
    if not coded:
        return seen.numbers(name)
    return np.where(seen.codes[name] < 0, np.nan, seen.codes[name])
