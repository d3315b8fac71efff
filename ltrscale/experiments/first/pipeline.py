"""The first pipeline of a log: a runnable pipeline.yaml, with comments that explain its choices.

Its settings keep the run short on a few cores: minutes follow from the measured rates `FINETUNED`, `PRETRAINED` and
`BOOSTED`.
"""

import math
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import yaml

from ltrscale import storage
from ltrscale.data.times import PeriodUnit
from ltrscale.experiments.first.quoting import flow, plain_yaml

FINETUNED = {256: 24_000, 1024: 47_000}
"""Documents per second of one core in finetuning the network of `first_pipeline`, by `docs_per_batch`; 4,096 is no
faster than 1,024. Processor time on the log of tests/shop.py, 552,000 documents with 13 columns, 2026-11-24."""
PRETRAINED = {1024: 9_000, 4096: 14_000}
"""The same rates for pretraining that network, in float32."""
BOOSTED = 190e6
"""Values per second of one core in LightGBM's lambdarank with 31 leaves: trees times documents times features. Random
numbers, 13 to 100 features, processor time, 2026-11-24."""
SCORED = 200_000
"""Documents that a model scores per second on one core."""
_INNER, _MEASURED_AT = 6 * 128, 13
"""Inputs of the layers after the first, and features in the measurement; work is proportional to their sum."""

SMALL = 100_000
"""Documents below which networks use small batches, because they need the steps."""
STUDIED = {"trees": 400, "pretraining": 16, "finetuning": 60}
"""Maximum trees and epochs of a pipeline; the epochs are those of docs/results/study-news.md."""
_SHARES = {"trees": 1.0, "pretraining": 5.0, "finetuning": 5.0}
"""Maximum minutes of the stages of a first pipeline: 11 of 15 on two cores, the rest is for evaluation and slower
cores."""
_OTHER = 1.0
_AT_LEAST = {"trees": 200, "pretraining": 1, "finetuning": 4}


class LogSize(NamedTuple):
    """The size of a log's training periods."""

    documents: int
    """Rows; pretraining reads all."""
    told_apart: int
    """Rows of lists with different labels, the only ones that trees and networks learn from."""
    features: int

    def part(self, share: float) -> "LogSize":
        """The size of a share of the periods."""
        return LogSize(round(share * self.documents), round(share * self.told_apart), self.features)


class FirstSizes(NamedTuple):
    """Settings of a first pipeline, and the minutes of its stages."""

    trees: int
    docs_per_batch: int
    epochs: int
    pretraining_docs_per_batch: int
    pretraining_epochs: int
    minutes: dict[str, float]
    """Maximum for `trees`, `pretraining`, and `finetuning` of all networks; patience may save some."""
    full: dict[str, float]
    """The same with the trees and epochs of the news study."""
    share: float
    """The share of the training documents that fits the time; at most 1."""

    def is_full(self, stage: str) -> bool:
        """Whether a stage has as many trees or epochs as the news study."""
        return self.minutes[stage] == self.full[stage]

    @property
    def patience(self) -> int:
        """Epochs without a better validation metric after which a network stops: a quarter of all."""
        return math.ceil(self.epochs / 4)

    @property
    def total(self) -> float:
        """Minutes of the whole pipeline."""
        return sum(self.minutes.values()) + _OTHER

    @property
    def in_full(self) -> float:
        """Minutes of the whole pipeline with the trees and epochs of the news study."""
        return sum(self.full.values()) + _OTHER


