"""The later configs of a log: a study.yaml with the differences it can detect and its minutes, and a weekly.yaml.

Whether a difference is detected depends on its deviations over draws of labels and over test lists. In advance these
are known only from other logs; the study's report has those of this one.
"""

import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ltrscale import storage
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.evaluation.statistics.estimates import MOST_DRAWS, Spread
from ltrscale.experiments.first.pipeline import (
    BOOSTED,
    FINETUNED,
    SCORED,
    STUDIED,
    FirstPlan,
    LogSize,
    divided,
    epoch_minutes,
    first_sizes,
    methods_text,
    period_range,
    pipeline_text,
)
from ltrscale.experiments.first.quoting import escaped, flow, plain_yaml
from ltrscale.progress import called

_METHOD = "trees"

OVER_DRAWS = 0.14
"""Standard deviation of a network's NDCG@5 difference from tuned trees over draws of n labelled lists, times sqrt(n).

The median deviations in docs/results/study-news.md are .014 at 100, .0046 at 1,000 and .003 at 3,000: half the width of
an interval, times the root of the draws, over Student's t.
"""

OVER_LISTS = 0.15
"""Standard deviation of such a difference over test lists: .147 on the 1,756 lists of week 11 of tests/shop.py."""

_LABELLED = (100, 300, 1000, 3000)

_LOOKED_FOR = 0.01

_MOST, _MINUTES = 10, 60

_CROSSED = 3
"""Number of pretrainings if there is no time for one per draw."""

_WORKERS = 2

_TRIALS = 10

_VALIDATION = 1500

_START_S = 1.5
"""Seconds to start and measure a model."""


class StudySize(NamedTuple):
    """The sizes that determine which differences a first study can detect."""

    numbers: tuple[int, ...]
    """Numbers of labelled lists."""
    draws: int
    validation_lists: int
    """Lists of the validation periods with different labels."""
    test_lists: int
    """Lists of the test periods with different labels."""
    minutes: float
    """On two cores, pretraining included."""
    pretrainings: int | None = None
    """Pretrainings shared by all draws; None if there is time for one per draw."""

    def spread(self, labelled: int) -> Spread:
        """The expected deviations of a difference at a number of labelled lists, from other logs."""
        return Spread(OVER_DRAWS**2 / labelled, OVER_LISTS**2 / self.test_lists, self.test_lists)


