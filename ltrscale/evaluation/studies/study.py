"""The results of a study: methods at several numbers of labelled groups, over several draws of these groups.

Shapes: Q groups, T draws of labels, P pretrainings, M metrics.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, get_args

import numpy as np
from pydantic import Field

from ltrscale.arrays import Bools, Doubles, Ints
from ltrscale.config import Config, Strict
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.outliers import OutlierDetector
from ltrscale.evaluation.measure.report import EvaluatedData
from ltrscale.evaluation.statistics.estimates import Crossover, Drawn, MeanEstimate, crossovers, estimate
from ltrscale.evaluation.studies.measured import Measured, TestedOn, read_outliers, read_values
from ltrscale.reports.findings import Findings
from ltrscale.stages.inputs import OutputUrl

ScopeName = Literal["all", "outliers"]
_SCOPES: tuple[ScopeName, ...] = get_args(ScopeName)
Family = Literal["trees", "not pretrained", "pretrained", "mixed", "feature", "in context"]


class MethodTraits(Strict):
    """The traits of a method, by which tables sort it."""

    family: Family
    """`pretrained` also through a teacher. `mixed` are trees that read or learn the scores of networks, `feature` is a
    fixed order without training, and `in context` a network that reads labelled groups without training."""
    pretext: str | None = None
    """What the encoder is pretrained with."""
    augment: str | None = None
    """The augmentation of its views."""
    strategy: Literal["LP", "MP", "FF"] | None = None
    """How a pretrained encoder is finetuned: linear probing, multilayer probing, full finetuning."""
    unlabelled: str | None = None
    """What trees learn from unlabelled groups: nothing, PCA, pseudo-labels, or both."""
    tuned: bool = False
    """Whether its settings are searched at each number of labelled groups."""


class Cost(Strict):
    """Time of a method; None where unknown."""

    pretraining_minutes: float | None = None
    """One pretraining."""
    pretraining_documents_per_s: float | None = None
    minutes: dict[str, float] = Field(default_factory=dict)
    """Mean minutes of training one model, without pretraining and without the methods it is built on, by the number of
    labelled groups."""
    documents_per_s: float | None = None
    """Documents read by training, over its whole time."""
    scored_documents_per_s: float | None = None


class _StudyPoint(Strict):
    """A method at one number of labelled groups."""

    method: str
    labelled: str
    validation: float | None
    """Mean of the primary metric on validation groups; None if training does not report it."""
    estimates: dict[ScopeName, dict[str, MeanEstimate]]
    """By groups and metric, without metrics that no group defines."""


class Versus(Strict):
    """A method against another, in the primary metric."""

    method: str
    against: str
    groups: ScopeName
    estimates: dict[str, MeanEstimate]
    """The difference by the number of labelled groups."""
    crossovers: tuple[Crossover, ...]


class _StudyPlan(Strict):
    """What a study plans, and what of it has failed."""

    methods: dict[str, MethodTraits]
    counts: Literal["relevant", "labelled"]
    """The unit of a number of labelled groups: groups with a relevant document, or all labelled groups."""
    validation_share: float | None
    """Validation labels as a share of the training labels; None if they are a fixed sample or all of the split."""
    validation_size: dict[str, float]
    """Size of the validation sample that is the same at every number; empty for all of the split."""
    baseline: str | None
    controls: dict[str, str]
    """By pretrained method, the method with the same settings without pretraining."""
    primary: str
    policies: dict[str, str]
    """What the formula of each metric leaves open, such as ties."""
    leave_out_constant: bool = False
    planned: int
    """Models of the whole study."""
    failed: dict[str, str]
    """Why a part of the study failed, by its name."""


class Study(_StudyPlan, Findings):
    """`metrics.json` of a study."""

    called: ClassVar = "a study"
    made_by_job: ClassVar = "jobs.study"
    labelled: dict[str, float | None]
    """The numbers of labelled groups by name; None for a share of all whose number no model has stated yet. Charts and
    crossovers leave these out."""
    trained_on: dict[str, float | None]
    """Labelled groups of the method that reads the most of them: the mean over the draws. Methods with `relevant_only`
    leave out groups without a relevant document."""
    points: tuple[_StudyPoint, ...]
    versus: tuple[Versus, ...]
    costs: dict[str, Cost]
    models: int
    """Models measured so far."""
    test: EvaluatedData
    detector: OutlierDetector

    def find(self, method: str, labelled: str) -> _StudyPoint | None:
        """The point of a method, if it has been measured."""
        return next((p for p in self.points if (p.method, p.labelled) == (method, labelled)), None)

    def primary_at(self, method: str, labelled: str, groups: ScopeName) -> MeanEstimate | None:
        """The primary metric of a method; None if it has not been measured, or no group defines it."""
        point = self.find(method, labelled)
        return None if point is None else point.estimates[groups].get(self.primary)

    @property
    def opponents(self) -> list[str]:
        """The methods that others are compared with: the baseline first, then the controls."""
        return [name for name in dict.fromkeys([self.baseline, *self.controls.values()]) if name is not None]

    def against(self, other: str, groups: ScopeName = "all") -> dict[str, Versus]:
        """The comparisons with a method, by the name of the method compared with it."""
        return {v.method: v for v in self.versus if v.against == other and v.groups == groups}

    def in_family(self, family: Family) -> list[str]:
        """The names of the methods of a family."""
        return [name for name, about in self.methods.items() if about.family == family]

    def best(self, names: Iterable[str], labelled: str) -> str | None:
        """The method with the highest validation metric; None if none reports it."""
        means = [
            (p.validation, name) for name in names if (p := self.find(name, labelled)) and p.validation is not None
        ]
        return max(means, key=lambda pair: pair[0])[1] if means else None


class Model(Config):
    """A trained and measured model of the study."""

    labelled: str
    draw: int
    pretraining: int | None
    """Which of the pretrainings that are crossed with the draws; None for the draw's own, or without pretraining."""
    method: str
    url: OutputUrl
    """Directory of its metrics."""
    seconds: float | None
    """Time of its training."""
    documents: int
    """Documents that its training read."""


