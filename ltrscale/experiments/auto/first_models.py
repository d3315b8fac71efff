"""The settings with which the first model of each method fits into given minutes, from sizes and speed alone.

Rates are those measured for `jobs.init` (`FINETUNED`, `PRETRAINED`, `BOOSTED`), times the machine's speed, which the
first models show.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ltrscale.experiments.first.configs import first_methods
from ltrscale.experiments.sizes import (
    BOOSTED,
    FINETUNED,
    PRETRAINED,
    SCORED,
    SMALL,
    STUDIED,
    FirstSizes,
    LogSize,
    epoch_minutes,
    first_sizes,
)
from ltrscale.training.untrained import InContextConfig

TREES, TUNED, LINEAR, IN_CONTEXT = "trees", "trees_tuned", "linear", "in_context"
SCRATCH, TABM, PRETRAINED_NETWORK, STUDENT = "scratch", "tabm", "pretrained", "student"
MOST_EPOCHS, MOST_TRIALS = 64, 100
"""Limits of pretraining and search: more did not help in docs/results/study-news.md."""
_FEWEST_TRIALS = 3
_PAYS_FROM = 2.0
"""Networks are pretrained from this many documents per labelled document: fewer add little to the labels."""
_START_MINUTES, _RAY_START_MINUTES = 0.03, 0.3
"""Minutes to start a training, in this process and on Ray workers, some twenty processes (2026-11-26)."""
_READ_LISTS, _READ = 300, 1.2e6
"""Labelled lists above which training beats an in-context ranker, and the feature values, over all samples, that such a
ranker scores per second on one core (2026-11-26)."""
OVERRUN = 1.5
"""A training or search that takes this many times its share ends with what is best by then."""
TEACHERS = 3
"""Number of networks that teach a student by their mean."""
_TAUGHT_LISTS, _TAUGHT_DOCUMENTS = 20_000, 500_000
"""Maximum lists that a student learns, as in the news study, and the documents assumed for them."""
_STUDENT_EPOCHS, _STUDENT_READS = (8, 40), 4_000_000
"""Range of a student's epochs, from the news study to the small sets, and the documents that it reads in all."""
_SPACE = {
    "gbdt.objective": {"choices": ["lambdarank", "rank_xendcg"]},
    "gbdt.num_leaves": {"low": 2, "high": 64, "log": True, "integer": True},
    "gbdt.learning_rate": {"low": 0.02, "high": 0.3, "log": True},
    "gbdt.min_data_in_leaf": {"low": 2, "high": 100, "log": True, "integer": True},
    "gbdt.feature_fraction": {"low": 0.2, "high": 1},
    "gbdt.bagging_fraction": {"low": 0.3, "high": 1},
    "gbdt.lambda_l2": {"low": 0.001, "high": 100, "log": True},
}
"""The search space of the news study."""


class AutoSizes(NamedTuple):
    """The sizes that determine how long a method takes."""

    log: LogSize
    """Size of the training periods."""
    lists: int
    """Labelled training lists with a relevant document."""
    judged: int
    """Documents of the validation groups that models are judged on."""
    tested: int
    """Documents of the test groups."""
    numbers: int
    """Numeric features."""
    longest: int
    """Documents of the longest group of all splits; each stream must hold it."""
    cores: int
    """CPU cores for trees."""
    workers: int
    """Workers for networks, each with its own stream."""
    bfloat16: bool = False
    """Whether pretraining computes products in bfloat16."""

    @property
    def start_minutes(self) -> float:
        """Minutes to start the training of a network."""
        return _START_MINUTES if self.workers == 1 else _RAY_START_MINUTES


class Speed(NamedTuple):
    """Speed of this machine, relative to the one of the measured rates."""

    trees: float = 1.0
    networks: float = 1.0
    scored: float = SCORED
    """Documents that a network scores a second, with reading."""


class Planned(NamedTuple):
    """A method with its settings and its minutes, or why it is left out."""

    settings: Mapping[str, Any] | None
    minutes: float
    says: str
    too_long: bool = False
    """Whether it is left out because it takes too long."""


