"""How a budget of minutes is spent: methods with their settings, as a pure function of the sizes and the minutes.

Rates are those measured for `jobs.init` (`FINETUNED`, `PRETRAINED`, `BOOSTED`), times the machine's speed, which the
first models show. What fits into the remaining minutes is a pure function of the record so far.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import yaml

from ltrscale.experiments.auto.record import AutoRecord
from ltrscale.experiments.first.pipeline import (
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
    methods_text,
)
from ltrscale.training.in_context import InContextConfig

TREES, TUNED, LINEAR, IN_CONTEXT = "trees", "trees_tuned", "linear", "in_context"
SCRATCH, TABM, PRETRAINED_NETWORK, STUDENT = "scratch", "tabm", "pretrained", "student"
FIRST = (TREES, TUNED, LINEAR, IN_CONTEXT, SCRATCH, TABM, PRETRAINED_NETWORK)
"""The methods, in the order of their first models."""
ALL_METHODS = (*FIRST, STUDENT)
MORE_OF = (TUNED, SCRATCH, TABM, PRETRAINED_NETWORK)
"""Methods with further models of other seeds."""
SHARES = {
    TREES: 0.1,
    TUNED: 0.2,
    LINEAR: 0.04,
    IN_CONTEXT: 0.06,
    SCRATCH: 0.08,
    TABM: 0.12,
    PRETRAINED_NETWORK: 0.25,
    STUDENT: 0.12,
}
"""Maximum share of the budget for each first model; the rest is for further models, blend, test and refit."""
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
SLOWER = {TABM: 5.0}
"""Time relative to the other network, in training and scoring (2026-11-26)."""
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

    @property
    def start(self) -> float:
        """Minutes to start the training of a network."""
        return _START_MINUTES if self.workers == 1 else _RAY_START_MINUTES


class Speed(NamedTuple):
    """Speed of this machine relative to the one of the measured rates."""

    trees: float = 1.0
    networks: float = 1.0


class Planned(NamedTuple):
    """A method with its settings and its minutes, or why it is left out."""

    settings: Mapping[str, Any] | None
    minutes: float
    why: str


def planned(name: str, sizes: AutoSizes, budget: float, speed: Speed, teacher: str = SCRATCH) -> Planned:
    """The settings that keep the first model of a method within its share of the budget.

    Args:
        name: the method.
        sizes: of the log and the machine.
        budget: minutes.
        speed: of the machine.
        teacher: the teacher network, if a student is planned.

    Raises:
        ValueError: there is no such method.

    Example:
        >>> log = LogSize(documents=550_000, informative=195_000, features=13)
        >>> sizes = AutoSizes(
        ...     log, lists=5_000, judged=20_000, tested=20_000, numbers=13, longest=40, cores=2, workers=1
        ... )
        >>> for budget in (5, 60):
        ...     print(planned("pretrained", sizes, budget, Speed()).why)
        1 epoch of pretraining, 1.1 minutes
        16 epochs of pretraining, 14.8 minutes
    """
    log, share = sizes.log, SHARES[name] * budget
    first = first_sizes(log, cores=sizes.cores, models=1)
    methods = _methods(first, sizes)
    tree = log.informative * log.features / (BOOSTED * sizes.cores * speed.trees) / 60
    epoch = epoch_minutes(log.informative, FINETUNED[first.docs_per_batch] * speed.networks, log.features)
    epoch += sizes.judged / SCORED / 60
    match name:
        case "trees":
            number = min(STUDIED["trees"], max(50, int((share - _START_MINUTES) / (tree or 1e-9))))
            trees = _methods(first._replace(trees=number), sizes)[TREES]
            trees["gbdt"] |= {"feature_fraction": 0.5, "bagging_fraction": 0.8}
            return Planned(trees, number * tree + _START_MINUTES, f"{number} trees")
        case "trees_tuned":
            trial = STUDIED["trees"] * tree + _START_MINUTES
            trials = min(MOST_TRIALS, int(share / trial))
            if trials < _FEWEST_TRIALS:
                return Planned(None, 0.0, f"a trial takes {trial:.1f} minutes: too few for a search")
            settings = {"kind": "tuned", "of": TREES, "trials": trials, "space": _SPACE}
            return Planned(settings, trials * trial, f"{trials} trials")
        case "linear":
            return _network(_linear(methods[SCRATCH]), share, epoch, sizes.start)
        case "in_context":
            return _in_context(sizes, share, speed)
        case "scratch":
            return _network(methods[SCRATCH], share, epoch, sizes.start)
        case "tabm":
            return _network(_tabm(methods[SCRATCH]), share, SLOWER[TABM] * epoch, sizes.start)
        case "pretrained":
            rate = PRETRAINED[first.pretraining_docs_per_batch] * speed.networks
            return _pretrained(methods[PRETRAINED_NETWORK], sizes, share, epoch, rate)
        case "student":
            return _student(teacher, sizes, share, epoch, speed)
    raise ValueError(f"{name} is no method of jobs.auto")


def chosen_at(cutoff: int, settings: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The settings of a method, with NDCG at a cut-off to choose trees, epochs and trials.

    Example:
        >>> chosen_at(10, {"kind": "neural", "finetune": {"epochs": 20}})
        {'kind': 'neural', 'finetune': {'epochs': 20, 'validation_metric': 'ndcg@10'}}
    """
    metric = {"validation_metric": f"ndcg@{cutoff}"}
    by: dict[str, dict[str, Any]] = {"gbdt": {"stop_on": cutoff}, "finetune": metric, "student": metric}
    return settings and {key: {**value, **by[key]} if key in by else value for key, value in settings.items()}


