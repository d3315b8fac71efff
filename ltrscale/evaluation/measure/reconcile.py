"""Why another program's figure differs from ours: a metric by our rules and by those of other programs.

From our rules to a program's, rules are switched one by one in the order of `Rules`. The change of the mean is that
rule's part of the difference. The parts add up to the difference; in another order single parts may differ, as a rule
for ties matters less where float32 makes none.

Lists are those of a table of any program, or of a split with a bundle or with committed scores.

Shapes: N documents, K kinds of them, Q groups, Q1 = Q + 1 offsets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from pydantic import Field, field_validator
from torch import Tensor

from ltrscale import storage
from ltrscale.arrays import HIGHEST_LABEL, Bools, Doubles
from ltrscale.batch import group_index, to_offsets
from ltrscale.bundle import Scorer, load, with_tokens_of
from ltrscale.config import Config, Strict
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.scored import committed, finite, look_up
from ltrscale.errors import InputError, nearest
from ltrscale.evaluation.measure.report import GROUPS
from ltrscale.progress import Report, progress
from ltrscale.ranking.choices import metric_label, metric_named
from ltrscale.ranking.libraries import KINDS, POLICIES, PROGRAMS, Policy, under
from ltrscale.ranking.metric import Metric, Rules
from ltrscale.reports.document import Block, Document, Points, Section, Table, TableRow, Text, cell
from ltrscale.reports.findings import Findings, ReportStage, commit_report
from ltrscale.stages.inputs import BundleUrl, hashes_of
from ltrscale.stages.stage import Origin

_SAME = 1e-12
"""Values of a group that differ by less are equal up to rounding."""
_SHOWN = 3
"""Groups to show for each rule: those with the largest change."""


@dataclass(frozen=True)
class ScoredLists:
    """Scored and labelled groups, with the names of queries and the order of the items' names."""

    queries: Sequence[str]
    offsets_Q1: Tensor
    scores_N: Tensor
    labels_N: Tensor
    names_N: Tensor
    """Integers in the order of the items' names."""
    retrieved_N: Tensor | None = None
    """Which documents have a score; None for all."""

    @classmethod
    def from_selection(cls, test: Selection, score: Scorer, url: str) -> Self:
        """The groups of a selection with the scores of the bundle or directory `url`."""
        parts = list(iterate(test, docs_per_batch=65_536))
        scores_N = torch.cat([finite(score(part), url).double() for part in parts])
        lengths_Q = torch.cat([part.lengths_Q for part in parts])
        labels_N = torch.cat([part.labels_N for part in parts if part.labels_N is not None])
        gids = [str(gid) for part in parts if part.ids_Q is not None for gid in part.ids_Q.tolist()]
        return cls(gids, to_offsets(lengths_Q), scores_N, labels_N.double(), torch.arange(len(scores_N)))

    def under(self, rules: Rules, metric: Metric) -> Tensor:
        """A metric of each group under these rules."""
        lists = self.scores_N, self.labels_N, self.offsets_Q1, self.names_N
        return under(rules, metric, *lists, retrieved_N=self.retrieved_N)

    def tied(self) -> int:
        """Groups with documents of equal scores and different labels."""
        columns = group_index(self.offsets_Q1), self.scores_N, self.labels_N
        kinds_K3 = np.unique(np.stack(columns, axis=1)[~self.scores_N.isnan().numpy()], axis=0)
        tied = (kinds_K3[1:, :2] == kinds_K3[:-1, :2]).all(axis=1)
        return len(np.unique(kinds_K3[1:][tied, 0]))


