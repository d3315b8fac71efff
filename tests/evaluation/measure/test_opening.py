"""The opening of a report: figures to sentences, in worked cases and awkward ones."""

from collections.abc import Mapping
from typing import Any

import pytest

from ltrscale.evaluation.measure.opening import best_of, opening
from ltrscale.evaluation.measure.outliers import OutlierDetector
from ltrscale.evaluation.measure.report import EvaluatedData, Evaluation, MethodResult
from ltrscale.evaluation.measure.slices import ALL, OUTLIERS
from ltrscale.evaluation.statistics.summarise import Comparison, Scope, Summary
from ltrscale.evaluation.weeks.decay import drifted
from ltrscale.evaluation.weeks.drift import Drift, FeatureDrift, PeriodDrift
from ltrscale.evaluation.weeks.verdict import Check, Verdict
from ltrscale.experiments.report.make import next_step

PRIMARY = "ndcg@5"


def summary(mean: float | None, groups: int = 796, draws: int = 5) -> Summary:
    low, high = (None, None) if mean is None else (mean - 0.01, mean + 0.01)
    counts: dict[str, Any] = {"groups": groups, "undefined": 0, "draws": draws}
    return Summary(mean=mean, low=low, high=high, trials=(mean,), std_error=None, as_zero=mean, as_one=mean, **counts)


def lead(difference: float, p: float | None, draws: int = 5, detectable: float | None = 0.02) -> Comparison:
    """A difference with an interval of .01 to either side; none where p is None."""
    low, high = (None, None) if p is None else (difference - 0.01, difference + 0.01)
    detectable = None if p is None else detectable
    return Comparison(difference=difference, low=low, high=high, p=p, p_holm=p, draws=draws, detectable=detectable)


def evaluation(
    means: Mapping[str, float | None],
    leads: Mapping[str, Comparison],
    *,
    baseline: str | None = None,
    slices: Mapping[str, tuple[int, Mapping[str, Comparison]]] | None = None,
) -> Evaluation:
    """An evaluation of these means; slices have their number of groups and differences from the baseline."""
    slices = {OUTLIERS: (11, {}), **(slices or {})}
    methods = tuple(
        MethodResult(
            name=name,
            bundles=() if name == "as_shown" else (f"runs/{name}",),
            kinds=("trees",) if name.startswith("gbdt") else ("feature",) if name == "as_shown" else ("neural",),
            labelled_groups=(75,),
            validation_groups=(20,),
            labels=(None,),
            debiased=(None,),
            otherwise=(None,),
            calibration=(None,),
            slices={ALL: Scope(summaries={PRIMARY: summary(mean)}, comparisons={})}
            | {
                slice_: Scope(
                    summaries={PRIMARY: summary(mean, groups)},
                    comparisons={PRIMARY: of[name]} if name in of else {},
                )
                for slice_, (groups, of) in slices.items()
            },
        )
        for name, mean in means.items()
    )
    counts = {ALL: 1007, **{name: groups for name, (groups, _) in slices.items()}}
    test = EvaluatedData(data=("data",), periods=("W07", "W08"), hash="0", groups=1007, documents=16284, slices=counts)
    return Evaluation(
        methods=methods,
        baseline=baseline,
        primary=PRIMARY,
        leads=dict(leads),
        relevant_from=1,
        leave_out_constant=False,
        policies={},
        resamples=99,
        test=test,
        conditions={},
        validation_groups=20,
        corrected=None,
        detector=OutlierDetector(data="", features=(), gap=None, share=0, rules={}),
    )


FIRST = "net ranks best: NDCG@5 0.5500 [0.5400, 0.5600] over 796 query groups of W07 to W08."
OF_BOTH = "5 draws of labels and the query groups are both samples: this holds for others of either."
ON_NO_SLICE = "No slice has 100 groups with the metric, so that it is not known on whom it is worse."
THREE = {"net": 0.55, "gbdt": 0.53, "as_shown": 0.5}


