"""What an evaluation commits: its results, `metrics.json`, and every metric of every group, `groups.parquet`.

Trials are the bundles or committed scores of a method. `groups.parquet` has a row for each group and trial, with the
group's slices but `all`.

Shapes: Q groups, T or t trials of all or one method, M metrics.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.arrays import Doubles
from ltrscale.config import Strict
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.corrected import Corrected
from ltrscale.evaluation.measure.drift import ByPeriod
from ltrscale.evaluation.measure.outliers import OutlierDetector
from ltrscale.evaluation.measure.settings import AS_SHOWN
from ltrscale.evaluation.measure.slices import ALL, OF_PERIOD, OUTLIERS
from ltrscale.evaluation.pages import ComparedMethods
from ltrscale.evaluation.statistics.summarise import Comparison, Scope
from ltrscale.ranking.metrics import Calibration
from ltrscale.reports.document import span

if TYPE_CHECKING:
    from ltrscale.evaluation.measure.measuring import GroupValues

GROUPS = "groups.parquet"
"""The file with every metric of every group and trial."""
_ROWS_WAITING = 1 << 16


class MethodTrial(Strict):
    """One bundle of a method, or its scores; None where a bundle does not state it, or where there is no bundle."""

    url: str
    kind: str
    """Kind of the bundle: neural, trees or feature; `scores`; `order shown`."""
    labelled_groups: int | None = None
    """Number of labelled groups it was trained on."""
    validation_groups: int | None = None
    """Number of labelled groups it was selected on."""
    labels: str | None = None
    """Identity of all these labels."""
    debiased: str | None = None
    """How its training corrected for positions: `dla`, `weights` or `unbiased`; None if it did not."""
    logits: bool = False
    """Whether its scores are logits of labels 0 and 1, from training with the pointwise sigmoid loss."""
    calibration: Calibration | None = None
    """Its probabilities against the clicks; None where scores are not logits, or labels not 0 and 1."""


class MethodResult(Strict):
    """One method: its trials, and its results by slice."""

    name: str
    trials: tuple[MethodTrial, ...]
    slices: dict[str, Scope]
    """`all` groups, `outliers`, those of `slices` in the config, and the values of the columns of `slice_by`."""

    @property
    def kinds(self) -> set[str]:
        """The kinds of its trials."""
        return {trial.kind for trial in self.trials}

    @property
    def periods(self) -> dict[str, Scope]:
        """Its results on each period with labels; empty if the evaluation has no slices by period."""
        by_name = self.slices.items()
        return {name.removeprefix(OF_PERIOD): scope for name, scope in by_name if name.startswith(OF_PERIOD)}


def by_mean(methods: Sequence[MethodResult], primary: str) -> list[MethodResult]:
    """The methods by their mean over all groups; the order that was shown, a reference, is last.

    Most labels, such as clicks, come from people who saw that order, so they favour it over the rest.
    """

    def place(method: MethodResult) -> tuple[bool, float]:
        mean = method.slices[ALL].summaries[primary].mean
        return method.name == AS_SHOWN, math.inf if mean is None else -mean

    return sorted(methods, key=place)


class EvaluatedData(Strict):
    """The groups that the methods were evaluated on."""

    data: tuple[str, ...]
    periods: tuple[str, ...]
    hash: str
    groups: int
    documents: int
    slices: dict[str, int]
    """Groups of each slice."""
    goals: dict[str, float] = Field(default_factory=dict, exclude_if=operator.not_)
    """The goals that the methods were evaluated on, with their weights; empty for the labels of no name."""
    judged: str | None = None
    """The data set with all judged documents of each query; None if only the lists' own labels count."""
    unlisted: int = 0
    """Groups that are queries with judgements and without a list."""
    unshown: int = 0
    """Documents without a position, if the order shown is measured."""

    @property
    def described(self) -> str:
        """The data and its size, in one sentence."""
        of = " + ".join(name if weight == 1 else f"{weight:g} {name}" for name, weight in self.goals.items())
        labels = f"labels {of}; " if of else ""
        return (
            f"Test data: {', '.join(self.data)}, {span(self.periods)}; {labels}{self.groups:,} labelled query groups, "
            f"{self.documents:,} documents, {self.slices[OUTLIERS]:,} outlier groups (selection {self.hash[:12]})."
        )


