"""Readings of examples: what an in-context ranker keeps of labelled lists, and its scores.

Shapes: N documents, Q groups, F features, X features that a reading uses.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ltrscale.arrays import Ints
from ltrscale.batch import QueryGroups, standardise_by_group, sum_by_group
from ltrscale.config import Config
from ltrscale.draws import permutation
from ltrscale.errors import InputError
from ltrscale.models.in_context import InContextNetwork, Reading

_VALUES = 1 << 18  # feature values that are scored at once


class ReadingConfig(Config):
    """How examples are read: with more of them than fit, several samples are read and their scores averaged."""

    samples: int = Field(4, ge=1, le=100)
    """Samples of the labelled lists. If all lists fit and none is too long, a single one has them all."""
    documents: int = Field(1000, ge=1, le=100_000)
    """Most documents of a sample. The network knows at most some 2,000."""
    longest: int = Field(40, ge=1, le=100_000)
    """Most documents of a list in a sample; longer lists are sampled, with a relevant document if there is one."""
    seed: int = Field(0, ge=0)
    """Seed of the samples."""


class _Learned(NamedTuple):
    """One reading of a data set's examples: indices of the features used, their medians, the network's reading."""

    columns_X: Tensor
    median_X: Tensor
    reading: Reading

    def features(self, groups: QueryGroups) -> Tensor:
        """The features used, [N, X], without missing values."""
        x_NX = groups.features_NF.index_select(1, self.columns_X)
        return torch.where(x_NX.isnan(), self.median_X, x_NX)


class InContextRanker:
    """Ranks groups after reading examples: the mean of the readings' scores, standardised within each group.

    A score depends on the examples and on its own group; labels of groups to rank are not read. Features
    that are constant among the examples are not used, and a missing value counts as the examples' median.

    Args:
        network: pretrained weights.
        samples: groups with labels for each reading, such as those of `drawn_samples`.

    Raises:
        InputError: no example has a relevant document, or no numeric feature varies among the examples.
    """

    def __init__(self, network: InContextNetwork, samples: Sequence[QueryGroups]) -> None:
        self.network = network.eval()
        self.learned = [_learn(network, examples) for examples in samples]

    def __call__(self, groups: QueryGroups) -> Tensor:
        """Scores [N], float64."""
        parts = [self._scores(part) for part in _parts(groups)]
        return torch.cat(parts) if parts else groups.features_NF.new_zeros(0, dtype=torch.float64)

    def _scores(self, groups: QueryGroups) -> Tensor:
        total_N = torch.zeros(groups.n_documents, dtype=torch.float64)
        with torch.no_grad():
            for learned in self.learned:
                scores_1N = self.network(learned.reading, learned.features(groups)[None], groups.offsets_Q1)[-1]
                total_N += standardise_by_group(scores_1N[0].double(), groups.offsets_Q1)
        return total_N / len(self.learned)


def _learn(network: InContextNetwork, examples: QueryGroups) -> _Learned:
    """Let the network read all examples at once."""
    _check(examples)
    assert examples.labels_N is not None
    x_NF = examples.features_NF
    median_F = x_NF.nanmedian(0).values.nan_to_num()  # a feature that is missing everywhere is constant
    x_NF = torch.where(x_NF.isnan(), median_F, x_NF)
    used_F = x_NF.amin(0) < x_NF.amax(0)
    columns_X = used_F.nonzero()[:, 0]
    if not len(columns_X):
        raise InputError("no numeric feature has two different values in the labelled groups: label other groups too")
    x_NX = x_NF.index_select(1, columns_X)
    with torch.no_grad():
        reading = network.read(x_NX[None], examples.labels_N[None], examples.offsets_Q1)
    return _Learned(columns_X, median_F[columns_X], reading)


def drawn_samples(examples: QueryGroups, config: ReadingConfig) -> list[QueryGroups]:
    """The samples of the examples, one for each reading; each has a list with a relevant document.

    Raises:
        InputError: no example has a relevant document.
    """
    judged_Q = _check(examples)
    lengths_Q = examples.lengths_Q.numpy()
    if lengths_Q.max() <= config.longest and lengths_Q.sum() <= config.documents:
        return [examples]
    return [_sample(examples, judged_Q, config, number) for number in range(config.samples)]


def _check(examples: QueryGroups) -> Tensor:
    """Which groups have a relevant document, [Q]."""
    assert examples.labels_N is not None
    judged_Q = sum_by_group((examples.labels_N > 0).long(), examples.offsets_Q1) > 0
    if not judged_Q.any():
        raise InputError("no labelled group has a relevant document (a label above 0): there is nothing to learn from")
    return judged_Q


def _sample(examples: QueryGroups, judged_Q: Tensor, config: ReadingConfig, number: int) -> QueryGroups:
    """As many groups as fit, in random order; the first one has a relevant document."""
    order_Q = permutation(examples.n_groups, config.seed, "reading", number)
    first = int(judged_Q.numpy()[order_Q].argmax())
    order_Q = np.concatenate([order_Q[first : first + 1], np.delete(order_Q, first)])
    lengths_Q, rows, remaining = [], [], config.documents
    for group in order_Q.tolist():
        chosen = _documents(examples, group, config, number)
        if 0 < len(chosen) <= remaining:
            remaining -= len(chosen)
            rows.append(chosen)
            lengths_Q.append(len(chosen))
    rows_N, labels_N = torch.from_numpy(np.concatenate(rows)), examples.labels_N
    assert labels_N is not None
    offsets_Q1 = torch.tensor([0, *np.cumsum(lengths_Q).tolist()])
    return QueryGroups(examples.features_NF[rows_N], offsets_Q1, labels_N[rows_N])


def _documents(examples: QueryGroups, group: int, config: ReadingConfig, number: int) -> Ints:
    """Rows of a group's documents: all, or a sample with a relevant one if there is any."""
    start, end = examples.offsets_Q1[group : group + 2].tolist()
    most = min(config.longest, config.documents)
    if end - start <= most:
        return np.arange(start, end)
    assert examples.labels_N is not None
    order_L = permutation(end - start, config.seed, "documents", number, group)
    relevant_L = (examples.labels_N[start:end] > 0).numpy()[order_L]
    chosen = order_L[:most]
    if relevant_L.any() and not relevant_L[:most].any():
        chosen[-1] = order_L[relevant_L.argmax()]
    return np.asarray(np.sort(chosen) + start)


def _parts(groups: QueryGroups) -> Iterator[QueryGroups]:
    """The groups, a few at a time, in order."""
    most = max(1, _VALUES // groups.n_features)
    part_Q = (groups.offsets_Q1[:-1] // most).numpy()
    for part in np.unique(part_Q):
        yield groups.select(torch.from_numpy(np.flatnonzero(part_Q == part)))