class Given(NamedTuple):
    """The minutes for the first model of a method, and what decides how much fits into them."""

    sizes: AutoSizes
    minutes: float
    speed: Speed = Speed()
    minutes_left: float = math.inf
    """Minutes left to all methods."""
    cutoff: int = 5
    """Cut-off of the NDCG that chooses trees and epochs."""
    teacher: str = SCRATCH
    """The network that a student learns from."""

    @property
    def end_minutes(self) -> float:
        """Minutes after which a late model ends with what is best by then: 1.5 times its own, or in time for all."""
        return max(_START_MINUTES, min(OVERRUN * self.minutes, self.minutes_left / OVERRUN))

    @property
    def first(self) -> FirstSizes:
        """The sizes of `jobs.init`'s pipeline for this log."""
        return first_sizes(self.sizes.log, cores=self.sizes.cores, networks=1)

    def methods(self, trees: int | None = None) -> dict[str, dict[str, Any]]:
        """The methods of `jobs.init`'s pipeline, with one stream per worker, and another number of trees if given."""
        sizes = self.first if trees is None else self.first._replace(trees=trees)
        methods = first_methods(sizes)
        methods[TREES]["gbdt"]["stop_on"] = self.cutoff
        scratch, pretrained = methods[SCRATCH], methods[PRETRAINED_NETWORK]
        for finetune in (scratch["finetune"], pretrained["finetune"]):
            finetune["validation_metric"] = f"ndcg@{self.cutoff}"
        for phase in (scratch["finetune"], pretrained["finetune"], pretrained["pretrain"]):
            phase["stream"] = _dealt(phase["stream"], self.sizes)
        return methods

    @property
    def minutes_per_tree(self) -> float:
        """Minutes of a tree."""
        log = self.sizes.log
        return log.informative * log.features / (BOOSTED * self.sizes.cores * self.speed.trees) / 60

    @property
    def minutes_per_epoch(self) -> float:
        """Minutes of an epoch of finetuning, with its validation."""
        log, rate = self.sizes.log, FINETUNED[self.first.docs_per_batch] * self.speed.networks
        return epoch_minutes(log.informative, rate, log.features) + self.sizes.judged / self.speed.scored / 60


def _too_long(says: str) -> Planned:
    return Planned(None, 0.0, says, too_long=True)


def _trees(given: Given) -> Planned:
    """Trees with samples of rows and features, so that other seeds give other models."""
    number = min(STUDIED["trees"], max(50, int((given.minutes - _START_MINUTES) / (given.minutes_per_tree or 1e-9))))
    trees = given.methods(trees=number)[TREES]
    trees["gbdt"] |= {"feature_fraction": 0.5, "bagging_fraction": 0.8, "minutes": given.end_minutes}
    return Planned(trees, number * given.minutes_per_tree + _START_MINUTES, f"{number} trees")


def _tuned(given: Given) -> Planned:
    """Trees with the settings that a search finds."""
    trial = STUDIED["trees"] * given.minutes_per_tree + _START_MINUTES
    trials = min(MOST_TRIALS, int(given.minutes / trial))
    if trials < _FEWEST_TRIALS:
        return _too_long(f"a trial takes {trial:.1f} minutes: too few for a search")
    settings = {"kind": "tuned", "of": TREES, "trials": trials, "minutes": given.end_minutes, "space": _SPACE}
    return Planned(settings, trials * trial, f"{trials} trials")


def _pretrained(given: Given) -> Planned:
    """A network with the epochs of pretraining that fit beside finetuning."""
    log, start, settings = given.sizes.log, given.sizes.start_minutes, given.methods()[PRETRAINED_NETWORK]
    if log.documents < _PAYS_FROM * log.informative:
        known = log.informative / max(log.documents, 1)
        return Planned(None, 0.0, f"labels tell {known:.0%} of the documents apart: pretraining has little to add")
    finetuned = _network(given._replace(minutes=given.minutes / 3, minutes_left=given.minutes_left / 3), settings)
    if finetuned.settings is None:
        return finetuned
    rate = PRETRAINED[given.first.pretraining_docs_per_batch] * given.speed.networks
    pretraining = epoch_minutes(log.documents, rate, log.features)
    epochs = min(MOST_EPOCHS, int((given.minutes - finetuned.minutes - start) / pretraining))
    if epochs < 1:
        return _too_long(f"an epoch of pretraining takes {pretraining:.1f} minutes, which the budget has not")
    pretrain = {**settings["pretrain"], "epochs": epochs, "minutes": given.end_minutes * 2 / 3}
    if given.sizes.bfloat16:
        pretrain["precision"] = "bf16"
    pretrained = {**finetuned.settings, "pretrain": pretrain}
    minutes = epochs * pretraining + finetuned.minutes + start
    plural = "" if epochs == 1 else "s"
    return Planned(pretrained, minutes, f"{epochs} epoch{plural} of pretraining, {minutes:.1f} minutes")


def _in_context(given: Given) -> Planned:
    """An in-context ranker, for few labels (docs/results/in-context.md); its time is that of scoring."""
    sizes = given.sizes
    if sizes.numbers == 0:
        return Planned(None, 0.0, "no feature is a number")
    if sizes.lists > _READ_LISTS:
        return Planned(None, 0.0, f"of more than {_READ_LISTS} lists training learns more")
    values = (2 * sizes.judged + sizes.tested) * sizes.log.features * InContextConfig().reading.samples
    minutes = _START_MINUTES + values / (_READ * given.speed.networks) / 60
    if minutes > given.minutes:
        return _too_long(f"its scoring takes {minutes:.1f} minutes, which the budget has not")
    return Planned({"kind": "in_context"}, minutes, f"{sizes.lists} lists to read")