class Design(_StudyPlan, Config):
    """The plan of a study with what its figures are computed from, apart from its models."""

    labelled: dict[str, float | None]
    """Names of the numbers of labelled groups, in rising order; None where only a trained model states the number."""
    pretraining: dict[str, Cost]
    """Cost of pretraining by method."""


def study_of(design: Design, models: Sequence[Model], test_url: str) -> Study:
    """Compute all figures from the metrics in the models' directories.

    Raises:
        InputError: a directory has no committed metrics, or two directories have different test groups.
    """
    table = _Table.read(models, test_url, design.primary)
    with_baseline = [(name, design.baseline) for name in design.methods if design.baseline not in (None, name)]
    pairs = dict.fromkeys([*with_baseline, *design.controls.items()])
    trained_on = {name: table.trained_on(name) for name in design.labelled}
    numbers = {name: number or trained_on[name] for name, number in design.labelled.items()}
    comparisons = [
        table.compared(method, other, groups, numbers, is_control=design.controls.get(method) == other)
        for method, other in pairs
        for groups in _SCOPES
    ]
    tested = TestedOn.read(test_url)
    return Study(
        **design.model_dump(include=set(_StudyPlan.model_fields)),
        labelled=numbers,
        trained_on=trained_on,
        points=tuple(table.point(m, n) for n in numbers for m in design.methods if (n, m) in table.values),
        versus=tuple(versus for versus in comparisons if versus is not None),
        costs={name: table.cost(name, design.pretraining.get(name, Cost())) for name in design.methods},
        models=len(models),
        test=tested.test,
        detector=tested.detector,
    )


_Key = tuple[str, str]
"""A number of labelled groups and a method."""
_Found = dict[_Key, dict[int, dict[int | None, Doubles]]]
"""Metrics [Q, M] of each model, by draw and pretraining."""