def first_sizes(size: LogSize, *, cores: int = 2, models: float = 2) -> FirstSizes:
    """The settings that keep a first pipeline short, at most those of the news study.

    Trees use all cores. Networks are assumed to use one, because small batches have little work for more.

    Args:
        size: size of the training data.
        cores: cores of the machine.
        models: networks to finetune; half as many models of trees are grown.

    Example:
        >>> sizes = first_sizes(LogSize(documents=550_000, told_apart=195_000, features=13))
        >>> sizes.docs_per_batch, sizes.epochs, sizes.pretraining_docs_per_batch, sizes.pretraining_epochs
        (1024, 36, 4096, 7)
        >>> round(sizes.total), round(sizes.in_full), sizes.share
        (11, 20, 1.0)
    """
    batch = 256 if size.told_apart < SMALL else 1024
    large = 1024 if size.documents < SMALL else 4096
    each = {  # minutes of one tree or one epoch of all models
        "trees": models / 2 * size.told_apart * size.features / (BOOSTED * cores) / 60,
        "pretraining": epoch_minutes(size.documents, PRETRAINED[large], size.features),
        "finetuning": models * epoch_minutes(size.told_apart, FINETUNED[batch], size.features),
    }
    n = {
        stage: min(STUDIED[stage], max(_AT_LEAST[stage], int(_SHARES[stage] / (one or 1e-9))))
        for stage, one in each.items()
    }
    minutes = {stage: n[stage] * one for stage, one in each.items()}
    full = {stage: STUDIED[stage] * one for stage, one in each.items()}
    over = max(1.0, *(minutes[stage] / _SHARES[stage] for stage in minutes))
    return FirstSizes(n["trees"], batch, n["finetuning"], large, n["pretraining"], minutes, full, 1 / over)


def epoch_minutes(documents: int, rate: float, features: int) -> float:
    """Minutes of an epoch on one core; work per document is proportional to the inputs of all layers."""
    return documents / rate * (_INNER + features) / (_INNER + _MEASURED_AT) / 60


_ENGINE_SCORES = (
    re.compile(r"(?i)(.*[^a-z0-9])?bm25([^a-z0-9].*)?"),
    re.compile(r"(?i)_?((es|elasticsearch|opensearch|solr|lucene|vespa|engine|search|retrieval|text)_)?score"),
)
"""Names of features that are a search engine's own score, the most certain first."""


class FirstPlan(NamedTuple):
    """The unit of periods, the periods with labels, and the format of times."""

    unit: PeriodUnit
    names: tuple[str, ...]
    formats: tuple[str, ...]


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


def pipeline_text(out: str, plan: FirstPlan, score: str | None, size: LogSize) -> tuple[str, str]:
    """The first pipeline.yaml, and a sentence on its time; the last periods test, the ones before validate.

    Args:
        out: directory of the configs.
        plan: the periods.
        score: the feature that is a search engine's score, if there is one.
        size: size of all periods; it decides the settings, and in very large logs the number of training periods.
    """
    train, validation, test = divided(plan.names)
    models, all_periods = (2 if score is None else 6), train  # a stack also trains its members for each of five folds
    sizes = first_sizes(size.part(len(train) / len(plan.names)), models=models)
    if sizes.share < 1:
        train = train[-max(1, int(sizes.share * len(train))) :]
        sizes = first_sizes(size.part(len(train) / len(plan.names)), models=models)
    left_out = "" if train == all_periods else f" # of {period_range(all_periods)}, so that it ends in time"
    duration = time_said(sizes)
    text = _PIPELINE.format(
        said="\n".join(textwrap.wrap(duration, 118, initial_indent="# ", subsequent_indent="# ")),
        out=plain_yaml(storage.join(out, "models")),
        data=plain_yaml(storage.join(out, "data")),
        clicks=plain_yaml(storage.join(out, "clicks")),
        train=period_range(train),
        left_out=left_out,
        validation=period_range(validation),
        test=period_range(test),
        unit=plan.unit,
        methods=methods_text(
            sizes, "" if score is None else _ENGINE.format(score=plain_yaml(score), trees=_trees(sizes, 8))
        ),
        baseline="trees" if score is None else "engine",
    )
    return text, duration


