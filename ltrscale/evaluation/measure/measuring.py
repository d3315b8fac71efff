"""The metrics of every group of a test split, for any number of models in one pass, part by part.

A part is some row groups; this process or tasks of a Ray cluster measure it, and the caller takes the results in the
order of the manifests. Memory holds a few parts, whatever the size of the split.

A list of candidates lacks the relevant documents that the earlier search did not find. Measured by the list's own
ideal, its order looks better than it is; by `Judged` the judgements of the whole query count, as in `trec_eval -c`.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, T trials (one model each), M metrics, J judged documents, P queries
with judgements and one without.
"""

import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from ltrscale.arrays import Bools, Doubles, Ints
from ltrscale.batch import QueryGroups, rows_of
from ltrscale.bundle import Scorer, load, scorers_of
from ltrscale.data.columns import is_per_document, spread_over_documents
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.row_groups import RowGroups
from ltrscale.data.dataset.scores import SCORES
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream import scored
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.decoder import Decoder
from ltrscale.data.stream.plan import Part, Run, parts_of, run_here
from ltrscale.data.stream.readers import PREPARE_AGAIN, read_direct
from ltrscale.data.stream.windows import Cut, Window, assemble
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.corrected import CorrectedSums, Correction
from ltrscale.evaluation.measure.settings import POSITIONS, EvaluateSettings, judged_split
from ltrscale.evaluation.measure.slices import Slicer
from ltrscale.progress import progress
from ltrscale.ranking.metric import Metric
from ltrscale.ranking.metrics import UnfitLabelsError, tally

_VALUES = 1 << 20
"""Feature values of a part, over all trials."""
_DOCUMENTS = 7 << 14
"""Documents of a part if no features are read, fixed because the last bits of a metric depend on the part."""

_CLICKS = "clicks"
"""The column of clicks."""


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


@dataclass(frozen=True, eq=False)
class GroupValues:
    """Measured groups of one period: every metric of every trial, NaN where undefined, and the slices."""

    period: str
    gids_Q: Ints
    documents_Q: Ints
    values_TMQ: Doubles
    slices: Mapping[str, Bools]
    unshown: int = 0
    """Documents without a position, if the order shown is measured."""
    corrected: CorrectedSums | None = None
    """What the groups add to the metrics corrected for positions, if these are measured."""
    clicks: Mapping[int, Tensor] = field(default_factory=dict)
    """Tallies of scores against clicks by trial, for those of `Measuring.logits`; none if labels are not clicks."""


@dataclass(frozen=True, eq=False)
class _MeasuredPart(Part):
    """A part of the measured groups, with their committed scores."""

    scores: Mapping[str, RowGroups]
    """The `Measuring.scores` of the part's row groups."""


