"""Searches: an interrupted search loses and repeats nothing; failing trials; ASHA."""

import itertools
import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import hypothesis
import optuna
import pytest
import tuning_trials
from hypothesis import strategies as st
from optuna.samplers import TPESampler
from optuna.trial import TrialState, create_trial
from ray import cloudpickle
from ray.exceptions import RayActorError, RayTaskError
from waiting import wait_until

from ltrscale.draws import mix
from ltrscale.errors import InputError, Stopped, UnavailableError
from ltrscale.origin import digest
from ltrscale.signals import stop_on_signal
from ltrscale.tuning.history import LATE, History, Result, Trial, TrialFunction, _Curve, attempt, ended, keep_unfinished
from ltrscale.tuning.space import AshaConfig, Params, SearchConfig, is_in
from ltrscale.tuning.tune import Search
from ltrscale.tuning.under_tune import Asha, Ending, Proposals, Scribe

SPACE = {"x": {"low": 0, "high": 10}, "c": {"choices": ["a", "b"]}}
LEVELS = {"x": {"choices": [0, 1, 2, 3, 4, 5]}}


def search_of(**values: Any) -> SearchConfig:
    return SearchConfig.model_validate({"space": SPACE, "trials": 8, **values})


def by_proposals(config: SearchConfig, history: History, trial: TrialFunction, most: int = 1000) -> None:
    """Run a search of one trial at a time without Ray Tune."""
    Search(config.replace(trials=min(config.trials, most)), trial, history, {"x": 1, "c": "a"}, digest).run_here()


def records(url: str) -> dict[str, Any]:
    """All records of a history, without times."""
    found = {}
    for path in sorted(Path(url).glob("trials/*/*.json")):
        found[str(path.relative_to(url))] = {k: v for k, v in json.loads(path.read_text()).items() if k != "seconds"}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tpe", "gp", "random"])
def test_a_search_interrupted_anywhere_ends_like_an_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    config = search_of(search={"kind": kind, "startup": 3, "seed": 5})
    whole = History(str(tmp_path / "whole"))
    by_proposals(config, whole, tuning_trials.parabola)
    expected = records(whole.url)
    assert len(expected) == 16
    values = [trial.result.value for trial in whole.trials()]
    assert max(values) > values[0]
    for number in range(8) if kind != "gp" else (0, 4):
        for begun in (False, True):
            cut = History(str(tmp_path / f"cut-{number}-{begun}"))
            for n in range(number + begun):
                shutil.copytree(whole.folder(n), cut.folder(n))
            if begun:
                (Path(cut.folder(number)) / "result.json").unlink()
            by_proposals(config, cut, tuning_trials.parabola)
            assert records(cut.url) == expected
            ran = [tuning_trials.attempts(cut.folder(n)) for n in range(8)]
            assert ran == [2 if begun and n == number else 1 for n in range(8)]


def test_proposals_are_those_of_optuna_for_the_history_and_the_seed_of_the_trial(tmp_path: Path) -> None:
    config = search_of(search={"startup": 3, "seed": 5})
    history = History(str(tmp_path))
    by_proposals(config, history, tuning_trials.parabola)
    distributions = {key: dimension.distribution() for key, dimension in config.space.items()}
    study = optuna.create_study(direction="maximize")
    for trial in history.trials():
        if trial.number > 0:
            study.sampler = TPESampler(n_startup_trials=3, seed=mix("proposal", 5, trial.number, 0) % 2**31)
            asked = study.ask(distributions)
            assert asked.params == trial.params
            study.tell(asked, state=TrialState.FAIL)  # for the one that is added in its place
        study.add_trial(create_trial(value=trial.result.value, params=trial.params, distributions=distributions))


def test_the_first_trial_is_the_config_as_given_whether_or_not_it_is_in_the_space(tmp_path: Path) -> None:
    for given, params in (({"x": 1, "c": "a"}, {"x": 1, "c": "a"}), (None, {})):
        history = History(str(tmp_path / str(given)))
        proposals = Proposals(search_of(), history, [], given=given, same=digest)
        assert proposals.suggest("first") == {"number": 0, "params": params}
        proposals.on_trial_complete("first", {"value": 1.0})
        assert proposals.suggest("second")["number"] == 1