def test_the_best_is_put_beside_what_was_shown_and_trees_each_with_its_interval() -> None:
    found = evaluation(THREE, {"gbdt": lead(-0.02, 0.01), "as_shown": lead(-0.05, 0.001)}, baseline="gbdt")
    assert opening(found) == [
        FIRST,
        "It is ahead by 0.0500 [0.0400, 0.0600] (+10.0%) over what was shown and by 0.0200 [0.0100, 0.0300] (+3.8%) "
        "over trees (gbdt).",
        "Its lead over every other method is more than chance.",
        OF_BOTH,
        ON_NO_SLICE,
    ]
    assert next_step(found, None)[1] == (
        "python -m jobs.gate --config jobs/configs/start/gate.yaml --set out=gate --set production=runs/gbdt "
        "--set candidate=runs/net"
    )


def test_what_is_not_shown_is_not_said() -> None:
    leads = {"gbdt": lead(-0.02, 0.2, detectable=0.04), "as_shown": lead(-0.05, 0.001)}
    found = evaluation(THREE, leads, baseline="gbdt")
    assert opening(found)[2:4] == [
        "More than chance is its lead over as_shown.",
        "It cannot be told from gbdt (p 0.2000): their order may be chance.",
    ]
    assert next_step(found, None)[0].startswith(
        "Next: a difference of this size takes about 4.0 times the query groups"
    )
    tiny = evaluation({"net": 0.55, "gbdt": 0.549}, {"gbdt": lead(-0.001, 0.9)}, baseline="gbdt")
    assert "more than 20 times the data; take the one that costs less" in next_step(tiny, None)[0]


def test_nothing_differs() -> None:
    same = evaluation({"net": 0.55, "gbdt": 0.55}, {"gbdt": lead(0.0, 1.0)}, baseline="gbdt")
    assert opening(same) == [
        FIRST.replace("net ranks best", "net and gbdt rank equally well"),
        "It cannot be told from gbdt (p 1.0000): their order may be chance.",
        OF_BOTH,
        ON_NO_SLICE,
    ]
    assert "equally good here; take the one that costs less" in next_step(same, None)[0]


def test_one_method_alone_is_not_judged() -> None:
    found = evaluation({"net": 0.55}, {})
    assert opening(found) == [
        "net is the only method: NDCG@5 0.5500 [0.5400, 0.5600] over 796 query groups of W07 to W08. Alone it is "
        "neither good nor bad."
    ]
    assert next_step(found, None)[0].startswith("Next: evaluate another method beside it")


def test_without_a_baseline_the_leads_are_there_and_slices_say_nothing() -> None:
    found = evaluation({"gbdt": 0.53, "net": 0.55}, {"gbdt": lead(-0.02, 0.01)})
    assert opening(found) == [
        FIRST,
        "It is ahead by 0.0200 [0.0100, 0.0300] (+3.8%) over trees (gbdt).",
        "More than chance is its lead over gbdt.",
        OF_BOTH,
    ]


def test_the_baseline_may_be_best_itself() -> None:
    tv = {"net": lead(0.03, 0.01)}
    found = evaluation(
        {"gbdt": 0.55, "net": 0.53},
        {"net": lead(-0.02, 0.01)},
        baseline="gbdt",
        slices={"device=tv": (120, tv), "device=phone": (400, {"net": lead(-0.05, 0.01)})},
    )
    said = opening(found)
    assert said[0] == FIRST.replace("net", "gbdt")
    assert said[1] == "It is ahead by 0.0200 [0.0100, 0.0300] (+3.8%) over the next best (net)."
    assert said[-1] == (
        "Of 2 slices with at least 100 groups it is worse than net beyond chance on device=tv (-0.0300)."
    )
    assert "--set production=runs/net --set candidate=runs/gbdt" in next_step(found, None)[1]


def test_one_draw_holds_for_these_labels_and_few_judge_nothing() -> None:
    one = evaluation({"net": 0.55, "gbdt": 0.53}, {"gbdt": lead(-0.02, 0.01, draws=1)}, baseline="gbdt")
    assert opening(one)[3].startswith("There is one draw of labels: this holds for other queries, not for models")
    few = evaluation({"net": 0.55, "gbdt": 0.53}, {"gbdt": lead(-0.02, None, draws=3)}, baseline="gbdt")
    assert opening(few) == [
        FIRST,
        "It is ahead by 0.0200 (+3.8%) over trees (gbdt).",
        "Fewer than 5 shared draws of labels judge nothing (gbdt, 3).",
        ON_NO_SLICE,
    ]
    assert "--set 'seeds=[0, 1, 2, 3, 4]'" in next_step(few, None)[1]


