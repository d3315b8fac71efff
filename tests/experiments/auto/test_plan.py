"""What fits into the minutes that are left: all that is done and all that it still takes counts, and nothing twice."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from ltrscale.experiments.auto.first_models import KNOWN_METHODS, AutoSizes, time_factor
from ltrscale.experiments.auto.plan import (
    HALF,
    MOST_MODELS,
    AutoRecord,
    Entry,
    RunState,
    first_settings,
    method_of_fewest,
    next_model,
    settings_within,
    share_of_test,
)
from ltrscale.experiments.first.configs import LogSize
from ltrscale.experiments.methods.composed import AnyMethod

LOG = LogSize(550_000, 195_000, 13)
SIZES = AutoSizes(LOG, lists=300, judged=20_000, tested=20_000, numbers=13, longest=40, cores=2, workers=1)


def state(*entries: Entry, spent: float = 0.0, refits: bool = False) -> RunState:
    methods: dict[str, dict[str, Any]] = {name: {"trials": 10} for name in KNOWN_METHODS}
    record = AutoRecord(of="", budget=60, methods=methods)
    for entry in entries:
        record = record.noted(entry)
    return RunState(record, SIZES, spent=spent, refits=refits, cutoff=5)


def done(method: str, number: int = 0, minutes: float = 2.0, foretold: float = 0.0) -> Entry:
    return Entry(method=method, number=number, minutes=minutes, foretold=foretold, state="done")


def test_what_is_spent_is_gone_and_each_model_keeps_room_for_its_test() -> None:
    nothing, tested = state(), state().test_minutes("scratch")
    assert 0 < nothing.minutes_left < 60
    assert state(spent=7.0).minutes_left == pytest.approx(nothing.minutes_left - 7)
    assert state(done("scratch"), done("scratch", 1)).minutes_left == pytest.approx(nothing.minutes_left - 2 * tested)
    assert state(done("tabm")).minutes_left == pytest.approx(nothing.minutes_left - time_factor("tabm", 13) * tested)


def test_a_model_keeps_room_for_its_refit_which_neither_searches_nor_pretrains() -> None:
    def needed(*entries: Entry) -> float:
        return state(*entries).minutes_left - state(*entries, refits=True).minutes_left

    assert needed(done("scratch", minutes=3)) == pytest.approx(1.2 * 3)
    assert needed(done("trees_tuned", minutes=10)) == pytest.approx(1.2 * 2), "two of ten trials"
    pretrained = done("pretrained", minutes=20)
    assert needed(done("scratch", minutes=3), pretrained) == pytest.approx(1.2 * (3 + 3)), "finetuned as the other is"
    assert needed(pretrained, done("pretrained", 1, minutes=4)) == pytest.approx(1.2 * (4 + 4)), "as its second was"


def test_the_method_with_the_fewest_models_gets_the_next_one() -> None:
    first = [done("trees_tuned"), done("scratch"), done("tabm")]
    assert method_of_fewest(state(*first)) == "trees_tuned"
    assert method_of_fewest(state(*first, done("trees_tuned", 1))) == "scratch"
    late = Entry(method="scratch", number=1, state="late")
    assert method_of_fewest(state(*first, done("trees_tuned", 1), late)) == "tabm", "a method that was late is over"
    assert method_of_fewest(state(done("trees"))) == "trees", "trees as given where nothing else is there"
    assert method_of_fewest(state(done("trees"), *first[1:2])) == "scratch"
    assert method_of_fewest(state(*(done("scratch", number, 0.1) for number in range(MOST_MODELS)))) is None
    assert method_of_fewest(state(*first, spent=55)) is None
    assert method_of_fewest(state()) is None


def test_a_method_far_behind_on_validation_gets_no_other_seed() -> None:
    def found(**values: float | None) -> str | None:
        return method_of_fewest(state(*(done(name).replace(validation=value) for name, value in values.items())))

    assert found(scratch=0.5, tabm=0.48) == "scratch"
    assert found(trees_tuned=0.47, scratch=0.5, tabm=0.48) == "scratch"
    assert found(trees_tuned=0.4, tabm=0.5) == "tabm"
    more = [done("scratch", number).replace(validation=0.5) for number in range(3)]
    assert method_of_fewest(state(*more, done("tabm").replace(validation=0.3))) == "scratch"
    assert found(scratch=0.0, tabm=0.0) == "scratch"
    assert found(scratch=None, tabm=0.5) == "scratch", "not recorded by an earlier version"


def test_the_first_network_shows_how_fast_the_machine_trains_whenever_it_stopped() -> None:
    assert state(done("scratch", minutes=4, foretold=1)).speed[:2] == (1.0, 0.25)
    assert state(done("linear", minutes=4, foretold=1)).speed[:2] == (1.0, 0.25), "the first network says it already"
    assert state(done("scratch", minutes=1, foretold=4)).speed[:2] == (1.0, 4.0), "a GPU is faster than foretold"
    assert state(done("trees", minutes=1, foretold=4)).speed[:2] == (1.0, 1.0), "trees may have stopped early"
    started = state(done("linear", minutes=4, foretold=1).replace(start=3.0)).speed
    assert started.networks == pytest.approx(1.0, abs=0.05), "what it fitted before its first step says nothing"
    slow, fast = state(done("scratch", minutes=4, foretold=1)), state(done("scratch", minutes=4, foretold=4))
    assert slow.test_minutes("scratch") == pytest.approx(4 * fast.test_minutes("scratch"))
    early = state(done("scratch", minutes=1, foretold=4).replace(documents=5 * LOG.informative))
    early.record.methods["scratch"] = {"finetune": {"epochs": 20}}
    assert early.speed[:2] == (1.0, 1.0), "a quarter of the epochs in a quarter of the time"


def test_the_test_takes_what_was_measured_of_a_model_or_of_the_first_network() -> None:
    measured = state(done("linear").replace(scores=5_000.0), done("trees").replace(scores=1_000.0))
    assert measured.test_minutes("trees") == pytest.approx(20_000 / 1_000 / 60)
    assert measured.test_minutes("scratch") == pytest.approx(20_000 / 5_000 / 60)
    assert measured.test_minutes("tabm") == pytest.approx(time_factor("tabm", 13) * 20_000 / 5_000 / 60)
    epochs = [first_settings(each, "scratch").minutes for each in (measured, state(done("linear"), done("trees")))]
    assert epochs[0] > epochs[1], "validation after an epoch scores too"


def test_as_much_is_tested_as_the_time_allows() -> None:
    fast, slow = (done("scratch").replace(scores=scores) for scores in (50_000.0, 20.0))
    assert share_of_test(state(fast, spent=50)) == 1
    needed = 20_000 / 20 / 60
    assert share_of_test(state(slow, spent=50)) == pytest.approx(10 / needed)
    assert share_of_test(state(slow, spent=50, refits=True)) == pytest.approx(5 / needed)
    assert share_of_test(state(slow, spent=60)) == 0.01, "some lists at least"
    assert state(slow).test_minutes("scratch") == 0.02 * 60, "no model takes more to test than this"


def test_a_first_model_takes_what_is_left_of_its_share() -> None:
    early, late = (first_settings(state(spent=spent), "pretrained") for spent in (0.0, 45.0))
    assert early.settings is not None
    assert late.settings is not None
    assert late.minutes < early.minutes
    assert state(spent=45.0).first_minutes("pretrained", late) <= state(spent=45.0).minutes_left + 0.1
    assert first_settings(state(spent=54.0), "pretrained").settings is None


def test_what_was_too_long_for_its_share_takes_what_is_left() -> None:
    full = [done(name, number, minutes=0.1) for name in ("trees_tuned", "scratch", "tabm") for number in range(10)]
    late = Entry(method="pretrained", state="late")
    for documents, fits in ((18_000_000, True), (90_000_000, False)):
        before = replace(state(*full, spent=10), sizes=SIZES._replace(log=LOG._replace(documents=documents)))
        assert settings_within(before, "pretrained", 0.25 * 60).settings is None
        assert method_of_fewest(before) is None
        tried = {entry.method for entry in full} | {"pretrained"}
        others = [Entry(method=name, state="left out") for name in ("trees", HALF, *KNOWN_METHODS) if name not in tried]
        after = replace(before, record=state(*full, *others, late).record)
        decision = next_model(after)
        assert (decision is not None) == fits
        if decision is not None:
            assert (decision.entry.name, decision.entry.state) == ("pretrained", "begun")
            assert decision.entry.foretold < after.minutes_left
            ended = after.record.noted(decision.entry.replace(state="done"))
            assert [entry.state for entry in ended.entries if entry.method == "pretrained"] == ["done"]


def test_ndcg_at_the_cutoff_chooses_in_every_method_and_in_a_student() -> None:
    planned = {name: first_settings(replace(state(), cutoff=10), name).settings for name in KNOWN_METHODS}
    known: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, AnyMethod])
    methods = known.validate_python({name: settings for name, settings in planned.items() if settings})
    scratch, student = methods["scratch"].finetune, methods["student"].student
    assert scratch.validation_metric == student.finetuning(scratch).validation_metric == "ndcg@10"