@pytest.mark.parametrize("kind", ["tpe", "random"])
def test_nothing_is_tried_twice_and_all_of_a_small_space_is(kind: str, tmp_path: Path) -> None:
    config = search_of(space=LEVELS, trials=30, search={"kind": kind, "startup": 2})
    history = History(str(tmp_path))
    by_proposals(config, history, tuning_trials.parabola, most=4)
    by_proposals(config, history, tuning_trials.parabola)
    tried = [trial.params["x"] for trial in history.trials()[1:]]
    assert sorted(tried) == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
@hypothesis.given(
    spans=st.lists(st.floats(0.1, 30), min_size=32, max_size=32),
    minutes=st.floats(0.02, 6),
    again=st.booleans(),
    cuts=st.sets(st.integers(0, 31), max_size=6),
)
def test_a_search_ends_when_its_minutes_are_up_and_keeps_every_trial_that_ended(
    spans: list[float], minutes: float, again: bool, cuts: set[int]
) -> None:
    """Trials look at the clock four times, and the machine may take any time in between; some looks end the process."""
    clock, finished = SimpleNamespace(now=0.0), list[float]()
    moves = zip(itertools.count(), itertools.cycle(spans), strict=False)
    clock.monotonic = lambda: clock.now

    def trial(params: Params, _folder: str, _report: object) -> float:
        with stop_on_signal() as stopping:
            for _ in range(4):
                move, span = next(moves)
                clock.now += span
                if stopping() or move in cuts:
                    raise Stopped
        finished.append(-abs(params["x"] - 3))
        return finished[-1]

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for module in ("tuning.tune", "tuning.history", "signals"):
            patch.setattr(f"ltrscale.{module}.time", clock)
        history, limited = History(folder), search_of(trials=8, minutes=minutes)
        left = 1 + again  # the same again tries nothing more
        while left:
            reason = ""
            try:
                by_proposals(limited, history, trial)
            except Stopped:
                continue  # the process has ended, and the same command follows
            except InputError as error:
                reason = str(error)
            left -= 1
            assert ("no trial completed: 1 " in reason) == (not finished)
            assert (LATE in reason) == (not finished) or cuts
        trials = history.trials()
        assert [each.result.value for each in trials if each.result.state == "complete"] == finished
        rounding = 0.001 * len(cuts)
        assert clock.now <= 60 * minutes + max(spans) + rounding
        assert len(finished) == 8 or clock.now >= 60 * minutes - rounding
        assert all(each.result.reason == LATE or cuts for each in trials[len(finished) :])
        assert len(trials) - len(finished) <= 1


def test_a_late_search_counts_the_trials_that_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history = History(str(tmp_path))
    for number in range(2):
        history.begin(Trial(number=number, params={"x": number, "c": "a"}))
    history.end(0, Result(state="complete", value=1.0, seconds=30.0))
    keep_unfinished(history.folder(1), 40.0)
    with caplog.at_level(logging.INFO, "ltrscale"):
        by_proposals(search_of(minutes=1), history, tuning_trials.parabola)
    assert "its 1 minutes are up after 1 trials" in caplog.text


def test_an_attempt_leaves_its_time_even_if_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ltrscale.tuning.history._KEEP_S", 0.001)
    history, before = History(str(tmp_path)), 1000.0
    history.begin(Trial(number=0, params={}))
    keep_unfinished(history.folder(0), before)

    def trial(*_: object) -> float:
        wait_until(lambda: history.trials()[0].result.seconds > before)  # which a kill would leave
        return 1.0

    assert attempt(trial, {}, history.folder(0), None).seconds > before


SPACES = st.fixed_dictionaries(
    {
        "x": st.tuples(st.integers(0, 9), st.integers(1, 9)).map(lambda ends: {"low": ends[0], "high": sum(ends)}),
        "c": st.sets(st.sampled_from("abcd"), min_size=1).map(lambda choices: {"choices": sorted(choices)}),
    }
)


