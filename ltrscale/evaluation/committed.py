"""Committed scores in place of a bundle: a method of which only the scores of the test groups are there.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

import numpy as np
import torch
from torch import Tensor

from ltrscale.batch import QueryGroups, rows_of, to_offsets
from ltrscale.bundle import Scorer
from ltrscale.data.dataset.scores import SCORES
from ltrscale.data.dataset.split import Split, select
from ltrscale.data.stream.readers import read_direct
from ltrscale.errors import InputError


def committed_scorer(url: str, split: Split) -> Scorer:
    """The function that looks up the scores of a batch of a split's groups, float64.

    It holds the scores of the split in memory, 8 bytes a document.

    Args:
        url: directory made by jobs.score.
        split: of one data set; only its periods are read.

    Raises:
        InputError: a period is not scored there, or was scored from other files than the data set has now.
    """
    everything = split.replace(scores=url, labels="labels", labelled_fraction=1.0, fold=None)
    tables = list(read_direct(select(everything, labelled=True).row_groups, ["gid", SCORES]))
    lists = [chunk for table in tables for chunk in table.column(SCORES).chunks]
    gids_Q = np.concatenate([table.column("gid").to_numpy() for table in tables])
    scores_N = torch.from_numpy(np.concatenate([chunk.flatten().to_numpy() for chunk in lists]))
    offsets_Q1 = to_offsets(torch.from_numpy(np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in lists])))
    order_Q = np.argsort(gids_Q, kind="stable")

    def score(groups: QueryGroups) -> Tensor:
        assert groups.ids_Q is not None
        wanted = groups.ids_Q.numpy()
        place_M = order_Q[np.searchsorted(gids_Q, wanted, sorter=order_Q).clip(max=len(gids_Q) - 1)]
        rows, offsets_M1 = rows_of(offsets_Q1, torch.from_numpy(place_M))
        if not (gids_Q[place_M] == wanted).all() or not torch.equal(offsets_M1, groups.offsets_Q1):
            raise InputError(f"{url}: does not have a score for each document of the test groups; score them again")
        return scores_N[rows]

    return score
