"""Test groups with the scores and the primary metric of some methods, for the sections of a report.

Shapes: Q groups, M chosen groups.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from torch import Tensor

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle import scorers_of, with_tokens_of
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.selection import Selection, scored_row_groups
from ltrscale.data.stream import scored
from ltrscale.data.stream.readers import read_direct
from ltrscale.data.stream.scored import read_named
from ltrscale.evaluation.measure.measuring import order_shown
from ltrscale.evaluation.measure.report import read_group_rows
from ltrscale.evaluation.measure.settings import AS_SHOWN
from ltrscale.experiments.report.sources import Sources

META, _META_SHOWN = "meta_", 3


@dataclass(frozen=True)
class GroupsAndScores:
    """Test groups of one row group of the data, with the scores of some methods."""

    groups: QueryGroups
    ids: pa.Table
    """A row per group: `query_id` and, if the data has them, `doc_ids`, `gains` and `meta_*`."""
    scores: Mapping[str, Tensor]


def chosen_groups(test: Selection, numbers_M: NDArray[np.int64]) -> Selection:
    """The groups with these numbers, in the reading order of an evaluation."""
    chosen_Q = np.zeros(test.n_groups, np.bool_)
    chosen_Q[numbers_M] = True
    return test.taking(chosen_Q)


def read_groups_scored(
    sources: Sources, selection: Selection, methods: Sequence[str] = ()
) -> Iterator[GroupsAndScores]:
    """The groups of a selection, with the scores of the first trial of each method."""
    evaluated = sources.evaluated
    committed = {
        name: scored_row_groups(evaluated.scores[name], selection.row_groups)
        for name in methods
        if name in evaluated.scores
    }
    bundles = {name: sources.opened(url) for name, url in sources.bundles() if name in methods}
    selection = with_tokens_of(selection, bundles.values())
    scorers = scorers_of(bundles, features=selection.features)
    also = ["gains", *(_meta_of(selection.row_groups[0]) if len(selection.row_groups) else ())]
    for i, (_, groups, ids) in enumerate(read_named(selection, also)):
        scores = {name: scorer(groups).double() for name, scorer in scorers.items()}
        scores |= {AS_SHOWN: order_shown(groups)} if AS_SHOWN in methods else {}
        for name, of_scores in committed.items():
            (of_groups,) = read_direct([of_scores[i]], scored.COLUMNS)
            scores[name] = scored.look_up(evaluated.scores[name], scored.scores_from_tables([of_groups]))(
                groups
            ).double()
        yield GroupsAndScores(groups, ids, {name: scores[name] for name in methods})


def _meta_of(row_group: RowGroup) -> list[str]:
    """The columns that describe a group to readers, such as the query text."""
    with storage.open_input(row_group.file.url) as stream:
        names = pq.read_schema(stream).names
    return [name for name in names if name.startswith(META)][:_META_SHOWN]


def primary_values(sources: Sources, methods: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    """The primary metric of every test group by the first trial of each method, NaN where undefined."""
    rows = read_group_rows(sources.url, ["gid", "method", "trial", sources.primary])
    first = (pc.field("trial") == 0) & (pc.field("gid") >= 0)  # queries without a list have negative ids
    return {name: rows.filter(first & (pc.field("method") == name))[sources.primary].to_numpy() for name in methods}


def labels_in(groups: QueryGroups) -> Tensor:
    """The labels of labelled groups."""
    assert groups.labels_N is not None
    return groups.labels_N
