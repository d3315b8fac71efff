"""The account of an epoch: how many groups and documents were read, and a checksum that identifies the groups.

Two collections of groups with the same counts and the same checksum are the same, except with probability of about
2^-32. The order does not matter, and the checksums of parts add up. So one number shows that no group was missed or
read twice, over any number of workers and restarts.

Shapes: Q groups.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.decoder import Decoder, group_ids
from ltrscale.data.stream.readers import RowGroupReader
from ltrscale.draws import splitmix64
from ltrscale.runtime.workers import rank_and_world
from ltrscale.training.reduce import sum_over_workers


class Account(NamedTuple):
    """Counts and checksum of the groups that were read."""

    groups: int = 0
    documents: int = 0
    checksum: int = 0

    def plus(self, groups: float, documents: float, checksum: float) -> "Account":
        """The account with these counts and this checksum added."""
        return Account(self.groups + int(groups), self.documents + int(documents), self.checksum + int(checksum))

    def times(self, passes: int) -> "Account":
        """The account of several passes over the same groups."""
        return Account(*(passes * count for count in self))

    def agrees_with(self, expected: "Account") -> bool:
        """Whether it equals the expected account; documents are compared only where their expected count is known."""
        documents = self.documents if expected.documents else 0
        return self._replace(documents=documents) == expected


def checksum(ids_Q: NDArray[np.int64]) -> int:
    """Sum of a 32-bit hash of every id; below 2^53, and so exact in float64, for 2 million groups.

    Example:
        >>> whole, parts = checksum(np.array([4, 7])), [checksum(np.array([gid])) for gid in (7, 4)]
        >>> whole == sum(parts), whole == checksum(np.array([5, 6]))
        (True, False)
    """
    hashes_Q = splitmix64(np.zeros(len(ids_Q), np.uint64), ids_Q.astype(np.uint64))
    return int((hashes_Q >> np.uint64(32)).sum())


def account_of(batches: Iterable[QueryGroups]) -> Account:
    """The account of batches on the CPU; the checksum leaves out groups without ids."""
    total = Account()
    for groups in batches:
        which = 0 if groups.ids_Q is None else checksum(groups.ids_Q.numpy())
        total = total.plus(groups.n_groups, groups.n_documents, which)
    return total


def listed(selection: Selection, reader: RowGroupReader) -> Account:
    """The account that an epoch over a selection must reach, from the ids in its files; all workers share the reading.

    Documents are 0, which means unknown, where only some groups of a row group are served.

    Raises:
        InputError: a file is missing, damaged, or does not hold what the manifest lists.
    """
    rank, world = rank_and_world()
    sums = torch.zeros(2, dtype=torch.int64)
    for ids_Q in _served_ids(selection, reader, rank, world):
        sums += torch.tensor([len(ids_Q), checksum(ids_Q)])
    groups, total = sum_over_workers(sums).tolist()
    # the manifest counts documents by row group, so it cannot count those of some of its groups
    whole = all(selection.served_groups(row_group) == row_group.groups for row_group in selection.row_groups)
    return Account(groups, selection.n_documents if whole else 0, total)


def _served_ids(selection: Selection, reader: RowGroupReader, rank: int, world: int) -> Iterator[NDArray[np.int64]]:
    decoder = Decoder(selection, documents=False)
    own = selection.row_groups[rank::world]
    tables = reader(own, decoder.columns)
    for row_group, table in zip(own, tables, strict=True):
        rows_Q = decoder.served_rows([row_group], [table])
        yield group_ids([row_group], [table])[rows_Q]
