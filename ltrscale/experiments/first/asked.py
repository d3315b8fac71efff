"""Questions about the features of a log that rank too well alone.

Shapes: N rows, L rows with a label, Q lists, Q1 = Q + 1 offsets, F features.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ltrscale.experiments.first.counted import row_labels
from ltrscale.ingest.csv_lines import Dialect
from ltrscale.ingest.guess import Guess
from ltrscale.ingest.leaks import questions
from ltrscale.ingest.profile import rows_looked_at
from ltrscale.ingest.structure import SAMPLED, KeyLists, Structure, read_structure
from ltrscale.progress import progress
from ltrscale.ranking.single_feature import SingleFeature, single_features

_AT_ONCE = 64
"""Features that are evaluated at once."""


def asked_of(guessed: Guess, structure: Structure, urls: Sequence[str], dialect: Dialect) -> dict[str, str]:
    """Questions about suspicious features, by name, of a sample of whole lists; empty without a label."""
    features = [*guessed.features, *guessed.categorical]
    if guessed.label is None or not features:
        return {}
    key = [column.name for column in (guessed.query, *guessed.within)]
    names = dict.fromkeys([*key, guessed.label.name, *(column.name for column in features)])
    lists_N = structure.joined(key[0], key[1:])
    kept_N = np.zeros(len(lists_N), np.bool_)
    kept_N[KeyLists.from_codes(lists_N, rows_looked_at(len(names), SAMPLED)).rows_L] = True
    sample = read_structure(urls, [*names], dialect, kept_N=kept_N)
    query_N = sample.joined(key[0], key[1:])
    labels_N, _ = row_labels(guessed, sample, query_N)
    rows_L = np.flatnonzero((query_N >= 0) & np.isfinite(labels_N) & (labels_N >= 0))
    rows_L = rows_L[np.argsort(query_N[rows_L], kind="stable")]
    labels_L = torch.from_numpy(labels_N[rows_L].astype(np.float32))
    offsets_Q1 = np.append(0, np.cumsum(np.unique(query_N[rows_L], return_counts=True)[1]))
    found: list[SingleFeature] = []
    with progress("features alone", len(features), "features") as advance:
        for first in range(0, len(features), _AT_ONCE):
            some = features[first : first + _AT_ONCE]
            categorical = [first + i >= len(guessed.features) for i in range(len(some))]
            of_each = zip(some, categorical, strict=True)
            x_LF = np.stack([_values(sample, one.name, codes)[rows_L] for one, codes in of_each], axis=1)
            names_F = [column.name for column in some]
            found += single_features(
                torch.from_numpy(x_LF), labels_L, torch.from_numpy(offsets_Q1), names=names_F, categorical=categorical
            )
            advance(len(some))
    return questions(found)


def _values(structure: Structure, name: str, codes: bool) -> NDArray[np.float32]:
    """A column as numbers, or as codes of its values; NaN if missing."""
    if not codes:
        return structure.numbers(name).astype(np.float32)
    codes_N = structure.codes[name]
    return np.where(codes_N < 0, np.nan, codes_N).astype(np.float32)