@pytest.mark.slow
@hypothesis.settings(max_examples=15)
@hypothesis.given(spaces=st.lists(SPACES, min_size=2, max_size=3), kind=st.sampled_from(["tpe", "random"]))
def test_a_search_whose_space_changes_repeats_no_trial_that_lies_there(spaces: list[Any], kind: str) -> None:
    """It ends with as many trials of the new space, the earlier ones among them as they were; all others stay too."""
    with TemporaryDirectory() as url:
        for space in spaces:
            config = search_of(space=space, trials=5, search={"kind": kind, "startup": 2})
            before, history = records(url), History(url, config.space)
            known = ended(history.trials())
            assert known == [
                trial for trial in History(url).trials() if trial.number == 0 or is_in(config.space, trial.params)
            ]
            by_proposals(config, history, tuning_trials.parabola)
            after = records(url)
            assert {name: after[name] for name in before} == before
            assert len(after) - len(before) == 2 * max(0, 5 - len(known))
            assert all(tuning_trials.attempts(history.folder(n)) == 1 for n in range(len(after) // 2))
            proposed = [trial.params for trial in history.trials()[1:]]
            assert all(is_in(config.space, params) for params in proposed)
            assert len({digest(params) for params in proposed}) == len(proposed)


def test_the_sampler_knows_the_trials_of_an_earlier_space(tmp_path: Path) -> None:
    """Optuna's own study refuses a choice that is new; here it proposes near the best of both spaces."""
    narrow, wide = ({"x": SPACE["x"], "c": {"choices": list(choices)}} for choices in ("ab", "abc"))
    history = History(str(tmp_path))
    config = search_of(space=narrow, trials=5)
    by_proposals(config, history, tuning_trials.parabola)
    config = search_of(space=wide, trials=9, search={"startup": 2, "seed": 5})
    proposals = Proposals(config, history, history.trials(), given=None, same=digest)
    assert [trial.value for trial in proposals._study.trials] == [
        trial.result.value for trial in ended(history.trials())
    ]
    sampled = {proposals.suggest(str(n))["params"]["c"] for n in range(30)}
    assert sampled == {"a", "b", "c"}


def test_a_failed_trial_is_not_repeated(tmp_path: Path) -> None:
    config = search_of(space={"what": {"choices": ["error", "nan"]}}, trials=10)
    history = History(str(tmp_path))
    for _ in range(2):
        by_proposals(config, history, tuning_trials.failing)
    assert [tuning_trials.attempts(history.folder(n)) for n in range(3)] == [1, 1, 1]
    assert len(history.trials()) == 3


def test_trials_are_compared_without_parameters_that_have_no_effect(tmp_path: Path) -> None:
    history = History(str(tmp_path))
    proposals = Proposals(search_of(), history, [], given={"x": 1, "c": "a"}, same=lambda params: str(params.get("c")))
    found = [proposals.suggest("0"), proposals.suggest("1"), proposals.suggest("2")]
    assert [p["params"]["c"] for p in found[:2]] == ["a", "b"]
    assert found[2] == "FINISHED"
    assert proposals.exhausted


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("input error", "this setting cannot be"),
        ("error", "ZeroDivisionError: division by zero"),
        ("nan", "the metric is nan"),
    ],
)
def test_what_a_trial_raises_is_its_one_line_reason(what: str, reason: str, tmp_path: Path) -> None:
    result = attempt(tuning_trials.failing, {"what": what}, str(tmp_path), None)
    assert (result.state, result.value, result.reason) == ("failed", None, reason)


@pytest.mark.parametrize("ending", [Stopped, UnavailableError])
def test_a_request_to_stop_and_an_outage_are_no_failures(tmp_path: Path, ending: type[Exception]) -> None:
    def ended_by(*_: object) -> float:
        raise ending("")

    with pytest.raises(ending):
        attempt(ended_by, {}, str(tmp_path), None)


def test_the_curve_goes_forward_and_stays_short() -> None:
    curve = _Curve(None)
    for step in range(1, 10_001):
        curve(step, -abs(step - 500))
        curve(step - 1, 99.0)  # a step that was passed
        curve(20_000, float("nan"))
    steps = [step for step, _ in curve.points]
    assert 50 < len(steps) < 200
    assert steps == sorted(set(steps))
    assert curve.points == [(step, -abs(step - 500)) for step in steps]


