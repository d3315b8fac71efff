"""What a budget of minutes is spent on: methods with their settings, as a pure function of the sizes and the minutes.

Rates are those that were measured for `jobs.init` (`FINETUNED`, `PRETRAINED`, `BOOSTED`), times the speed of the
machine, which the first models show.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

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
"""The methods in the order in which they are tried."""
ALL_METHODS = (*FIRST, STUDENT)
MORE_OF = (TUNED, SCRATCH, TABM, PRETRAINED_NETWORK)
"""Those of which more models are trained, with other seeds."""
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
"""Shares of the budget that the first model of each may take; the rest is for further models, blend, test and refit."""
MOST_EPOCHS, MOST_TRIALS = 64, 100
"""Of pretraining, and of the search: beyond these neither helped in docs/results/study-news.md."""
_FEWEST_TRIALS = 3
_PAYS_FROM = 2.0
"""Documents of the log for each one with labels to learn from, from which on networks are pretrained: with fewer there
is little that labels do not say."""
_START_MINUTES, _RAY_START_MINUTES = 0.03, 0.3
"""Minutes that a training takes to start, in this process and on workers of Ray, some twenty processes (2026-11-26)."""
_READ_LISTS, _READ = 300, 1.2e6
"""Labelled lists up to which examples may teach more than training does, and feature values, for all samples, that such
a ranker scores in a second on one core (2026-11-26)."""
SLOWER = {TABM: 5.0}
"""Times as long as the other network, in training and scoring (2026-11-26)."""
TEACHERS = 3
"""Networks whose mean a student learns."""
_TAUGHT_LISTS, _TAUGHT_DOCUMENTS = 20_000, 500_000
"""Lists of a larger log that a student learns, as in the news study, and documents that these are taken to have."""
_STUDENT_EPOCHS, _STUDENT_READS = (8, 40), 4_000_000
"""Epochs of a student, between those of the news study and of the small sets, and documents that it reads in all."""
_SPACE = {
    "gbdt.objective": {"choices": ["lambdarank", "rank_xendcg"]},
    "gbdt.num_leaves": {"low": 2, "high": 64, "log": True, "integer": True},
    "gbdt.learning_rate": {"low": 0.02, "high": 0.3, "log": True},
    "gbdt.min_data_in_leaf": {"low": 2, "high": 100, "log": True, "integer": True},
    "gbdt.feature_fraction": {"low": 0.2, "high": 1},
    "gbdt.bagging_fraction": {"low": 0.3, "high": 1},
    "gbdt.lambda_l2": {"low": 0.001, "high": 100, "log": True},
}
"""That of the news study."""


class AutoSizes(NamedTuple):
    """What decides how long a method takes."""

    log: LogSize
    """Of the training periods."""
    lists: int
    """Labelled lists with a relevant document, to learn from."""
    judged: int
    """Documents of the validation groups that models are judged on."""
    tested: int
    """Documents of the test groups."""
    numbers: int
    """Features that are no categories."""
    longest: int
    """Documents of the longest group of all splits, for which each stream has room."""
    cores: int
    """Those that trees use."""
    workers: int
    """Those that networks learn on; each has a stream of its own."""

    @property
    def start(self) -> float:
        """Minutes that the training of a network takes to start."""
        return _START_MINUTES if self.workers == 1 else _RAY_START_MINUTES


class Speed(NamedTuple):
    """How fast this machine is, as a multiple of the one on which the rates were measured."""

    trees: float = 1.0
    networks: float = 1.0


class Planned(NamedTuple):
    """A method with its settings and its minutes, or why it is left out."""

    settings: Mapping[str, Any] | None
    minutes: float
    why: str


def planned(name: str, sizes: AutoSizes, budget: float, speed: Speed, teacher: str = SCRATCH) -> Planned:
    """The settings with which the first model of a method takes at most its share of the budget.

    Args:
        name: the method.
        sizes: of the log and the machine.
        budget: minutes.
        speed: of the machine.
        teacher: the network whose student is planned.

    Raises:
        ValueError: no method has the name.

    Example:
        >>> log = LogSize(documents=550_000, told_apart=195_000, features=13)
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
    tree = log.told_apart * log.features / (BOOSTED * sizes.cores * speed.trees) / 60
    epoch = epoch_minutes(log.told_apart, FINETUNED[first.docs_per_batch] * speed.networks, log.features)
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
    """The settings of a method whose trees, epochs and trials NDCG at a cut-off chooses.

    Example:
        >>> chosen_at(10, {"kind": "neural", "finetune": {"epochs": 20}})
        {'kind': 'neural', 'finetune': {'epochs': 20, 'validation_metric': 'ndcg@10'}}
    """
    metric = {"validation_metric": f"ndcg@{cutoff}"}
    by: dict[str, dict[str, Any]] = {"gbdt": {"stop_on": cutoff}, "finetune": metric, "student": metric}
    return settings and {key: {**value, **by[key]} if key in by else value for key, value in settings.items()}