@dataclass(frozen=True, eq=False)
class Measuring:
    """Measures a part of a selection of labelled groups; a value that can be sent to other processes."""

    models: tuple[str, ...]
    """Bundles, directories of scores and `POSITIONS`, one for each trial."""
    scores: Mapping[str, RowGroups]
    """All row groups of the selection with their committed scores, for models that are directories of scores."""
    slicer: Slicer
    metrics: Callable[[Tensor, QueryGroups], Tensor]
    """The metrics [M, Q] of some scores; see `values_of`."""
    features: tuple[Feature, ...]
    """The features of the data, which bundles match to their own."""
    docs_per_batch: int
    threads: int = 0
    """Threads of a tree model; 0 uses all cores."""
    logits: tuple[int, ...] = ()
    """Numbers of the trials whose scores are logits of clicks."""
    on_clicks: Callable[[Tensor, QueryGroups], Tensor] | None = None
    """Metrics [C, Q] of some scores with the column `clicks` as labels, placed after `metrics`; None without any."""
    correction: Correction | None = None
    """Corrects metrics for positions; None to leave that out."""
    every_list: bool = True
    """Whether bundles score every group; otherwise not those whose labels are all 0: no metric depends on their order.
    """
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Lets a process open the bundles once for all its parts."""

    @property
    def needs_features(self) -> bool:
        """Whether a bundle or a slice reads features; committed scores alone do not."""
        return self.slicer.needs_features or bool(self._bundles)

    @property
    def _bundles(self) -> tuple[str, ...]:
        """The distinct bundles among the models."""
        return tuple(dict.fromkeys(url for url in self.models if url not in self.scores and url != POSITIONS))

    def on(self, selection: Selection, run: Run = run_here) -> Iterator[GroupValues]:
        """The values of all groups of a selection, in the order of the manifests; errors are those of `values`."""
        read = selection if self.needs_features else replace(selection, features=())
        budget = max(1, _VALUES // max(1, len(self.models))) if read.features else _DOCUMENTS
        parts = self.parts(read, values=budget)
        with progress("evaluate", selection.n_documents) as advance:
            # another process sends a whole part; here memory holds one batch
            values = map(self.values, parts) if run is run_here else run(self._sent(), parts)
            for of_batch in itertools.chain.from_iterable(values):
                yield of_batch
                advance(int(of_batch.documents_Q.sum()))

    def parts(self, selection: Selection, *, values: int) -> Iterator[_MeasuredPart]:
        """The parts of a selection with about this many feature values each, made lazily."""
        first = 0
        for part in parts_of(selection, values=values):
            last = first + len(part.selection.row_groups)
            scores = {url: row_groups[first:last] for url, row_groups in self.scores.items()}
            yield _MeasuredPart(part.selection, part.first, part.documents, scores)
            first = last

    def _sent(self) -> Self:
        """A copy for other processes without scores, because parts carry them and there may be a million row groups."""
        return replace(self, scores={url: row_groups[:0] for url, row_groups in self.scores.items()})

    def __call__(self, part: _MeasuredPart) -> list[GroupValues]:
        """The result of `values` as a list."""
        return list(self.values(part))

    def values(self, part: _MeasuredPart) -> Iterator[GroupValues]:
        """The values of a part's groups, by row group, or by period if no features are read.

        Raises:
            InputError: a file is missing or damaged, scores are missing or not finite, or a group cannot be sliced.
        """
        row_groups, stop = part.selection.row_groups, 0
        windows = (
            range(len(row_groups)) if part.selection.features else [row_group.file.period for row_group in row_groups]
        )
        for _, window in itertools.groupby(windows):
            start, stop = stop, stop + len(list(window))
            scores = {url: of_part[start:stop] for url, of_part in part.scores.items()}
            yield from self._window_values(part.selection.only(row_groups[start:stop]), scores)

    def _window_values(self, selection: Selection, scores: Mapping[str, RowGroups]) -> Iterator[GroupValues]:
        row_groups, decoder = selection.row_groups, Decoder(selection)
        stored = [*self.slicer.stored, *([_CLICKS] if self.on_clicks else [])]
        tables, committed = self._read(row_groups, scores, [*decoder.columns, *stored])
        for row_group, table in zip(row_groups, tables, strict=True):
            if lacking := next((name for name in stored if name not in table.column_names), None):
                asker = "evaluate.clicks" if lacking == _CLICKS else "a slice"
                raise InputError(f"{row_group.file.url}: no column {lacking!r}, which {asker} names; leave it out")
        rows_Q = decoder.served_rows(row_groups, tables)
        window = decoder.decode(row_groups, tables, rows_Q)
        rows = pa.concat_tables([table.select(stored) for table in tables]).take(pa.array(rows_Q))
        known = {url: _known(url, of_url, rows_Q, window) for url, of_url in committed.items()}
        return self._measured(row_groups[0].file.period, window, rows, known, len(selection.features))

    def _read(
        self, row_groups: RowGroups, scores: Mapping[str, RowGroups], columns: Sequence[str]
    ) -> tuple[list[pa.Table], dict[str, list[pa.Table]]]:
        """The tables of row groups, and for each directory of committed scores the tables with the same rows."""
        tables: list[pa.Table] = []
        committed = {}
        for url, scored_row_groups in scores.items():
            if not tables and SCORES not in columns:  # scores are the labels then
                tables = committed[url] = list(read_direct(scored_row_groups, [*columns, SCORES]))
            else:
                committed[url] = list(read_direct(scored_row_groups, scored.COLUMNS))
        return tables or list(read_direct(row_groups, columns)), committed

    def without_list(self, period: str, groups: QueryGroups) -> GroupValues:
        """The values of queries without a list, equal in all trials and in no slice; no click defines a metric."""
        assert groups.ids_Q is not None
        measures = [self.metrics, *([self.on_clicks] if self.on_clicks else [])]
        values_MQ = np.concatenate([measure(torch.zeros(0), groups).numpy() for measure in measures])
        values_TMQ = np.repeat(values_MQ[None], len(self.models), axis=0)
        none = dict.fromkeys(self.slicer.names, np.zeros(groups.n_groups, np.bool_))
        return GroupValues(period, groups.ids_Q.numpy(), np.zeros(groups.n_groups, np.int64), values_TMQ, none)

    def open(self) -> dict[str, Scorer]:
        """Open the bundles and check that they fit the data; returns the scorer of each.

        Raises:
            InputError: a bundle is missing, or was made for other features.
        """
        return _open_bundles(self.identity, self._bundles, self.features, self.threads)

    def _measured(
        self, period: str, window: Window, rows: pa.Table, committed: Mapping[str, Tensor], n_features: int
    ) -> Iterator[GroupValues]:
        """The values of a window's groups, in batches of documents; the last has the window's clicks."""
        assert window.ids_Q is not None
        scorers = {**self.open(), POSITIONS: order_shown}
        scores = []
        for first, last in _batches(window.offsets_Q1, self.docs_per_batch):
            groups, of_groups = assemble([Cut(window, first, last)], n_features), rows.slice(first, last - first)
            own, judging = slice(*window.offsets_Q1[[first, last]]), None if self.every_list else _judging(groups)
            scores_T = [
                scored.finite(committed[url][own] if url in committed else _scores(scorers[url], groups, judging), url)
                for url in self.models
            ]
            values_TMQ = [self.metrics(scores_N, groups).numpy() for scores_N in scores_T]
            if self.on_clicks:
                clicked = replace(groups, labels_N=_clicks_of(of_groups, groups))
                clicked_TCQ = [self.on_clicks(scores_N, clicked).numpy() for scores_N in scores_T]
                values_TMQ = [np.concatenate(parts) for parts in zip(values_TMQ, clicked_TCQ, strict=True)]
            scores.append([scores_T[t] for t in self.logits])
            yield GroupValues(
                period,
                window.ids_Q[first:last],
                groups.lengths_Q.numpy(),
                np.stack(values_TMQ) if values_TMQ else np.empty((0, 0, groups.n_groups)),
                self.slicer.find(groups, period, of_groups),
                int(groups.shown_N.isnan().sum()) if POSITIONS in self.models else 0,
                self.correction.sums(scores_T, groups) if self.correction else None,
                self._clicks(scores, window.columns_N["labels"]) if last == len(window.ids_Q) else {},
            )

    def _clicks(self, scores: Sequence[Sequence[Tensor]], labels_N: NDArray[np.float32]) -> dict[int, Tensor]:
        """Tallies of the whole window, because the last bits of sums by batch would depend on the batches."""
        if not self.logits or not np.isin(labels_N, (0, 1)).all():
            return {}
        of_trials = zip(self.logits, zip(*scores, strict=True), strict=True)
        return {t: tally(torch.cat(parts), torch.tensor(labels_N)) for t, parts in of_trials}


def order_shown(groups: QueryGroups) -> Tensor:
    """Scores that fall with the position at which a document was shown; documents without one are last, all tied."""
    return -groups.shown_N.nan_to_num(nan=float(np.finfo(np.float32).max)).double()


def _judging(groups: QueryGroups) -> tuple[QueryGroups, Tensor] | None:
    """The groups with a label above 0, and the places of their documents; None if all have one."""
    assert groups.labels_N is not None
    has_label_Q = torch.segment_reduce(groups.labels_N, "max", offsets=groups.offsets_Q1) > 0
    if has_label_Q.all():
        return None
    judging_M = has_label_Q.nonzero()[:, 0]
    return groups.select(judging_M), rows_of(groups.offsets_Q1, judging_M)[0]


def _scores(scorer: Scorer, groups: QueryGroups, judging: tuple[QueryGroups, Tensor] | None) -> Tensor:
    """Scores of the groups' documents; 0 for those of groups other than `judging`."""
    if judging is None:
        return scorer(groups)
    part, rows = judging
    own = scorer(part) if part.n_groups else torch.zeros(0)
    return torch.zeros(groups.n_documents, dtype=own.dtype).index_copy_(0, rows, own)