@dataclass(frozen=True)
class _Table:
    """The metrics of all models, by number of labelled groups and method."""

    metrics: tuple[str, ...]
    primary: str
    values: Mapping[_Key, Mapping[int, Doubles]]
    """By number of labelled groups and method: for each draw with all its pretrainings [Q, P, M]."""
    crossed: Mapping[_Key, tuple[int, ...] | None]
    """Pretrainings crossed with the draws, by the same keys; None where each draw has its own or none."""
    models: Mapping[_Key, Sequence[tuple[Model, Measured]]]
    rows: Mapping[ScopeName, Bools]

    @classmethod
    def read(cls, models: Sequence[Model], test_url: str, primary: str) -> Self:
        """Read the metrics of all models, and which test groups are outliers; InputError as `study_of`."""
        found: _Found = defaultdict(lambda: defaultdict(dict))
        of_models = defaultdict(list)
        gids_Q: Ints | None = None
        metrics: tuple[str, ...] = ()
        for model in models:
            measured = Measured.read(model.url)
            metrics = metrics or measured.metrics
            own_Q, values_QM = read_values(model.url, metrics)
            if gids_Q is not None and not np.array_equal(own_Q, gids_Q):
                raise InputError(f"{model.url}: measured on other test groups; run the same command again")
            gids_Q = own_Q
            found[model.labelled, model.method][model.draw][model.pretraining] = values_QM
            of_models[model.labelled, model.method].append((model, measured))
        outliers = read_outliers(test_url)
        outlier_Q = np.array([outliers[gid] for gid in ([] if gids_Q is None else gids_Q.tolist())], np.bool_)
        values, crossed = _with_common_pretrainings(found)
        rows: dict[ScopeName, Bools] = {"all": np.ones_like(outlier_Q), "outliers": outlier_Q}
        return cls(metrics, primary, values, crossed, of_models, rows)

    def drawn(self, method: str, labelled: str, metric: str, groups: ScopeName) -> Drawn:
        """A metric of a method on these groups, by draw and pretraining."""
        of_draws, column = self.values[labelled, method], self.metrics.index(metric)
        values_TQP = [values_QPM[self.rows[groups], :, column] for values_QPM in of_draws.values()]
        return Drawn(tuple(of_draws), np.stack(values_TQP, axis=1), self.crossed[labelled, method])

    def trained_on(self, labelled: str) -> float | None:
        """Labelled groups of the method that reads the most of them, see `Study.trained_on`; None if none states it."""
        counts = [[m.labelled_groups for _, m in ms] for (n, _), ms in self.models.items() if n == labelled]
        means = [np.mean([count for count in of_method if count is not None]) for of_method in counts if any(of_method)]
        return float(max(means)) if means else None

    def point(self, method: str, labelled: str) -> _StudyPoint:
        """All metrics of a method, with its validation metric if all its models report one."""
        validation = [measured.validation.get(self.primary) for _, measured in self.models[labelled, method]]
        defined = [value for value in validation if value is not None]
        estimates = {
            groups: {
                metric: estimated
                for metric in self.metrics
                if (estimated := estimate(self.drawn(method, labelled, metric, groups)))
            }
            for groups in _SCOPES
        }
        mean = float(np.mean(defined)) if defined and len(defined) == len(validation) else None
        return _StudyPoint(method=method, labelled=labelled, validation=mean, estimates=estimates)

    def compared(
        self, method: str, other: str, groups: ScopeName, numbers: Mapping[str, float | None], *, is_control: bool
    ) -> Versus | None:
        """The comparison of two methods; a single encoder is not enough to judge the share of pretraining."""
        curve, estimates = [], {}
        for n, number in numbers.items():
            if (n, method) in self.values and (n, other) in self.values:
                one, two = (self.drawn(name, n, self.primary, groups) for name in (method, other))
                if (differences := one.minus(two)) is None:
                    continue
                judges = not is_control or differences.pretrainings is None or len(differences.pretrainings) > 1
                if (estimated := estimate(differences, judges=judges)) is not None:
                    estimates[n] = estimated
                    if number is not None:
                        curve.append((number, differences))
        if not estimates:
            return None
        judged = all(estimated.low is not None for estimated in estimates.values())
        changes = [c if judged else c.replace(low=None, high=None) for c in crossovers(curve)]
        return Versus(method=method, against=other, groups=groups, estimates=estimates, crossovers=tuple(changes))

    def cost(self, method: str, pretraining: Cost) -> Cost:
        """The time of a method: that of its pretraining, of training by number of labelled groups, and of scoring."""
        of_method = {n: models for (n, name), models in self.models.items() if name == method}
        pairs = [pair for models in of_method.values() for pair in models]
        timed = [(model.seconds, model.documents) for model, _ in pairs if model.seconds is not None]
        seconds, documents = sum(seconds for seconds, _ in timed), sum(documents for _, documents in timed)
        scoring = sum(measured.seconds for _, measured in pairs)
        times = {
            n: [model.seconds for model, _ in models if model.seconds is not None] for n, models in of_method.items()
        }
        return pretraining.replace(
            minutes={n: float(np.mean(seconds)) / 60 for n, seconds in times.items() if seconds},
            documents_per_s=documents / seconds if documents and seconds else None,
            scored_documents_per_s=sum(m.documents for _, m in pairs) / scoring if scoring else None,
        )


def _with_common_pretrainings(
    found: _Found,
) -> tuple[dict[_Key, dict[int, Doubles]], dict[_Key, tuple[int, ...] | None]]:
    """The draws that have the same pretrainings, as `_Table.values` and `_Table.crossed`.

    Models may be missing, unfinished or failed: as many as possible are kept.
    """
    values: dict[_Key, dict[int, Doubles]] = {}
    crossed: dict[_Key, tuple[int, ...] | None] = {}
    for key, draws in found.items():
        sets = {frozenset(of_draw) for of_draw in draws.values()}
        common = max(sets, key=lambda s: (len(s) * sum(s <= of.keys() for of in draws.values()), len(s)))
        names = sorted(common, key=lambda name: name or 0)
        whole = {draw: of_draw for draw, of_draw in sorted(draws.items()) if common <= of_draw.keys()}
        values[key] = {draw: np.stack([of[name] for name in names], axis=1) for draw, of in whole.items()}
        crossed[key] = tuple(name for name in names if name is not None) or None
    return values, crossed
