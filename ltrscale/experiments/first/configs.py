"""The first configs of commands that train, with comments: pipeline.yaml, study.yaml and weekly.yaml."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml

from ltrscale import storage
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.experiments.sizes import FINETUNED, PRETRAINED, SMALL, STUDIED, FirstSizes, LogSize, first_sizes
from ltrscale.ingest.mapping import PeriodKind
from ltrscale.progress import called
from ltrscale.texts import escaped, flow, plain_yaml

_LABELLED, _VALIDATION = (100, 300, 1000, 3000), 1500
"""Numbers of labelled lists of a first study, and the validation lists that it reads at most."""

_ENGINE_SCORES = (
    re.compile(r"(?i)(.*[^a-z0-9])?bm25([^a-z0-9].*)?"),
    re.compile(r"(?i)_?((es|elasticsearch|opensearch|solr|lucene|vespa|engine|search|retrieval|text)_)?score"),
)
"""Names of features that are a search engine's own score, the most certain first."""


def engine_score(features: Sequence[str]) -> str | None:
    """The feature that is a search engine's score of a document's whole text; None if no feature has such a name.

    Example:
        >>> engine_score(["price", "bm25_title", "bm25", "score"])
        'bm25'
    """
    for pattern in _ENGINE_SCORES:
        if names := [name for name in features if pattern.fullmatch(name)]:
            return min(names, key=len)  # a score of one field also has the field's name
    return None


@dataclass(frozen=True)
class FirstRuns:
    """What the first trainings of a log depend on; the last periods test, the ones before validate."""

    out: str
    """Directory of the configs."""
    unit: PeriodKind
    periods: Sequence[str]
    size: LogSize
    """Of all periods with labels."""
    score: str | None = None
    """The feature that is a search engine's score, if any."""
    lists: int = 0
    """Lists whose labels differ."""
    moving: Sequence[str] = ()
    """Features that differ from training, such as those of later files."""

    def written(self) -> tuple[dict[str, str], list[str]]:
        """The texts of pipeline.yaml, weekly.yaml and, if there are enough lists, study.yaml; and notes on them."""
        texts = {"pipeline": self._pipeline()}
        if self.unit != "part":  # nothing comes after the last part
            texts["weekly"] = weekly_text(self.out, self.unit, self.moving)
        notes = [f"pipeline.yaml: {self._takes}"]
        study = self._study()
        if study is None:
            return texts, [*notes, f"no study.yaml: {self.lists:,} queries whose labels differ are too few to draw"]
        command = f"{called('study')} --config {shlex.quote(storage.join(self.out, 'study.yaml'))}"
        note = f"study.yaml: from how many labels on does which method pay? {command}"
        return {**texts, "study": study}, [*notes, note]

    @cached_property
    def _sized(self) -> tuple[tuple[str, ...], FirstSizes]:
        """The training periods, only the newest where all would take too long, and settings for them."""
        train, _, _ = divided(self.periods)
        sizes = self._sizes_of(train)
        if sizes.share < 1:
            train = train[-max(1, int(sizes.share * len(train))) :]
            sizes = self._sizes_of(train)
        return train, sizes

    def _sizes_of(self, train: Sequence[str]) -> FirstSizes:
        # a stack also trains its members for each of five folds, on 80% of the lists, and trees of its own
        networks, boosted = (2, 1) if self.score is None else (6, 6)
        return first_sizes(self.size.part(len(train) / len(self.periods)), networks=networks, boosted=boosted)

    @property
    def _takes(self) -> str:
        """How long the pipeline takes, in a sentence."""
        _, sizes = self._sized
        stages = ", ".join(f"{stage} {minutes:.1f}" for stage, minutes in sizes.minutes.items())
        return f"About {sizes.total:.0f} minute{'s' if round(sizes.total) > 1 else ''} on two cores ({stages})."

    def _common(self) -> dict[str, str]:
        """The data and splits of both a pipeline and a study."""
        all_periods, validation, test = divided(self.periods)
        train, _ = self._sized
        at_random = "queries at random, as there are no times"
        return {
            "data": plain_yaml(storage.join(self.out, "data")),
            "unit": self.unit,
            "why": at_random if self.unit == "part" else "a ranker in production never sees the future",
            "train": period_range(train),
            "left_out": "" if train == all_periods else f" # of {period_range(all_periods)}, so that it ends in time",
            "validation": period_range(validation),
            "test": period_range(test),
        }

    def _pipeline(self) -> str:
        _, sizes = self._sized
        score = None if self.score is None else plain_yaml(self.score)
        return _PIPELINE.format(
            takes=self._takes,
            out=plain_yaml(storage.join(self.out, "models")),
            clicks=plain_yaml(storage.join(self.out, "clicks")),
            methods=methods_text(sizes, _ENGINE.format(score=score, trees=_trees(sizes, 8)) if score else ""),
            baseline="engine" if score else "trees",
            **self._common(),
        )

    def _study(self) -> str | None:
        """The text of study.yaml; None if there are too few lists to draw from, or to test on."""
        _, validation, test = divided(self.periods)
        train, sizes = self._sized
        labelled, validating, testing = (
            len(part) / len(self.periods) * self.lists for part in (train, validation, test)
        )
        numbers = [number for number in _LABELLED if number <= labelled / 2]
        if not numbers or testing < 2:
            return None
        few = sizes._replace(trees=STUDIED["trees"], docs_per_batch=256, epochs=STUDIED["finetuning"])
        return _STUDY.format(
            out=plain_yaml(storage.join(self.out, "study")),
            sample=f", relevant_groups: {_VALIDATION}" if validating > 2 * _VALIDATION else "",
            numbers=numbers,
            draws=FEWEST_DRAWS,
            methods=methods_text(few, _TUNED),
            **self._common(),
        )