class TableSource(Config):
    """A table with a row for each document, in Parquet or CSV; the rows of a query need not be adjacent."""

    kind: Literal["table"] = "table"
    path: str
    """File or URL: Parquet if the name ends in .parquet, otherwise CSV with a header, which may be packed (.gz)."""
    query: str = "query"
    """Column of the query: the rows with the same value are one group."""
    item: str = "item"
    """Column of the item's name, by which trec_eval breaks ties; unique within a query."""
    label: str = "label"
    """Column of the label, 0 or more."""
    score: str = "score"
    """Column of the score; empty for a document that was not retrieved. It still counts in the ideal and in the number
    of relevant documents, as in trec_eval."""

    def inputs(self) -> dict[str, str]:
        """The fingerprint of the table."""
        return {self.path: storage.fingerprint(self.path)}

    def lists(self) -> ScoredLists:
        """The lists of the table: groups in the order of their first rows, documents in the order of the rows.

        Raises:
            InputError: a column is missing, a value other than a score is missing or not a number, no row has a score,
            a label is negative, or a query has an item twice; the message names the row, from 1 after the header.
        """
        table = self._table()
        queries, items = (table[name].cast(pa.string()).combine_chunks() for name in (self.query, self.item))
        labels, scores = self._numbers(table, self.label), self._numbers(table, self.score)
        self._check_known(~np.isfinite(labels), self.label)
        self._check_known(np.isinf(scores), self.score)
        if (retrieved := ~np.isnan(scores)).sum() == 0:
            raise InputError(f"{self.path}: no row has a {self.score}, so that nothing is ranked; name another column")
        if (negative := np.flatnonzero(labels < 0)).size:
            raise InputError(f"{self.path}: row {negative[0] + 1}: {self.label} is below 0; labels are 0 or more")
        coded = queries.dictionary_encode()  # codes are in the order of the first rows
        codes = coded.indices.to_numpy()
        pairs = np.stack([codes, items.dictionary_encode().indices.to_numpy()], axis=1)
        _, first, counts = np.unique(pairs, axis=0, return_index=True, return_counts=True)
        if (counts > 1).any():
            row = int(first[counts > 1].min())
            raise InputError(
                f"{self.path}: row {row + 1}: its query has item {items[row].as_py()!r} in another row too; keep one"
            )
        names = np.empty(len(items), np.int64)
        names[np.asarray(pc.sort_indices(items.cast(pa.binary())))] = np.arange(len(items))  # as strcmp orders UTF-8
        order = np.argsort(codes, kind="stable")
        return ScoredLists(
            coded.dictionary.to_pylist(),
            to_offsets(torch.from_numpy(np.bincount(codes, minlength=len(coded.dictionary)))),
            *(torch.from_numpy(values[order]) for values in (scores, labels, names, retrieved)),
        )

    def _table(self) -> pa.Table:
        columns, data = [self.query, self.item, self.label, self.score], pa.BufferReader(storage.read_bytes(self.path))
        try:
            if self.path.endswith(".parquet"):
                file = pq.ParquetFile(data)
                names = file.schema_arrow.names
                table = file.read([name for name in columns if name in names])
            else:
                stream: Any = pa.input_stream(data, compression="gzip" if self.path.endswith(".gz") else None)
                # names as text: a query 007 is not 7
                texts = pyarrow.csv.ConvertOptions(column_types={self.query: pa.string(), self.item: pa.string()})
                table = pyarrow.csv.read_csv(stream, convert_options=texts)
                names = table.column_names
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{self.path}: neither Parquet nor CSV as its name says ({error})") from error
        if missing := [name for name in columns if name not in names]:
            suggestion = nearest(missing[0], names)
            raise InputError(f"{self.path}: no column {missing[0]!r}; did you mean {suggestion!r}? Set it in source")
        if repeated := [name for name in columns if names.count(name) > 1]:
            raise InputError(f"{self.path}: several columns are called {repeated[0]!r}; keep one")
        if not len(table):
            raise InputError(f"{self.path}: has no rows; name another file")
        for name in columns[:2]:
            self._check_known(table[name].is_null().to_numpy(), name)
        return table

    def _numbers(self, table: pa.Table, name: str) -> Doubles:
        column = table[name]
        if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_null(column.type)):
            raise InputError(
                f"{self.path}: column {name!r} has values that are no numbers ({column.type}); correct them"
            )
        return np.ascontiguousarray(column.cast(pa.float64(), safe=False).to_numpy())

    def _check_known(self, bad: Bools, name: str) -> None:
        if bad.any():
            row = int(bad.argmax()) + 1
            raise InputError(f"{self.path}: row {row}: {name} is missing or not finite; leave the row out")


