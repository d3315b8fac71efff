"""The metrics of each group, by its own list or by the judgements of its query.

A list of candidates lacks the relevant documents that the earlier search did not find. Measured by the list's own
ideal, its order looks better than it is; here the judgements of the whole query count, as in `trec_eval -c`.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, M metrics, J judged documents, P queries with judgements and one
without.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ltrscale.batch import QueryGroups, rows_of
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.readers import read_direct
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.settings import EvaluateSettings, judged_split
from ltrscale.ranking.metric import Metric
from ltrscale.ranking.metrics import UnfitLabelsError


@dataclass(frozen=True, eq=False)
class Judged:
    """The labels of the judged documents of test queries, and the queries that have no list of candidates."""

    ids_Q: Tensor
    """Ids of the test groups, rising; those of queries without a list are negative."""
    place_Q: Tensor
    """The place of each group's query among those with judgements; the last place is for queries without any."""
    labels_J: Tensor
    offsets_P1: Tensor
    unlisted: tuple[tuple[int, str], ...] = ()
    """Id and period of each judged query without a list."""

    @classmethod
    def read(cls, url: str, test: Split) -> Self:
        """The judgements of the queries of a test split: the data set has a group for each with all judged documents.

        A query of the split's periods has no list if no group belongs to it.

        Raises:
            InputError: the data set lacks a period of the split, or has a query twice; the split is a sample.
        """
        if test.size or test.fold:
            raise InputError("judged counts the queries of whole periods; let splits.test have no sample and no fold")
        judged = select(judged_split(url, test), labelled=True)
        groups = QueryGroups.concat(list(iterate(replace(judged, features=()))))
        assert groups.ids_Q is not None
        assert groups.labels_N is not None
        queries = {gid: (query, period) for query, gid, period in _query_of_groups(judged)}
        places: dict[str, int] = {}
        for place, gid in enumerate(groups.ids_Q.tolist()):
            if places.setdefault(query := queries[gid][0], place) != place:
                raise InputError(f"judged: {url} has query {query!r} twice in the periods of the test split; keep one")
        query_groups = _query_of_groups(select(Split(data=test.data, periods=test.periods), labelled=False))
        place_of = {gid: places.get(query, len(places)) for query, gid, _ in query_groups}
        periods = dict(queries.values())
        without_list = sorted(places.keys() - {query for query, _, _ in query_groups})
        unlisted = tuple((-number, periods[query]) for number, query in enumerate(without_list, start=1))
        place_of |= {-number: places[query] for number, query in enumerate(without_list, start=1)}
        ids_Q = torch.tensor(sorted(place_of))
        place_Q = torch.tensor([place_of[gid] for gid in ids_Q.tolist()])
        # with an empty group at the end, for queries without judgements
        offsets_P1 = torch.cat([groups.offsets_Q1, groups.offsets_Q1[-1:]])
        return cls(ids_Q, place_Q, groups.labels_N, offsets_P1, unlisted)

    def values(self, metrics: Sequence[Metric], scores_N: Tensor, groups: QueryGroups) -> Tensor:
        """Metrics of test groups, shape [M, Q]; relevant documents outside a list count as missed.

        `value(list) divisor(list) / divisor(all judged)`: 0 for a list without a relevant document, NaN for a query
        without one.

        Raises:
            InputError: a list has better labels than the judgements of its query.
        """
        assert groups.labels_N is not None
        assert groups.ids_Q is not None
        rows_J, offsets_Q1 = rows_of(self.offsets_P1, self.place_Q[torch.searchsorted(self.ids_Q, groups.ids_Q)])
        labels_N, labels_J = groups.labels_N, self.labels_J[rows_J]
        # one after the other, so that all metrics share what ranks the same documents
        own_MQ = torch.stack([metric.divisor(labels_N, groups.offsets_Q1) for metric in metrics])
        all_MQ = torch.stack([metric.divisor(labels_J, offsets_Q1) for metric in metrics])
        for gid in groups.ids_Q[(own_MQ > all_MQ * (1 + 1e-9)).any(0)].tolist():
            raise InputError(
                f"judged: group {gid} has more relevance in its list than all judgements of its query; name the "
                "judgements that the labels of the test split are from"
            )
        values_MQ = torch.stack([metric.values_on(scores_N, groups) for metric in metrics])
        return (values_MQ.nan_to_num(0.0) * own_MQ / all_MQ).where(all_MQ > 0, torch.nan)

    @staticmethod
    def policy(metric: Metric) -> str:
        """The choices that the formula of a metric leaves open, in one line."""
        text = metric.policy.replace("from the full list", "from all judged documents")
        return f"{text.replace('groups without', 'queries without')}; what is not listed is missed"

    def without_list(self) -> Iterator[tuple[str, QueryGroups]]:
        """Each period's judged queries without a list, as groups without documents."""
        for period in dict.fromkeys(period for _, period in self.unlisted):
            ids_Q = torch.tensor([gid for gid, in_period in self.unlisted if in_period == period])
            offsets_Q1 = torch.zeros(len(ids_Q) + 1, dtype=torch.int64)
            yield period, QueryGroups(torch.zeros(0, 0), offsets_Q1, labels_N=torch.zeros(0), ids_Q=ids_Q)


def _query_of_groups(selection: Selection) -> list[tuple[str, int, str]]:
    """Query, id and period of every group in the row groups of a selection."""
    tables = read_direct(selection.row_groups, ["gid", "query_id"])
    return [
        (query, gid + row_group.file.gid_base, row_group.file.period)
        for row_group, table in zip(selection.row_groups, tables, strict=True)
        for query, gid in zip(table["query_id"].to_pylist(), table["gid"].to_pylist(), strict=True)
    ]


def values_of(
    scores_N: Tensor,
    groups: QueryGroups,
    metrics: Mapping[str, Metric],
    settings: EvaluateSettings,
    judged: Judged | None = None,
) -> Tensor:
    """The metrics of each group, shape [M, Q], float64; NaN where undefined or left out."""
    assert groups.labels_N is not None
    try:
        if judged is not None:
            return judged.values(list(metrics.values()), scores_N, groups)
        values_MQ = torch.stack([metric.values_on(scores_N, groups) for metric in metrics.values()]).double()
    except UnfitLabelsError as error:  # the gains that the user chose do not fit these groups
        raise InputError(f"evaluate.{error}") from error
    if not settings.leave_out_constant:
        return values_MQ
    highest_Q, lowest_Q = (
        torch.segment_reduce(groups.labels_N, extreme, offsets=groups.offsets_Q1) for extreme in ("max", "min")
    )
    return values_MQ.masked_fill(highest_Q == lowest_Q, torch.nan)