def running(number: int) -> Any:
    """A trial as Ray Tune passes it to its scheduler."""
    return SimpleNamespace(trial_id=f"running-{number}", config={"number": number})


def test_asha_knows_the_curves_of_earlier_trials_and_spares_the_config_as_given() -> None:
    past = [
        Trial(number=n, params={}, result=Result(state="complete", value=n, curve=((2, n), (4, n)))) for n in range(4)
    ]

    def decision(past: list[Trial], number: int, value: float) -> str:
        asha, trial = Asha(AshaConfig(grace=2, reduction=2), past), running(number)
        asha.on_trial_add(None, trial)
        assert asha.on_trial_result(None, trial, {"step": 1, "value": value}) == "CONTINUE"
        return asha.on_trial_result(None, trial, {"step": 2, "value": value})

    assert decision(past, 7, 1.0) == "STOP"
    assert decision(past, 7, 2.0) == "CONTINUE"
    assert decision([], 7, 1.0) == "CONTINUE"
    assert decision(past, 0, 1.0) == "CONTINUE"


def test_what_a_process_of_a_trial_raises_is_told_from_its_death(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = History(str(tmp_path))

    def errors_of(number: int, error: Exception) -> Ending:
        history.begin(Trial(number=number, params={}))
        (path := tmp_path / "error.pkl").write_bytes(cloudpickle.dumps(error))
        trial = SimpleNamespace(config={"number": number, "params": {}}, num_failures=2, pickled_error_file=str(path))
        ending = Ending(stopping=lambda: False, left_s=60)
        scribe = Scribe(history, [], ending, 8, report=lambda _: None, advance=lambda _: None)
        scribe.on_trial_recover(1, [], trial)
        scribe.on_trial_error(1, [], trial)
        return ending

    damaged, outage = InputError("interrupted.json: not JSON"), UnavailableError("bucket: no answer")
    errors_of(0, RayTaskError("train", "traceback", damaged).as_instanceof_cause())
    ended_by = errors_of(1, RayTaskError("train", "traceback", outage).as_instanceof_cause()).outage
    errors_of(2, RayActorError())
    results = [trial.result for trial in history.trials()]
    assert [result.state for result in results] == ["failed", "running", "failed"]
    assert results[0].reason == str(damaged)
    assert (type(ended_by), str(ended_by)) == (UnavailableError, str(outage))
    assert str(results[2].reason).startswith("its process died (RayActorError: ")
    starts = [record.message for record in caplog.records if record.message.endswith("; it starts again")]
    assert starts[:2] == [f"trial 0: {damaged}; it starts again", f"trial 1: {outage}; it starts again"]
    assert starts[2].startswith("trial 2: its process died (RayActorError: ")


def test_where_none_completes_the_most_common_reason_is_reported(tmp_path: Path) -> None:
    history = History(str(tmp_path))
    search = Search(search_of(), tuning_trials.parabola, history, None, digest)
    for number, reason in enumerate(["too wide", "no memory", "too wide"]):
        history.begin(Trial(number=number, params={}))
        history.end(number, Result(state="failed", reason=reason))
    with pytest.raises(InputError, match="all 3 trials failed, 2 of them with: too wide"):
        search._check_any_complete(history.trials())
    for number, result in ((3, Result(state="stopped", reason=LATE)), (4, Result(state="stopped"))):
        history.begin(Trial(number=number, params={}))
        history.end(number, result)
    history.begin(Trial(number=5, params={}))
    counts = "2 stopped, 3 failed, 1 interrupted"
    with pytest.raises(InputError, match=f"no trial completed: {counts}, 2 of them with: too wide"):
        search._check_any_complete(history.trials())
    history.end(5, Result(state="complete", value=1))
    search._check_any_complete(history.trials())


Run = Callable[..., list[Trial]]


@pytest.fixture
def run(ray_cluster: None, tmp_path: Path) -> Run:  # noqa: ARG001
    """Runs a search by Ray Tune below a temporary directory; returns its trials."""

    def search(trial: TrialFunction, given: Params | None, **values: Any) -> list[Trial]:
        history = History(str(tmp_path))
        Search(search_of(**values), trial, history, given, digest).run(lambda _: None)
        return history.trials()

    return search


@pytest.mark.ray
@pytest.mark.slow
def test_a_search_goes_on_though_trials_fail_and_processes_die_and_is_run_once(run: Run, tmp_path: Path) -> None:
    choices = ["nothing", "input error", "error", "nan", "dies", "dies once"]
    search = partial(run, tuning_trials.failing, None, space={"what": {"choices": choices}}, trials=20, concurrent=3)
    trials = search()
    found = {trial.params.get("what", "as given"): trial.result for trial in trials}
    states = {what: result.state for what, result in found.items() if result}
    good, bad = ("as given", "nothing", "dies once"), ("input error", "error", "nan", "dies")
    assert states == {**dict.fromkeys(good, "complete"), **dict.fromkeys(bad, "failed")}
    assert "its process died" in str(found["dies"])
    attempts = {
        trial.params.get("what"): tuning_trials.attempts(History(str(tmp_path)).folder(trial.number))
        for trial in trials
    }
    assert (attempts["dies"], attempts["dies once"], attempts["error"]) == (2, 2, 1)
    assert search() == trials, "it is not run again"


@pytest.mark.ray
@pytest.mark.slow
def test_an_outage_ends_a_search_and_the_same_call_resumes_its_trial(run: Run, tmp_path: Path) -> None:
    history = History(str(tmp_path))
    search = partial(run, space={"what": {"choices": ["outage", "nothing"]}}, trials=2)
    with pytest.raises(UnavailableError, match=r"^bucket: no answer$"):
        search(tuning_trials.failing, {"what": "outage"})
    assert ended(history.trials()) == []
    search(tuning_trials.parabola, {"what": "outage"})
    assert [trial.result.state for trial in history.trials()] == ["complete"] * 2


@pytest.mark.ray
@pytest.mark.slow
def test_asha_stops_trials_that_lag_behind(run: Run, tmp_path: Path) -> None:
    trials = run(
        tuning_trials.slow,
        {"x": 5},
        space=LEVELS,
        trials=6,
        concurrent=2,
        asha={"grace": 4, "reduction": 2},
    )
    states = {trial.params["x"]: trial.result.state for trial in trials}
    assert states[5] == "complete"
    assert "stopped" in states.values()
    for trial in trials:
        ran_on = (Path(History(str(tmp_path)).folder(trial.number)) / "ran-to-the-end").exists()
        assert ran_on == (trial.result.state == "complete")
        assert trial.result.value == trial.params["x"]


@pytest.mark.ray
@pytest.mark.nightly
def test_a_search_under_ray_tune_ends_when_its_minutes_are_up(run: Run) -> None:
    search = partial(run, tuning_trials.slow, {"x": 1}, space={"x": {"low": 1, "high": 90, "integer": True}})
    trials = search(trials=90, minutes=0.2, concurrent=2)
    states = [trial.result.state for trial in ended(trials)]
    assert 0 < states.count("complete") < 90
    assert all(t.result.reason == LATE for t in trials if t.result.state != "complete")
    assert len(search(trials=len(trials) + 1)) == len(trials) + 1, "it continues without a limit"


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.usefixtures("ray_cluster")
def test_a_search_that_is_asked_to_stop_goes_on_later_with_more_trials_if_so_wanted(tmp_path: Path) -> None:
    history = History(str(tmp_path))
    short, longer = (
        Search(search_of(space=LEVELS, trials=trials), tuning_trials.slow, history, {"x": 1}, digest)
        for trials in (4, 5)
    )
    with pytest.raises(Stopped):
        short.run(lambda _: None, stopping=lambda: history.result(0) is not None)
    trials = history.trials()
    assert len(ended(trials)) < 4
    longer.run(lambda _: None)
    assert [trial.result.state for trial in ended(history.trials())] == ["complete"] * 5
    assert history.trials()[0] == trials[0]