def first_runs(
    out: str, plan: FirstPlan, score: str | None, size: LogSize, lists: int
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The texts of pipeline.yaml and, if there are enough lists, study.yaml; and a sentence on each.

    `size` is the size of all periods, and `lists` is their number of lists with different labels.
    """
    pipeline, takes = pipeline_text(out, plan, score, size)
    note = f"pipeline.yaml: {takes}"
    if (study := study_size(size, lists, plan)) is None:
        return {"pipeline": pipeline}, (
            note,
            f"no study.yaml: {lists:,} queries whose labels differ are too few to draw",
        )
    text, sees = study_text(out, plan, size, study)
    config = shlex.quote(storage.join(out, "study.yaml"))
    command = f"{called('study')} --config {config} --workers {_WORKERS}"
    takes = f"{command} takes at most about {study.minutes:.0f} minutes on two cores"
    return {"pipeline": pipeline, "study": text}, (note, f"study.yaml: {sees} {takes}")


def study_size(size: LogSize, lists: int, plan: FirstPlan) -> StudySize | None:
    """The numbers of labelled lists and draws of a study that takes an hour; None if there are too few lists.

    The arguments are as for `first_runs`.
    """
    train, validation, test = (len(names) / len(plan.names) for names in divided(plan.names))
    numbers = tuple(n for n in _LABELLED if n <= train * lists / 2)
    if not numbers or test * lists < 2:
        return None
    length, scored = size.told_apart / lists, min(_VALIDATION, validation * lists) * size.told_apart / lists
    each = 0.0  # minutes for a draw: the trials of trees, and two networks with all epochs
    for documents in (round(n * length) for n in numbers):
        epoch = epoch_minutes(documents, FINETUNED[256], size.features) + scored / SCORED / 60
        trees = _TRIALS * documents * size.features * STUDIED["trees"] / BOOSTED / 60
        each += (trees + 2 * STUDIED["finetuning"] * epoch + (_TRIALS + 2) * _START_S / 60) / _WORKERS
    pretraining = first_sizes(size.part(train)).minutes["pretraining"]
    own = FEWEST_DRAWS * (each + pretraining) <= _MINUTES
    per_draw, once = (each + pretraining, 0.0) if own else (each, _CROSSED * pretraining)
    draws = min(_MOST, max(FEWEST_DRAWS, int((_MINUTES - once) / per_draw)))
    drawn = StudySize(numbers, draws, round(validation * lists), round(test * lists), once + draws * per_draw)
    return drawn if own else drawn._replace(pretrainings=_CROSSED)


def study_text(out: str, plan: FirstPlan, size: LogSize, study: StudySize) -> tuple[str, str]:
    """A study of the first pipeline's methods, with the epochs that few labels need; and what it can detect."""
    train, validation, test = divided(plan.names)
    sizes = first_sizes(size.part(len(train) / len(plan.names)))
    few = sizes._replace(
        trees=STUDIED["trees"],
        docs_per_batch=256,
        epochs=STUDIED["finetuning"],
        minutes={**sizes.full, "pretraining": sizes.minutes["pretraining"]},
    )
    sensitivity = seen_before(study)
    first, rest = methods_text(few).split("  scratch:", 1)
    text = _STUDY.format(
        said="\n".join(textwrap.wrap(sensitivity, 118, initial_indent="# ", subsequent_indent="# ")),
        minutes=f"{study.minutes:.0f}",
        over_draws=f"{OVER_DRAWS:g}",
        over_lists=f"{OVER_LISTS:g}",
        test_lists=f"{study.test_lists:,}",
        out=plain_yaml(storage.join(out, "study")),
        data=plain_yaml(storage.join(out, "data")),
        unit=plan.unit,
        train=period_range(train),
        validation=period_range(validation),
        sample=f", relevant_groups: {_VALIDATION}" if study.validation_lists > 2 * _VALIDATION else "",
        test=period_range(test),
        numbers=list(study.numbers),
        draws=study.draws,
        crossed=f", pretrainings: {study.pretrainings}" if study.pretrainings else "",
        methods=f"{first}{_TUNED.format(trials=_TRIALS)}  scratch:{rest}",
    )
    return text, sensitivity


def seen_before(study: StudySize) -> str:
    """The smallest differences that a study would detect, and what it takes to detect .010.

    Example:
        >>> seen_before(StudySize((100, 1000), draws=5, validation_lists=900, test_lists=10_000, minutes=20.0))
        '5 draws see .024 at 100 labelled lists, .008 at 1,000; .010 takes 21 draws of 100, or 5 of 584.'
    """
    spreads = {n: study.spread(n) for n in study.numbers}
    differences = ", ".join(
        f"{_short(spread.detectable(study.draws))} at {n:,}{' labelled lists' if n == study.numbers[0] else ''}"
        for n, spread in spreads.items()
    )
    return f"{study.draws} draws see {differences}; {_short(_LOOKED_FOR)} takes {_takes(study, spreads)}."


def _takes(study: StudySize, spreads: Mapping[int, Spread]) -> str:
    """The draws or labels needed to detect `_LOOKED_FOR`, or the test lists if neither is enough."""
    fewest, spread = next(iter(spreads.items()))
    draws, times = spread.draws_for(_LOOKED_FOR), spread.times_for(_LOOKED_FOR, study.draws, more="labels")
    ways = [] if draws is None else [f"{draws:,} draws of {fewest:,}"]
    ways += [] if times is None else [f"{study.draws} of {math.ceil(times * fewest):,}"]
    if ways:
        return ", or ".join(ways)
    floor = Spread(0.0, spread.groups, spread.n_groups).detectable(MOST_DRAWS)
    enough = math.ceil(spread.n_groups * (floor / _LOOKED_FOR) ** 2)
    return f"more than {enough:,} test lists, whatever the draws and labels: there are {study.test_lists:,}"


def _short(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


_TUNED = """\
  trees_tuned: # a search for each number of labels and each draw, on validation: trees at their best
    kind: tuned
    of: trees
    trials: {trials}
    space:
      gbdt.num_leaves: {{low: 2, high: 64, log: true, integer: true}} # few labels want few leaves
      gbdt.learning_rate: {{low: 0.02, high: 0.3, log: true}}
      gbdt.min_data_in_leaf: {{low: 2, high: 100, log: true, integer: true}}
"""

_STUDY = """\
# Made by jobs.init: from how many labelled lists on does which method pay? See docs/study.md of ltrscale. At most about
# {minutes} minutes on two cores; whatever ends it, the same command resumes.
# What it will see of NDCG@5 (two-sided 5%, power 80%), tested on about {test_lists} lists whose labels differ:
{said}
# That is so if differences deviate as on other logs, {over_draws} over the root of the labelled lists between draws of
# labels (docs/results/study-news.md) and {over_lists} between test lists; the report has the figures of this log.
out: {out}
data: {data} # jobs.prepare makes it

splits: # by {unit}, as in pipeline.yaml
  train: {{periods: {train}}}
  validation: {{periods: {validation}{sample}}}
  test: {{periods: {test}}}

grid: # of lists with a relevant document; more draws narrow the intervals, more labels bring the draws together
  - {{labelled: {numbers}, draws: {draws}{crossed}, methods: [trees_tuned, scratch, pretrained]}}

{methods}
control: scratch # the same network without pretraining: the difference is pretraining's own share
evaluate:
  baseline: trees_tuned
"""


def weekly_text(out: str, unit: str, moving: Sequence[str] = ()) -> str:
    """The weekly.yaml for new periods of a unit such as `week`.

    Args:
        out: the directory of the configs.
        unit: the unit of periods.
        moving: features that differ from training, such as those of later files.
    """
    places = {
        "out": "weekly",
        "pipeline": "pipeline.yaml",
        "production": f"models/seed-0/{_METHOD}/model",
    }
    paths = {key: plain_yaml(storage.join(out, place)) for key, place in places.items()}
    config = escaped(shlex.quote(storage.join(out, "weekly.yaml")))
    return _WEEKLY.format(
        method=_METHOD, unit=unit, weekly=called("weekly"), config=config, moving=flow([*moving]), **paths
    )


_WEEKLY = """\
# Made by jobs.init: what is done with the rows of each new {unit}, by one command after jobs.pipeline has run once:
#   {weekly} --config {config} --inputs NEW_ROWS
# With --dry-run it says what it would do. Status 3: refused, and the old model stays. docs/weeks.md of ltrscale.
out: {out} # service.json there names the model in service
pipeline: {pipeline} # the data set that grows, and the settings of the method
method: {method} # the cheapest to train each {unit}; or another one of the pipeline
production: {production} # in service before the first {unit}: the pipeline's model
max_rejected: null # share of bad rows above which nothing is done; null: as in prepare.yaml

splits: # counted from the new {unit}
  train: {{periods: all but last 2}} # last 26 but 2: forgets what is older
  validation: {{periods: last 1 but 1}}
  test: {{periods: last 1}} # judges both models, which may not have seen it; last 2 has more groups, and is less fresh

bounds:
  refuse: worse # a model that is shown to be worse; unproven: one that is not shown to be as good, which takes groups
  margin: 0.005
  feature_psi: 5 # a feature that differs more from training is taken for a fault, such as prices in cents
  moving: {moving} # features that may differ, such as the weekday, or one that only later files have
  expected: [] # features that rank nearly alone, and are known when the list is shown; others of that kind are refused

refit: false # true: what goes into service learns from the newest {unit}s too, after the gate has said yes
export: null # lightgbm, xgboost, elasticsearch, opensearch, vespa or treelite, as for jobs.export
registry: null # {{name: shop, store: "sqlite:///mlflow.db"}} registers it in MLflow
"""