def _known(url: str, tables: Sequence[pa.Table], rows_Q: Ints, window: Window) -> Tensor:
    """The committed scores of a window's documents, found in these rows of the tables."""
    lists = pa.concat_arrays([chunk for table in tables for chunk in table.column(SCORES).chunks])
    if len(rows_Q) < len(lists):
        lists = lists.take(pa.array(rows_Q))
    if not np.array_equal(lists.value_lengths().to_numpy(), np.diff(window.offsets_Q1)):
        raise InputError(f"{url}: does not have a score for each document of the test groups; score them again")
    return torch.tensor(lists.flatten().to_numpy())


def _clicks_of(rows: pa.Table, groups: QueryGroups) -> Tensor:
    """The clicks of each document; NaN in a group without them."""
    lists = rows.column(_CLICKS).combine_chunks()
    lengths_Q = groups.lengths_Q.numpy()
    if not is_per_document(lists, lengths_Q):
        raise InputError(f"column {_CLICKS!r} does not have one value a document; {PREPARE_AGAIN}")
    return torch.tensor(np.asarray(spread_over_documents(lists, lengths_Q).to_numpy(zero_copy_only=False), np.float32))


@lru_cache(maxsize=1)  # a process measures many parts with the same bundles
def _open_bundles(
    identity: str,  # noqa: ARG001 - part of the key: a bundle may have been replaced since another evaluation
    bundles: tuple[str, ...],
    features: tuple[Feature, ...],
    threads: int,
) -> dict[str, Scorer]:
    return scorers_of({url: load(url) for url in bundles}, features=features, threads=threads)


def _batches(offsets_Q1: Ints, documents: int) -> Iterator[tuple[int, int]]:
    """Cut groups into runs of at most this many documents; a longer group is alone."""
    first, groups = 0, len(offsets_Q1) - 1
    while first < groups:
        last = int(np.searchsorted(offsets_Q1, offsets_Q1[first] + documents, side="right")) - 1
        last = min(max(last, first + 1), groups)
        yield first, last
        first = last