def test_what_was_shown_may_be_best() -> None:
    found = evaluation({"gbdt": 0.53, "as_shown": 0.55}, {"gbdt": lead(-0.02, 0.01)}, baseline="gbdt")
    assert opening(found)[0] == (
        "No method ranks better than what was shown (as_shown): NDCG@5 0.5500 [0.5400, 0.5600] over 796 query groups "
        "of W07 to W08. Its labels favour it."
    )
    assert "jobs.interleave" in next_step(found, None)[0]


def test_slices_where_the_best_is_behind_are_named_with_what_is_chance() -> None:
    slices = {
        "query=long": (300, {"net": lead(-0.03, 0.02)}),
        "period=W07": (400, {"net": lead(-0.01, 0.6)}),
        "period=W08": (396, {"net": lead(0.03, 0.01)}),
        "device=tv": (99, {"net": lead(-0.2, 0.01)}),  # too small to be spoken of
    }
    found = evaluation({"net": 0.55, "gbdt": 0.53}, {"gbdt": lead(-0.02, 0.01)}, baseline="gbdt", slices=slices)
    assert opening(found)[4:] == [
        "Of 3 slices with at least 100 groups it is worse than gbdt beyond chance on query=long (-0.0300).",
        "Of 3 slices with at least 100 groups it is behind gbdt, perhaps by chance, on 1: period=W07 (-0.0100).",
    ]
    found = evaluation(
        {"net": 0.55, "gbdt": 0.53},
        {"gbdt": lead(-0.02, 0.01)},
        baseline="gbdt",
        slices={"period=W08": slices["period=W08"]},
    )
    assert opening(found)[4:] == ["Of 1 slice with at least 100 groups it is behind gbdt on none."]


def test_no_group_defines_the_metric() -> None:
    found = evaluation({"net": None, "gbdt": None}, {})
    assert best_of(found) is None
    assert opening(found) == ["No group defines NDCG@5, so nothing can be said; evaluate other periods."]
    assert next_step(found, None) == ("", "")


@pytest.mark.parametrize(
    ("passed", "said"), [(True, "lets the candidate pass"), (False, "refuses the candidate, worse")]
)
def test_the_verdict_of_a_gate_is_the_next_step(passed: bool, said: str) -> None:
    checks = (Check(bound="margin", where="all", holds=passed, reason="worse by .02"),)
    verdict = Verdict(passed=passed, primary=PRIMARY, checks=checks, not_judged=(), not_excluded=())
    assert said in next_step(evaluation(THREE, {"gbdt": lead(-0.02, 0.01)}, baseline="gbdt"), verdict)[0]


def period(**psi: float) -> PeriodDrift:
    features = {name: FeatureDrift(psi=value, missing=0.0) for name, value in psi.items()}
    counts: dict[str, Any] = {"groups": 9, "documents": 90, "length": 10.0, "length_psi": 0.0}
    return PeriodDrift(**counts, features=features, spreads={}, labels=None)


def test_one_feature_far_out_is_named_beside_a_small_median() -> None:
    flat = {f"f_{i}": 0.0003 for i in range(9)}
    train = period(**dict.fromkeys(flat, 0.0), price=0.0)
    drift = Drift(train=train, periods={"W07": period(**flat, price=0.02), "W08": period(**flat, price=1.286)})
    assert drifted(drift) == (
        "Features that drifted most, by their PSI: price 1.286 in W08; the median of the 10 features is at most 0.0003."
    )
    none = Drift(train=train, periods={"W07": period(**flat, price=0.02)})
    assert drifted(none) == (
        "No feature has drifted: the largest PSI is that of price 0.020 in W07, and the median of the 10 features is "
        "at most 0.0003."
    )