def _pretrained(settings: Mapping[str, Any], sizes: AutoSizes, share: float, epoch: float, rate: float) -> Planned:
    """A network with the epochs of pretraining that fit beside finetuning; `rate` is in documents a second."""
    log = sizes.log
    if log.documents < _PAYS_FROM * log.informative:
        known = log.informative / max(log.documents, 1)
        return Planned(None, 0.0, f"labels tell {known:.0%} of the documents apart: pretraining has little to add")
    finetuned = _network(settings, share / 3, epoch, sizes.start)
    if finetuned.settings is None:
        return finetuned
    pretraining = epoch_minutes(log.documents, rate, log.features)
    epochs = min(MOST_EPOCHS, int((share - finetuned.minutes - sizes.start) / pretraining))
    if epochs < 1:
        return Planned(None, 0.0, f"an epoch of pretraining takes {pretraining:.1f} minutes, which the budget has not")
    pretrained = {**finetuned.settings, "pretrain": {**settings["pretrain"], "epochs": epochs}}
    minutes = epochs * pretraining + finetuned.minutes + sizes.start
    plural = "" if epochs == 1 else "s"
    return Planned(pretrained, minutes, f"{epochs} epoch{plural} of pretraining, {minutes:.1f} minutes")


def _in_context(sizes: AutoSizes, share: float, speed: Speed) -> Planned:
    """An in-context ranker, for few labels (docs/results/in-context.md); its time is that of scoring."""
    if sizes.numbers == 0:
        return Planned(None, 0.0, "no feature is a number")
    if sizes.lists > _READ_LISTS:
        return Planned(None, 0.0, f"of more than {_READ_LISTS} lists training learns more")
    values = (2 * sizes.judged + sizes.tested) * sizes.log.features * InContextConfig().reading.samples
    minutes = _START_MINUTES + values / (_READ * speed.networks) / 60
    if minutes > share:
        return Planned(None, 0.0, f"its scoring takes {minutes:.1f} minutes, which the budget has not")
    return Planned({"kind": "in_context"}, minutes, f"{sizes.lists} lists to read")