def _student(given: Given) -> Planned:
    """The student of several trained networks, finetuned with their settings."""
    sizes, documents = given.sizes, min(given.sizes.log.documents, _TAUGHT_DOCUMENTS)
    few, many = _STUDENT_EPOCHS
    epochs, batch = min(many, max(few, _STUDENT_READS // max(documents, 1))), 1000 if documents < SMALL else 4096
    taught = epochs * epoch_minutes(documents, FINETUNED[1024] * given.speed.networks, sizes.log.features)
    minutes = (
        taught
        + STUDIED["finetuning"] * given.minutes_per_epoch
        + TEACHERS * documents / given.speed.scored / 60
        + 2 * sizes.start_minutes
    )
    if minutes > given.minutes:
        return _too_long(f"a student takes {minutes:.1f} minutes, which the budget has not")
    groups = _TAUGHT_LISTS if sizes.log.documents > documents else None
    stream = _dealt({"docs_per_batch": batch}, sizes)
    student = {"epochs": epochs, "patience": epochs // 3, "minutes": given.end_minutes, "stream": stream}
    settings = {"kind": "self_trained", "of": given.teacher, "runs": TEACHERS, "groups": groups, "student": student}
    return Planned(settings, minutes, f"of {TEACHERS} networks {given.teacher}")


def _dealt(stream: Mapping[str, Any], sizes: AutoSizes) -> dict[str, Any]:
    """Settings for one stream per worker; the streams share the documents of a batch."""
    least = sizes.workers * sizes.longest if sizes.workers > 1 else 0
    return {**stream, "docs_per_batch": max(stream["docs_per_batch"], least), "streams": sizes.workers}


def _linear(given: Given) -> Planned:
    """A linear ranker, trained like the network but in larger steps; good with few labels (docs/auto.md)."""
    finetune = given.methods()[SCRATCH]["finetune"]
    network = {**finetune["network"], "encoder": {"kind": "identity"}}
    fast = {**finetune["optimizer"], "learning_rate": 1e-2}
    return _network(given, {"kind": "neural", "finetune": {**finetune, "network": network, "optimizer": fast}})


def _tabm(given: Given) -> Planned:
    """TabM on piecewise-linear numbers (docs/results/encoders.md); no noise, as it would move values between bins."""
    finetune = given.methods()[SCRATCH]["finetune"]
    encoder = {"kind": "tabm", "members": 8, "hidden": [128] * 3}
    network = {**finetune["network"], "encoder": encoder, "numbers": {"kind": "ple", "bins": 16}}
    optimizer = {**finetune["optimizer"], "learning_rate": 1e-3}
    finetune = {**finetune, "network": network, "noise": 0.0, "optimizer": optimizer}
    return _network(given, {"kind": "neural", "finetune": finetune}, slower=time_factor(TABM, given.sizes.log.features))


def time_factor(name: str, features: int) -> float:
    """Time of a method relative to the network's; TabM's grows with the features (2026-11-28, scoring on a CPU)."""
    return 4.6 + features / 15 if name == TABM else 1.0


def _network(given: Given, settings: Mapping[str, Any], *, slower: float = 1.0) -> Planned:
    """A network with the epochs of finetuning that fit into its share of the budget."""
    epoch, start = slower * given.minutes_per_epoch, given.sizes.start_minutes
    epochs = min(STUDIED["finetuning"], int((given.minutes - start) / epoch))
    if epochs < 2:
        takes = start + 2 * epoch
        return _too_long(f"two epochs take {takes:.1f} minutes with their start, which the budget has not")
    finetune = {**settings["finetune"], "epochs": epochs, "patience": max(2, epochs // 4), "minutes": given.end_minutes}
    return Planned({**settings, "finetune": finetune}, epochs * epoch + start, f"{epochs} epochs")


class _Known(NamedTuple):
    """What is known of a method."""

    plan: Callable[[Given], Planned]
    share: float
    """Maximum share of the budget for its first model; the rest is for further models, blend, test and refit."""
    again: bool = False
    """Whether it has further models of other seeds."""


KNOWN_METHODS = {
    TREES: _Known(_trees, 0.1),
    TUNED: _Known(_tuned, 0.2, again=True),
    LINEAR: _Known(_linear, 0.04),
    IN_CONTEXT: _Known(_in_context, 0.06),
    SCRATCH: _Known(lambda given: _network(given, given.methods()[SCRATCH]), 0.08, again=True),
    TABM: _Known(_tabm, 0.12, again=True),
    PRETRAINED_NETWORK: _Known(_pretrained, 0.25, again=True),
    STUDENT: _Known(_student, 0.12),
}
"""The methods, in the order of their first models; a student has its turn later."""