class Evaluation(ComparedMethods):
    """`metrics.json` of an evaluation."""

    called: ClassVar = "an evaluation"
    made_by_job: ClassVar = "jobs.evaluate"
    methods: Annotated[tuple[MethodResult, ...], Field(min_length=1)]
    leads: dict[str, Comparison]
    """Over all groups and in the primary metric, the difference of every other method from the first of `ranked`."""
    test: EvaluatedData
    conditions: dict[str, str]
    """The condition of each slice that the config names."""
    corrected: Corrected | None
    """The metrics corrected for positions, if requested."""
    detector: OutlierDetector
    by_period: ByPeriod | None = None
    """The drift of the test periods, if requested."""
    drift_failed: str | None = Field(default=None, exclude_if=lambda why: why is None)
    """Why drift was requested and not measured."""

    @model_validator(mode="after")
    def _from_the_best(self) -> Self:
        if (best := self.ranked[0].name) in self.leads:
            raise ValueError(f"its leads are not those of {best}, as an older version had them")
        return self

    def drift(self) -> ByPeriod:
        """The drift of the test periods; InputError says why it is missing."""
        if self.by_period is None:
            why = self.drift_failed or "not measured; run jobs.evaluate with evaluate.by_period=true"
            raise InputError(f"drift: {why}")
        return self.by_period

    @property
    def ranked(self) -> list[MethodResult]:
        """The methods, the best one first; the order that was shown is last."""
        return by_mean(self.methods, self.primary)


class GroupFile:
    """Writes `groups.parquet`, a row for each group and trial, as the groups arrive.

    A context manager. Memory holds about 65,536 rows.
    """

    def __init__(self, path: Path, metrics: Sequence[str], methods: Mapping[str, Sequence[MethodTrial]]) -> None:
        text = pa.string()
        columns = {"gid": pa.int64(), "period": text, "documents": pa.int64(), "slices": pa.list_(text)}
        columns |= {"method": text, "trial": pa.int32(), **dict.fromkeys(metrics, pa.float64())}
        schema = pa.schema(list(columns.items()))
        texts = ["period", "slices.list.element", "method", "trial"]
        self._writer = pq.ParquetWriter(path, schema, use_dictionary=texts)
        self._trials = [(name, number) for name, trials in methods.items() for number in range(len(trials))]
        self._waiting: list[pa.Table] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._write()
        self._writer.close()

    def add(self, values: GroupValues) -> None:
        """Add the groups of a row group."""
        q = len(values.gids_Q)
        group, slice_ = np.nonzero(np.stack(list(values.slices.values()), axis=1))
        names = pa.array(list(values.slices), pa.string()).take(pa.array(slice_))
        offsets_Q1 = np.searchsorted(group, np.arange(q + 1)).astype(np.int32)
        for (method, number), values_MQ in zip(self._trials, values.values_TMQ, strict=True):
            columns = [
                values.gids_Q,
                pa.repeat(values.period, q),
                values.documents_Q,
                pa.ListArray.from_arrays(pa.array(offsets_Q1), names),
                pa.repeat(method, q),
                np.full(q, number, np.int32),
                *(pa.array(values_Q, mask=np.isnan(values_Q)) for values_Q in values_MQ),
            ]
            self._waiting.append(pa.table(columns, schema=self._writer.schema))
        if sum(map(len, self._waiting)) >= _ROWS_WAITING:
            self._write()

    def _write(self) -> None:
        if self._waiting:
            table = pa.concat_tables(self._waiting)
            self._writer.write_table(table, row_group_size=len(table))
            self._waiting.clear()


def read_group_rows(url: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Columns of `groups.parquet`, all by default, beside findings that are committed there."""
    manifest = storage.read_manifest(url)
    assert manifest is not None
    return pq.read_table(pa.BufferReader(storage.read_verified(url, GROUPS, manifest)), columns=columns)


def read_group_metrics(url: str, evaluation: Evaluation) -> list[Doubles]:
    """Every metric of every group and trial, [Q, t, M], for each method of a committed evaluation; NaN if undefined."""
    table, metrics = read_group_rows(url), list(evaluation.methods[0].slices[ALL].summaries)
    methods = []
    for method in evaluation.methods:
        trials = []
        for trial in range(len(method.trials)):
            rows = table.filter((pc.field("method") == method.name) & (pc.field("trial") == trial))
            trials.append(np.stack([rows[metric].to_numpy() for metric in metrics], axis=1))
        methods.append(np.stack(trials, axis=1))
    return methods