class BundleSource(Config):
    """The labelled groups of a split, scored by a bundle."""

    kind: Literal["bundle"] = "bundle"
    bundle: BundleUrl
    """The bundle."""
    split: Split
    """Its labelled groups are scored. Items are named by their place, because data sets are read without item names."""

    def inputs(self) -> dict[str, str]:
        """Content of the data set and the bundle."""
        return hashes_of(self)

    def lists(self) -> ScoredLists:
        """The groups with the scores of the bundle; InputError if it does not fit, or a score is not finite."""
        bundle = load(self.bundle)
        test = with_tokens_of(select(self.split, labelled=True), [bundle])
        return ScoredLists.from_selection(test, bundle.scorer(features=test.features), self.bundle)


class ScoresSource(Config):
    """The labelled groups of a split, with committed scores."""

    kind: Literal["scores"] = "scores"
    scores: str
    """Directory of scores that jobs.score made on the split's data set."""
    split: Split
    """Its labelled groups are read. Items are named by their place, because data sets are read without item names."""

    def inputs(self) -> dict[str, str]:
        """Content of the data set and the scores."""
        return hashes_of(self, self.split.with_scores(self.scores))

    def lists(self) -> ScoredLists:
        """The groups with their scores; InputError if a group has none."""
        score = look_up(self.scores, committed(self.scores, self.split))
        return ScoredLists.from_selection(select(self.split, labelled=True), score, self.scores)