def _student(teacher: str, sizes: AutoSizes, share: float, epoch: float, speed: Speed) -> Planned:
    """The student of several trained networks, finetuned with their settings."""
    documents = min(sizes.log.documents, _TAUGHT_DOCUMENTS)
    few, many = _STUDENT_EPOCHS
    epochs, batch = min(many, max(few, _STUDENT_READS // max(documents, 1))), 1000 if documents < SMALL else 4096
    taught = epochs * epoch_minutes(documents, FINETUNED[1024] * speed.networks, sizes.log.features)
    minutes = taught + STUDIED["finetuning"] * epoch + TEACHERS * documents / SCORED / 60 + 2 * sizes.start
    if minutes > share:
        return Planned(None, 0.0, f"a student takes {minutes:.1f} minutes, which the budget has not")
    settings = {
        "kind": "self_trained",
        "of": teacher,
        "runs": TEACHERS,
        "groups": _TAUGHT_LISTS if sizes.log.documents > documents else None,
        "student": {
            "epochs": epochs,
            "patience": epochs // 3,
            "stream": _dealt({"docs_per_batch": batch}, sizes),
        },
    }
    return Planned(settings, minutes, f"of {TEACHERS} networks {teacher}")


def _methods(first: FirstSizes, sizes: AutoSizes) -> dict[str, dict[str, Any]]:
    """The methods of `jobs.init`'s pipeline, with one stream per worker."""
    methods: dict[str, dict[str, Any]] = yaml.safe_load(methods_text(first))["methods"]
    for name, phase in ((SCRATCH, "finetune"), (PRETRAINED_NETWORK, "finetune"), (PRETRAINED_NETWORK, "pretrain")):
        methods[name][phase]["stream"] = _dealt(methods[name][phase]["stream"], sizes)
    return methods


def _dealt(stream: Mapping[str, Any], sizes: AutoSizes) -> dict[str, Any]:
    """Settings for one stream per worker; the streams share the documents of a batch."""
    least = sizes.workers * sizes.longest if sizes.workers > 1 else 0
    return {**stream, "docs_per_batch": max(stream["docs_per_batch"], least), "streams": sizes.workers}


def _linear(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A linear ranker, trained like the network but in larger steps; good with few labels (docs/auto.md)."""
    finetune = settings["finetune"]
    network = {**finetune["network"], "encoder": {"kind": "identity"}}
    fast = {**finetune["optimizer"], "learning_rate": 1e-2}
    return {**settings, "finetune": {**finetune, "network": network, "optimizer": fast}}


def _tabm(settings: Mapping[str, Any]) -> dict[str, Any]:
    """TabM on piecewise-linear numbers (docs/results/encoders.md); no noise, as it would move values between bins."""
    finetune = settings["finetune"]
    encoder = {"kind": "tabm", "members": 8, "hidden": [128] * 3}
    network = {**finetune["network"], "encoder": encoder, "numbers": {"kind": "ple", "bins": 16}}
    optimizer = {**finetune["optimizer"], "learning_rate": 1e-3}
    return {**settings, "finetune": {**finetune, "network": network, "noise": 0.0, "optimizer": optimizer}}


def _network(settings: Mapping[str, Any], share: float, epoch: float, start: float) -> Planned:
    """A network with the epochs of finetuning that fit into a share of the budget; `start` is its start-up minutes."""
    epochs = min(STUDIED["finetuning"], int((share - start) / epoch))
    if epochs < 2:
        return Planned(
            None, 0.0, f"two epochs take {start + 2 * epoch:.1f} minutes with their start, which the budget has not"
        )
    finetune = {**settings["finetune"], "epochs": epochs, "patience": max(2, epochs // 4)}
    return Planned({**settings, "finetune": finetune}, epochs * epoch + start, f"{epochs} epochs")


MOST_MODELS = 10
"""Maximum number of models of a method."""
_RESERVED, _LEAST_RESERVED = 0.1, 0.1
"""Share of the budget for blend, test and leaderboard, and further minutes."""
_REFIT = 1.2
"""Time of a refit relative to training, because it reads validation too."""


@dataclass(frozen=True)
class Forecast:
    """The minutes that models will take, and those that remain."""

    record: AutoRecord
    """Models so far, and the budget."""
    sizes: AutoSizes
    spent: float
    """Minutes so far, over all processes."""
    refits: bool
    """Whether the ranker's models will be refitted."""
    cutoff: int
    """Cut-off of the NDCG that chooses."""

    @property
    def left(self) -> float:
        """Minutes for further models, their refit and their test."""
        done = {name: self.record.done(name) for name in ALL_METHODS}
        tested = sum(len(entries) * self.test_minutes(name) for name, entries in done.items())
        refitted = sum(len(entries) * self._again_minutes(name) for name, entries in done.items() if entries)
        # in-context rankers score slowly, and their plan includes that
        slow = sum(max(0.0, entry.foretold - entry.minutes) for entry in done[IN_CONTEXT])
        rest = (self._with_refit - 1) * refitted + tested + slow
        return self.record.budget * (1 - _RESERVED) - _LEAST_RESERVED - self.spent - rest

    def first(self, name: str, teacher: str = SCRATCH) -> Planned:
        """The plan of a method's first model for its share of the budget, or less if less time is left."""
        plan, tested = self._planned(name, self.record.budget, teacher), self.test_minutes(name)
        takes, left = self.takes(name, plan) - tested, max(0.0, self.left - tested)
        return plan if takes <= left else self._planned(name, self.record.budget * left / takes, teacher)

    def takes(self, name: str, plan: Planned) -> float:
        """Minutes of a first model, its refit (without search and pretraining) and its test."""
        if plan.settings is None:
            return 0.0
        again = self._without_start(name, plan.minutes, plan.settings)
        return plan.minutes + (self._with_refit - 1) * again + self.test_minutes(name)

    def more(self) -> str | None:
        """The method to train one more model of: the one with the fewest; None if none fits."""
        counts = {name: len(self.record.done(name)) for name in MORE_OF}
        counts = counts if any(counts.values()) else {TREES: len(self.record.done(TREES))}
        failed = {entry.method for entry in self.record.entries if entry.state in ("late", "left out")}
        fits = [
            name
            for name, count in counts.items()
            if 0 < count < MOST_MODELS
            and name not in failed
            and self._with_refit * self._again_minutes(name) + self.test_minutes(name) < self.left
        ]
        return min(fits, key=lambda name: counts[name], default=None)

    @property
    def _with_refit(self) -> float:
        """Factor from minutes of training to minutes with refit."""
        return 1 + _REFIT if self.refits else 1.0

    def _again_minutes(self, name: str) -> float:
        """Minutes of one more model of a method, without search or pretraining."""
        first, *others = (entry.minutes for entry in self.record.done(name))
        return max(others) if others else self._without_start(name, first, self.record.methods[name])

    def test_minutes(self, name: str) -> float:
        """Minutes to score the test split with a model, once for all rankers that contain it."""
        return SLOWER.get(name, 1.0) * self.sizes.tested / (SCORED * self.speed.networks) / 60

    @cached_property
    def speed(self) -> Speed:
        """The speed of this machine, from the models so far."""
        speed = Speed()
        for method, kind in ((TREES, "trees"), (SCRATCH, "networks")):
            for entry in self.record.done(method)[:1]:
                if entry.foretold:  # at most 1: a short time may be early stopping
                    speed = speed._replace(**{kind: min(1.0, entry.foretold / max(entry.minutes, 1e-9))})
        return speed

    def _planned(self, name: str, budget: float, teacher: str) -> Planned:
        """The plan of a method's first model for its share of a budget, on this machine."""
        plan = planned(name, self.sizes, budget, self.speed, teacher=teacher)
        return plan._replace(settings=chosen_at(self.cutoff, plan.settings))

    def _without_start(self, name: str, minutes: float, settings: Mapping[str, Any]) -> float:
        """Minutes of a method's first model without its search, pretraining or teachers."""
        if name == TUNED:
            return 2 * minutes / int(settings["trials"])
        if name in (PRETRAINED_NETWORK, STUDENT):
            return min(minutes, max((entry.minutes for entry in self.record.done(SCRATCH)), default=minutes))
        return minutes
