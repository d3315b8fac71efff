"""What a budget is spent on: shares are kept, larger budgets ask for more, and what does not fit says why."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from ltrscale.config import validate
from ltrscale.experiments.auto.first_models import (
    KNOWN_METHODS,
    MOST_EPOCHS,
    MOST_TRIALS,
    AutoSizes,
    Given,
    Planned,
    Speed,
)
from ltrscale.experiments.first.configs import LogSize
from ltrscale.experiments.pipeline import PipelineJob

BUDGETS = [5.0, 60.0, 600.0]


def sizes(documents: int, informative: int, features: int, **others: int) -> AutoSizes:
    """Of a log, with a small validation and test split, on two cores."""
    rest = {"cores": 2, "workers": 1, "longest": 40, "lists": 300, "judged": 20_000, "tested": 20_000, "numbers": 13}
    return AutoSizes(LogSize(documents, informative, features), **{**rest, **others})


def planned(name: str, log: AutoSizes, budget: float, **speed: float) -> Planned:
    """The first model of a method in its share of a budget."""
    known = KNOWN_METHODS[name]
    return known.plan(Given(log, known.share * budget, Speed(**speed)))


LOGS = [sizes(9_630, 7_000, 46), sizes(550_000, 195_000, 13), sizes(36_000_000, 300_000, 12)]


@pytest.mark.slow
@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("name", KNOWN_METHODS)
def test_a_larger_budget_never_asks_for_less_and_none_for_more_than_its_share(name: str, log: AutoSizes) -> None:
    choices = [planned(name, log, budget) for budget in BUDGETS]
    for choice, budget in zip(choices, BUDGETS, strict=True):
        assert choice.says
        assert choice.minutes <= KNOWN_METHODS[name].share * budget or name == "trees"
        assert (choice.settings is None) == (choice.minutes == 0.0)
    assert all(few.minutes <= many.minutes for few, many in itertools.pairwise(choices))


@pytest.mark.parametrize("log", LOGS)
def test_settings_are_those_of_a_pipeline_and_keep_their_limits(log: AutoSizes) -> None:
    found = {name: planned(name, log, 600.0).settings for name in KNOWN_METHODS}
    methods = {name: settings for name, settings in found.items() if settings is not None}
    config = pipeline_of(methods)
    assert methods["trees_tuned"]["trials"] <= MOST_TRIALS
    assert methods["student"]["of"] == "scratch"
    if "pretrained" in methods:
        assert methods["pretrained"]["pretrain"]["epochs"] <= MOST_EPOCHS
        assert config.methods["pretrained"].encoder("pretrained", config.methods) == "pretrained"
    assert ("pretrained" in methods) == (log.log.documents >= 2 * log.log.informative)


def pipeline_of(methods: Mapping[str, Any], workers: int = 1) -> PipelineJob:
    values = {"out": "runs", "data": "data", "methods": methods, "evaluate": {"baseline": None}, "workers": workers}
    periods = {name: {"periods": name} for name in ("train", "validation", "test")}
    return validate(PipelineJob, {**values, "splits": periods}, "auto")


def test_networks_have_a_stream_for_each_worker() -> None:
    several = LOGS[1]._replace(workers=3, longest=1500)
    found = {name: planned(name, several, 600.0).settings for name in KNOWN_METHODS}
    methods = {name: settings for name, settings in found.items() if settings is not None}
    assert methods.keys() >= {"linear", "scratch", "pretrained", "student"}
    of_methods = pipeline_of(methods, workers=3).methods.values()
    streams = {(stream.streams, stream.docs_per_batch >= 4500) for method in of_methods for stream in method.streams()}
    assert streams == {(3, True)}, "each has room for the longest group"


def test_workers_of_ray_take_longer_to_start() -> None:
    """So that a small budget has no room for what they would train."""
    alone, several = (planned("scratch", LOGS[0]._replace(workers=workers), 2.0) for workers in (1, 2))
    assert alone.settings is not None
    assert several == Planned(None, 0.0, several.says, too_long=True)
    assert planned("scratch", LOGS[0]._replace(workers=2), 60.0).settings is not None


def test_fewer_trees_learn_faster() -> None:
    few, many = (planned("trees", sizes(550_000, n, 13), 5.0).settings for n in (10**7, 10**4))
    assert few is not None
    assert many is not None
    assert few["gbdt"]["num_trees"] < many["gbdt"]["num_trees"]
    learnt = [settings["gbdt"]["num_trees"] * settings["gbdt"]["learning_rate"] for settings in (few, many)]
    assert learnt[0] == pytest.approx(learnt[1], rel=1e-3)


def test_a_slow_machine_gets_fewer_trials_and_epochs() -> None:
    fast, slow = (
        {name: planned(name, LOGS[1], 60.0, **speed) for name in KNOWN_METHODS}
        for speed in ({}, {"trees": 0.25, "networks": 0.25})
    )
    assert fast["trees_tuned"].settings is not None
    assert slow["trees_tuned"].settings is not None
    assert slow["trees_tuned"].settings["trials"] < fast["trees_tuned"].settings["trials"]
    assert fast["pretrained"].settings is not None
    assert slow["pretrained"].settings is not None
    assert slow["pretrained"].settings["pretrain"]["epochs"] < fast["pretrained"].settings["pretrain"]["epochs"]


@pytest.mark.parametrize("fast", [True, False])
def test_only_pretraining_takes_bfloat16_and_only_where_it_is_fast(fast: bool) -> None:
    log = LOGS[1]._replace(bfloat16=fast)
    pretrained, scratch = planned("pretrained", log, 60.0).settings, planned("scratch", log, 60.0).settings
    assert pretrained is not None
    assert scratch is not None
    assert pretrained["pretrain"].get("precision") == ("bf16" if fast else None)
    assert "precision" not in {*pretrained["finetune"], *scratch["finetune"]}
    pipeline_of({"scratch": scratch, "pretrained": pretrained})


def test_what_does_not_fit_says_why() -> None:
    huge = sizes(400_000_000, 40_000_000, 100)
    for name in ("trees_tuned", "scratch", "pretrained", "student"):
        left_out = planned(name, huge, 5.0)
        assert left_out.settings is None
        assert "minutes" in left_out.says


def test_examples_are_read_where_lists_are_few_and_scoring_is_short() -> None:
    def choice(**others: int) -> Planned:
        return planned("in_context", LOGS[1]._replace(**others), 5.0)

    assert choice().settings == {"kind": "in_context"}
    assert choice(lists=301).says == "of more than 300 lists training learns more"
    assert "its scoring takes" in choice(tested=1_000_000).says
    assert choice(tested=1_000_000).settings is None
    assert choice(numbers=0) == Planned(None, 0.0, "no feature is a number")