class ReconcileJob(ReportStage):
    """Report which rules explain the difference between our figures and those of other programs."""

    stage: ClassVar = "reconcile"
    fixed: ClassVar = {"groups_shown": 3}
    source: Annotated[TableSource | BundleSource | ScoresSource, Field(discriminator="kind")]
    """Where scores and labels are: a `table`, a `bundle` on a split, or committed `scores`."""
    metrics: tuple[str, ...] = Field(("ndcg@5", "ndcg@10", "map", "mrr", "precision@5"), min_length=1)
    """Our metrics by name: ndcg, precision, recall or success with @K, map or mrr."""
    relevant_from: float = Field(1.0, gt=0)
    """Lowest label of a relevant document under our rules, except for NDCG. Other programs have their own rules."""
    programs: tuple[Literal[PROGRAMS], ...] = ()  # type: ignore[valid-type]
    """Programs to compare with; empty for all."""

    @field_validator("metrics")
    @classmethod
    def _have_rules(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if metric_named(name).kind not in KINDS:
                raise ValueError(f"{name}: no program's rules are known; take one of {', '.join(KINDS)}")
        return names

    def page(self) -> Document:
        """The report of the committed findings."""
        return document(Reconciliation.read(self.out))

    def inputs(self) -> dict[str, str]:
        """Content of the source's data."""
        return self.source.inputs()

    def work(self, origin: Origin, report: Report) -> None:
        """Compute each metric by our rules and those of other programs, and commit which rules explain the differences.

        The directory holds `report.md`, `metrics.json` and `groups.parquet`, with every value of every group.
        """
        lists = self.source.lists()
        highest, of_gains = lists.labels_N.amax().item(), [name for name in self.metrics if name.startswith("ndcg")]
        if of_gains and highest > HIGHEST_LABEL:
            beyond = f"label {highest:g} is above {HIGHEST_LABEL}, and its gain 2^y - 1 beyond float64"
            raise InputError(f"{beyond}; give grades, or leave {of_gains[0]} out of metrics")
        columns: dict[str, Tensor] = {}
        metrics: list[_ReconciledMetric] = []
        with progress("reconcile", len(self.metrics)) as advance:
            for name in self.metrics:
                metric = metric_named(name, threshold=self.relevant_from)
                compared, values_of_groups = _compare_metric(metric, lists, self.programs or PROGRAMS)
                metrics.append(compared)
                columns |= values_of_groups
                advance(1)
        result = Reconciliation(
            groups=len(lists.queries),
            documents=len(lists.scores_N),
            not_retrieved=0 if lists.retrieved_N is None else int((~lists.retrieved_N).sum()),
            tied=lists.tied(),
            metrics=tuple(metrics),
        )
        values = {name: pa.array(v.numpy(), mask=v.isnan().numpy()) for name, v in columns.items()}
        rows = pa.table({"query": lists.queries, "documents": lists.offsets_Q1.diff().numpy(), **values})
        commit_report(self.out, result, document(result), made_by=origin, tables={GROUPS: rows})
        for found in result.metrics:
            report({"metric": found.metric, "figure": found.figure})


class _ChangedGroup(Strict):
    """A group whose value a rule changes; None where it is left out."""

    query: str
    before: float | None
    after: float | None


class _RuleSwitch(Strict):
    """One rule switched from ours to the program's, with all rules before it switched already."""

    rule: str
    ours: str
    theirs: str
    part: float
    """The rule's part of the difference: the mean after the switch minus the mean before it."""
    groups: int
    """Groups with a changed value."""
    shown: tuple[_ChangedGroup, ...]
    """The groups with the largest changes."""


class _Reconciled(Strict):
    """A metric by a program's rules."""

    program: str
    spelled: str
    """The program's name for the metric."""
    policy: str
    figure: float | None
    """The mean over groups by its rules; None if no group has a value, as for the fields below."""
    difference: float | None
    """Its figure minus ours, the sum of all parts."""
    steps: tuple[_RuleSwitch, ...]


class _ReconciledMetric(Strict):
    """A metric by our rules and by those of each program that has it."""

    metric: str
    policy: str
    figure: float | None
    undefined: int
    """Groups without a relevant document, which our mean leaves out."""
    programs: tuple[_Reconciled, ...]


class Reconciliation(Findings):
    """`metrics.json` of a reconciliation."""

    called: ClassVar = "a reconciliation"
    made_by_job: ClassVar = "jobs.reconcile"
    groups: int
    documents: int
    not_retrieved: int = 0
    """Documents without a score."""
    tied: int
    """Groups in which documents with different labels have the same score."""
    metrics: tuple[_ReconciledMetric, ...]


def _mean(values_Q: Tensor) -> float | None:
    """The mean over the groups that are not left out; None if all are."""
    defined_Q = values_Q[~values_Q.isnan()]
    return float(defined_Q.mean()) if len(defined_Q) else None


def _compare_metric(
    metric: Metric, lists: ScoredLists, wanted: Sequence[str]
) -> tuple[_ReconciledMetric, dict[str, Tensor]]:
    """A metric by our rules and each program's, and the values of all groups by each."""
    ours_Q = lists.under(Rules(), metric)
    columns, programs = {metric.name: ours_Q}, []
    for policy in POLICIES:
        if policy.kind == metric.kind and policy.program in wanted:
            reconciled, values_Q = _reconciled(policy, metric, lists, ours_Q)
            columns[f"{policy.program} {reconciled.spelled}"] = values_Q
            programs.append(reconciled)
    return _ReconciledMetric(
        metric=metric.name,
        policy=metric.policy,
        figure=_mean(ours_Q),
        undefined=int(ours_Q.isnan().sum()),
        programs=tuple(programs),
    ), columns


def _reconciled(policy: Policy, metric: Metric, lists: ScoredLists, ours_Q: Tensor) -> tuple[_Reconciled, Tensor]:
    """Switch the rules of a program one by one; returns the values of all groups too."""
    rules, before_Q, steps = Rules(), ours_Q, []
    for name, their_rule in policy.rules:
        if name not in metric.affected_by() or their_rule == (our_rule := getattr(rules, name)):
            continue
        rules = rules.replace(**{name: their_rule})
        after_Q = lists.under(rules, metric)
        steps.append(_step(name, (our_rule, their_rule), before_Q, after_Q, lists.queries))
        before_Q = after_Q
    figure, our_figure = _mean(before_Q), _mean(ours_Q)
    return _Reconciled(
        program=policy.program,
        spelled=policy.spelled.format(k=metric.model_dump().get("k")),
        policy=policy.rules.text(metric.affected_by()),
        figure=figure,
        difference=None if figure is None or our_figure is None else figure - our_figure,
        steps=tuple(steps),
    ), before_Q


def _step(rule: str, values: tuple[str, str], before_Q: Tensor, after_Q: Tensor, queries: Sequence[str]) -> _RuleSwitch:
    """One switched rule: its part of the difference, and the groups with the largest changes."""
    change_Q = (after_Q.nan_to_num(nan=-1) - before_Q.nan_to_num(nan=-1)).abs()  # no metric is -1
    changed = int((change_Q > _SAME).sum())
    most = change_Q.argsort(descending=True, stable=True)[: min(_SHOWN, changed)].tolist()

    def value(values_Q: Tensor, q: int) -> float | None:
        return None if values_Q[q].isnan() else float(values_Q[q])

    return _RuleSwitch(
        rule=rule,
        ours=values[0],
        theirs=values[1],
        part=(_mean(after_Q) or 0.0) - (_mean(before_Q) or 0.0),
        groups=changed,
        shown=tuple(_ChangedGroup(query=queries[q], before=value(before_Q, q), after=value(after_Q, q)) for q in most),
    )


def document(result: Reconciliation) -> Document:
    """The report: a row for each program and metric, and the groups that show each difference."""
    unranked = f", of which {result.not_retrieved:,} were not retrieved" if result.not_retrieved else ""
    intro = (
        f"{result.groups:,} query groups, {result.documents:,} documents{unranked}; {result.tied:,} groups have "
        "documents of equal scores and different labels. Each program's figure is computed by its rules. Rules are "
        f"switched from ours to the program's in this order: {', '.join(Rules.model_fields)}; the change of the mean "
        "at each switch is that rule's part, and the parts add up to the difference. In brackets are the groups whose "
        "value changes."
    )
    sections = [
        Section(
            f"{metric_label(each.metric)}: the groups that show it",
            [Text(f"Ours: {each.policy}."), *map(_changed_groups, each.programs)],
        )
        for each in result.metrics
    ]
    return Document("Reconciliation", [Text(intro), _explained(result)], sections)


def _explained(result: Reconciliation) -> Table:
    """A row for each program and metric, with the rules that explain its difference from ours."""
    rows: list[TableRow] = []
    for each in result.metrics:
        metric = {"metric": metric_label(each.metric)}
        rows.append({**metric, "program": "ours", "spelled": None, "figure": each.figure})
        for p in each.programs:
            row: TableRow = {**metric, "program": p.program, "spelled": p.spelled, "figure": p.figure}
            why = [f"{s.rule} {s.theirs} {s.part:+.4f} ({s.groups:,})" for s in p.steps if s.groups]
            row |= {"- ours": cell(p.difference, "+.4f"), "explained by": ", ".join(why) or "the same rules here"}
            rows.append(row)
    return Table.from_rows(rows)


def _changed_groups(program: _Reconciled) -> Block:
    """The groups with the largest changes for each rule of a program."""
    lines = []
    for step in program.steps:
        shown = "; ".join(f"{g.query} {cell(g.before)} to {cell(g.after)}" for g in step.shown)
        if shown:
            lines.append(f"{step.rule}, {step.ours} to {step.theirs}, {step.part:+.4f}: {shown}")
    text = f"{program.program} {program.spelled}: {program.policy}"
    return Points(lines, caption=text) if lines else Text(f"{text}.")