def divided(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The periods of training, validation and test: the last sixth tests, and the sixth before it validates."""
    held_out = max(1, len(names) // 6)
    return tuple(names[: -2 * held_out]), tuple(names[-2 * held_out : -held_out]), tuple(names[-held_out:])


def methods_text(sizes: FirstSizes, others: str = "") -> str:
    """Trees, a network, and the same network pretrained, with comments on their sizes."""
    faster, larger = FINETUNED[1024] / FINETUNED[256], PRETRAINED[4096] / PRETRAINED[1024]
    notes = {
        "batches": f"256 for less than {SMALL:,} documents to learn from; 1024 is {faster:.0f} times as fast",
        "large": f"1024 for less than {SMALL:,} documents; 4096 is {larger:.1f} times as fast",
        "studied": STUDIED["finetuning"],
        "pretrained": STUDIED["pretraining"],
    }
    settings = {**sizes._asdict(), "trees": _trees(sizes, 31), "patience": sizes.patience}
    return _METHODS.format(others=others, **settings, **notes)


def first_methods(sizes: FirstSizes) -> dict[str, dict[str, Any]]:
    """The settings of each method of `methods_text`: jobs.auto begins with the very ones that jobs.init writes."""
    methods: dict[str, dict[str, Any]] = yaml.safe_load(methods_text(sizes))["methods"]
    return methods


def _trees(sizes: FirstSizes, leaves: int) -> str:
    """Number, learning rate and leaves of trees; fewer trees have a higher rate."""
    return f"num_trees: {sizes.trees}, learning_rate: {0.05 * STUDIED['trees'] / sizes.trees:g}, num_leaves: {leaves}"


def period_range(names: Sequence[str]) -> str:
    """Periods as a range for `splits`, or a single one; quoted if YAML would read a date."""
    text = "..".join(dict.fromkeys([names[0], names[-1]]))
    return text if yaml.safe_load(text) == text else flow(text)


def weekly_text(out: str, unit: str, moving: Sequence[str] = ()) -> str:
    """The weekly.yaml for new periods of a unit such as `week`."""
    places = {"out": "weekly", "pipeline": "pipeline.yaml", "production": "models/seed-0/trees/model"}
    paths = {key: plain_yaml(storage.join(out, place)) for key, place in places.items()}
    config = escaped(shlex.quote(storage.join(out, "weekly.yaml")))
    return _WEEKLY.format(unit=unit, weekly=called("weekly"), config=config, moving=flow([*moving]), **paths)


_ENGINE = """\
  engine: # the order of the search engine's score, which learns nothing: hard to beat by few labels, see docs/text.md
    kind: feature
    feature: {score}
  stack: # trees over that score and those of trees and scratch: the score of a document may only rise with each
    kind: stack
    members: [trees, scratch]
    stack:
      features: [{score}]
      gbdt: {{{trees}, monotone: {{{score}: 1, "score of *": 1}}}}
"""

_PIPELINE = """\
# Made by jobs.init: trees, a network, and the same network pretrained without labels, compared on the last periods. The
# networks' settings are the best of a study with 30 to 3,000 labelled lists: docs/results/study-news.md of ltrscale.
# {takes}
out: {out}
data: {data} # jobs.prepare makes it

splits: # by {unit}: {why}
  train: {{periods: {train}}}{left_out}
  validation: {{periods: {validation}}}
  test: {{periods: {test}}}
  gap: 0 # periods to leave out before validation, if labels take time to settle

seeds: [0] # five or more tell a difference from luck
pretrain_once: true # for all seeds: it reads no labels

{methods}
evaluate:
  baseline: {baseline}
  # propensities: {{clicks: {clicks}}} # where jobs.clicks has estimated them: metrics corrected for positions, too

# Final models, in {out}/final/NAME: trained once more, on the validation groups too, or with test: true on all.
# Remove the # once the report has shown which method to take.
# refit: {{methods: [trees], test: false}}
"""

_METHODS = """\
methods:
  trees: # a search over their settings makes them harder to beat: kind tuned, in docs/guide.md
    kind: gbdt
    gbdt: {{relevant_only: true, {trees}, early_stopping_rounds: 40}}
  scratch: # the difference between it and pretrained is what pretraining gives
    kind: neural
    finetune: &finetune
      loss: {{kind: softmax}}
      relevant_only: true # lists without a relevant document teach this loss nothing, as they teach lambdarank nothing
      network: &network
        transform: {{numeric: log1p_standard}} # sign(x) log(1 + |x|), then standardised: for prices and counts alike
        encoder: {{kind: resnet, width: 128, blocks: 3}}
      head: {{layers: 1}}
      head_epochs: 0
      epochs: {epochs} # at most; the study had {studied}
      patience: {patience} # epochs without a better validation NDCG@5
      noise: 0.3 # on the inputs in training, in standard deviations
      stream: {{docs_per_batch: {docs_per_batch}}} # {batches}
      optimizer: {{kind: adam, learning_rate: 3.0e-4}}
{others}  pretrained:
    kind: neural
    pretrain:
      method: {{kind: simclr_rank, temperature: 0.1}} # finds a document's other view among all views of its list
      augment: {{kind: swap_in_group, probability: 0.6}} # 60% of a view's values are of other documents of the list
      network: *network
      epochs: {pretraining_epochs} # passes over all lists; the study had {pretrained}
      stream: {{docs_per_batch: {pretraining_docs_per_batch}}} # {large}
      optimizer: {{kind: adam, learning_rate: 1.0e-3}}
      # precision: bf16 # twice as fast on GPUs and CPUs that compute in bfloat16, far slower on other CPUs
    finetune: # the encoder learns at a tenth of the rate, so that few labels undo little of what it knows
      <<: *finetune
      rates: {{encoder: 0.1}}
      optimizer: {{kind: adam, learning_rate: 1.0e-3}}
"""
_TUNED = """\
  trees_tuned: # a search for each number of labels and each draw, on validation: trees at their best
    kind: tuned
    of: trees
    trials: 10
    space:
      gbdt.num_leaves: {low: 2, high: 64, log: true, integer: true} # few labels want few leaves
      gbdt.learning_rate: {low: 0.02, high: 0.3, log: true}
      gbdt.min_data_in_leaf: {low: 2, high: 100, log: true, integer: true}
"""

_STUDY = """\
# Made by jobs.init: from how many labelled lists on does which method pay? See docs/study.md of ltrscale. Whatever ends
# it, the same command resumes; its report has the smallest differences that these draws and test lists let it see.
out: {out}
data: {data} # jobs.prepare makes it

splits: # by {unit}, as in pipeline.yaml
  train: {{periods: {train}}}{left_out}
  validation: {{periods: {validation}{sample}}}
  test: {{periods: {test}}}

grid: # of lists with a relevant document; more draws narrow the intervals, more labels bring the draws together
  - {{labelled: {numbers}, draws: {draws}, methods: [trees_tuned, scratch, pretrained]}}

{methods}
control: scratch # the same network without pretraining: the difference is pretraining's own share
evaluate:
  baseline: trees_tuned
"""

_WEEKLY = """\
# Made by jobs.init: what is done with the rows of each new {unit}, by one command after jobs.pipeline has run once:
#   {weekly} --config {config} --inputs NEW_ROWS
# With --dry-run it says what it would do. Status 3: refused, and the old model stays. docs/weeks.md of ltrscale.
out: {out} # service.json there names the model in service
pipeline: {pipeline} # the data set that grows, and the settings of the method
method: trees # the cheapest to train each {unit}; or another one of the pipeline
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