def divided(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The periods of training, validation and test: the last sixth tests, and the sixth before it validates.

    Example:
        >>> divided(["a", "b", "c", "d"])
        (('a', 'b'), ('c',), ('d',))
    """
    held_out = max(1, len(names) // 6)
    return tuple(names[: -2 * held_out]), tuple(names[-2 * held_out : -held_out]), tuple(names[-held_out:])


def time_said(sizes: FirstSizes) -> str:
    """The minutes of a first pipeline, and of one with the settings of the news study."""
    minutes = sizes.minutes
    parts = (
        f"trees {minutes['trees']:.1f}, pretraining {minutes['pretraining']:.1f}, networks {minutes['finetuning']:.1f}"
    )
    duration = f"About {sizes.total:.0f} minute{'s' if round(sizes.total) > 1 else ''} on two cores ({parts})."
    if all(map(sizes.is_full, STUDIED)):
        return f"{duration} Nothing is cut short: the epochs are those of the study."
    trees, pretraining, epochs = STUDIED.values()
    return (
        f"{duration} With {trees} trees and the study's {epochs} epochs and {pretraining} of pretraining it takes "
        f"about {sizes.in_full:.0f}; what that brings here is not known, and in the study four times the pretraining "
        "gave +.0023 NDCG@5 at 1,000 labelled lists and nothing at 100."
    )


def methods_text(sizes: FirstSizes, others: str = "") -> str:
    """Trees, a network, and the same network pretrained, with comments on their sizes."""
    faster, slower = FINETUNED[1024] / FINETUNED[256], PRETRAINED[4096] / PRETRAINED[1024]
    batch = f"many small steps; 1024 for {SMALL:,} documents to learn from, {faster:.0f} times as fast"
    if sizes.docs_per_batch > 256:
        batch = f"{faster:.0f} times as fast as 256, which is for less than {SMALL:,} documents to learn from"
    large = f"it needs the steps; 4096 for {SMALL:,} documents or more, {slower:.1f} times as fast"
    if sizes.pretraining_docs_per_batch > 1024:
        large = f"1024 for a log of less than {SMALL:,} documents, which needs the steps"
    longer = {stage: f"the study had {n}, here {sizes.full[stage]:.0f} minutes" for stage, n in STUDIED.items()}
    notes = {stage: "as in the study" if sizes.is_full(stage) else text for stage, text in longer.items()}
    return _METHODS.format(
        others=others,
        trees=_trees(sizes, 31),
        epochs=sizes.epochs,
        epochs_why=notes["finetuning"],
        patience=sizes.patience,
        batch=sizes.docs_per_batch,
        batch_why=batch,
        pretraining=sizes.pretraining_epochs,
        longer=notes["pretraining"],
        large=sizes.pretraining_docs_per_batch,
        large_why=large,
    )


def _trees(sizes: FirstSizes, leaves: int) -> str:
    """Number, learning rate and leaves of trees; fewer trees have a higher rate."""
    return f"num_trees: {sizes.trees}, learning_rate: {0.05 * STUDIED['trees'] / sizes.trees:g}, num_leaves: {leaves}"


def period_range(names: Sequence[str]) -> str:
    """Periods as a range for `splits`, or a single one; quoted if YAML would read a date."""
    text = "..".join(dict.fromkeys([names[0], names[-1]]))
    return text if yaml.safe_load(text) == text else flow(text)


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
{said}
out: {out}
data: {data} # jobs.prepare makes it

splits: # by {unit}: a ranker in production never sees the future
  train: {{periods: {train}}}{left_out}
  validation: {{periods: {validation}}}
  test: {{periods: {test}}}
  gap: 0 # periods to leave out before validation, if labels take time to settle

seeds: [0] # five or more tell a difference from luck
pretrain_once: true # for all seeds: it reads no labels

{methods}
evaluate:
  baseline: {baseline}
  # propensities: {{clicks: {clicks}}} # where jobs.clicks could tell them: metrics corrected for positions, too

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
      epochs: {epochs} # at most; {epochs_why}
      patience: {patience} # epochs without a better validation NDCG@5
      noise: 0.3 # on the inputs in training, in standard deviations
      stream: {{docs_per_batch: {batch}}} # {batch_why}
      optimizer: {{kind: adam, learning_rate: 3.0e-4}}
{others}  pretrained:
    kind: neural
    pretrain:
      method: {{kind: simclr_rank, temperature: 0.1}} # finds a document's other view among all views of its list
      augment: {{kind: swap_in_group, probability: 0.6}} # 60% of a view's values are of other documents of the list
      network: *network
      epochs: {pretraining} # passes over all lists; {longer}
      stream: {{docs_per_batch: {large}}} # {large_why}
      optimizer: {{kind: adam, learning_rate: 1.0e-3}}
      # precision: bf16 # twice as fast on GPUs and CPUs that compute in bfloat16, far slower on other CPUs
    finetune: # the encoder learns at a tenth of the rate, so that few labels undo little of what it knows
      <<: *finetune
      rates: {{encoder: 0.1}}
      optimizer: {{kind: adam, learning_rate: 1.0e-3}}
"""