def _pretrained(settings: Mapping[str, Any], sizes: AutoSizes, share: float, epoch: float, rate: float) -> Planned:
    """A network with as many epochs of pretraining as finetuning leaves room for; `rate` is in documents a second."""
    log = sizes.log
    if log.documents < _PAYS_FROM * log.told_apart:
        known = log.told_apart / max(log.documents, 1)
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
    """A ranker that reads examples; that it scores slowly counts, of validation twice, alone and blended, and of test.

    Of many labels training learns more (docs/results/in-context.md).
    """
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
    """The student of several networks, which are there; it is finetuned as they were."""
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
    """The methods of a first pipeline, with a stream for each worker."""
    methods: dict[str, dict[str, Any]] = yaml.safe_load(methods_text(first))["methods"]
    for name, phase in ((SCRATCH, "finetune"), (PRETRAINED_NETWORK, "finetune"), (PRETRAINED_NETWORK, "pretrain")):
        methods[name][phase]["stream"] = _dealt(methods[name][phase]["stream"], sizes)
    return methods


def _dealt(stream: Mapping[str, Any], sizes: AutoSizes) -> dict[str, Any]:
    """The settings of a stream with one for each worker, which share the documents of a batch."""
    room = sizes.workers * sizes.longest if sizes.workers > 1 else 0
    return {**stream, "docs_per_batch": max(stream["docs_per_batch"], room), "streams": sizes.workers}


def _linear(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A weight for each feature, learnt as the network is, but in larger steps.

    Of some hundred labels others learn little more, and often less (docs/auto.md).
    """
    finetune = settings["finetune"]
    network = {**finetune["network"], "encoder": {"kind": "identity"}}
    fast = {**finetune["optimizer"], "learning_rate": 1e-2}
    return {**settings, "finetune": {**finetune, "network": network, "optimizer": fast}}


def _tabm(settings: Mapping[str, Any]) -> dict[str, Any]:
    """TabM on piecewise-linear numbers, learnt in larger steps and without noise, which would move values between bins.

    The best network of MQ2008, and as good as the other one on the news log (docs/results/encoders.md).
    """
    finetune = settings["finetune"]
    encoder = {"kind": "tabm", "members": 8, "hidden": [128] * 3}
    network = {**finetune["network"], "encoder": encoder, "numbers": {"kind": "ple", "bins": 16}}
    optimizer = {**finetune["optimizer"], "learning_rate": 1e-3}
    return {**settings, "finetune": {**finetune, "network": network, "noise": 0.0, "optimizer": optimizer}}


def _network(settings: Mapping[str, Any], share: float, epoch: float, start: float) -> Planned:
    """A network with as many epochs of finetuning as a share of the budget has room for; it takes minutes to start."""
    epochs = min(STUDIED["finetuning"], int((share - start) / epoch))
    if epochs < 2:
        return Planned(
            None, 0.0, f"two epochs take {start + 2 * epoch:.1f} minutes with their start, which the budget has not"
        )
    finetune = {**settings["finetune"], "epochs": epochs, "patience": max(2, epochs // 4)}
    return Planned({**settings, "finetune": finetune}, epochs * epoch + start, f"{epochs} epochs")
