"""The opening of a report: figures to sentences, in worked cases and awkward ones."""

from collections.abc import Mapping
from typing import Any

import pytest

from ltrscale.evaluation.measure.opening import best_of, headline, opening
from ltrscale.evaluation.measure.outliers import OutlierDetector
from ltrscale.evaluation.measure.page import leaderboard, leaders_chart
from ltrscale.evaluation.measure.report import EvaluatedData, Evaluation, MethodResult
from ltrscale.evaluation.measure.slices import ALL, OUTLIERS
from ltrscale.evaluation.statistics.summarise import Comparison, Scope, Summary
from ltrscale.evaluation.weeks.decay import drifted
from ltrscale.evaluation.weeks.drift import Drift, FeatureDrift, PeriodDrift
from ltrscale.evaluation.weeks.verdict import Check, Verdict
from ltrscale.experiments.report.make import next_step

PRIMARY, GAIN = "ndcg@5", "gain_ndcg@5"
KINDS = {"gbdt": "trees", "engine": "feature", "bm25": "feature", "as_shown": "order shown"}


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
    against: Mapping[str, dict[str, Comparison]] | None = None,
    gains: Mapping[str, float] | None = None,
) -> Evaluation:
    """An evaluation of these means, also by `gains`; slices have their number of groups.

    Theirs, and `against`, are differences from the baseline.
    """
    slices = {OUTLIERS: (11, {}), **(slices or {})}
    methods = tuple(
        MethodResult(
            name=name,
            bundles=() if name == "as_shown" else (f"runs/{name}",),
            kinds=(KINDS.get(name, "neural"),),
            labelled_groups=(75,),
            validation_groups=(20,),
            labels=(None,),
            debiased=(None,),
            otherwise=(None,),
            calibration=(None,),
            slices={
                ALL: Scope(
                    summaries={PRIMARY: summary(mean)} | ({GAIN: summary(gains[name])} if gains else {}),
                    comparisons=against.get(name, {}) if against else {},
                )
            }
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
REFERENCE = "That is a reference and no rival: labels of people who saw it, such as clicks, favour it."
THREE = {"net": 0.55, "gbdt": 0.53, "as_shown": 0.5}


def test_the_best_is_put_beside_what_was_shown_and_trees_each_with_its_interval() -> None:
    found = evaluation(THREE, {"gbdt": lead(-0.02, 0.01), "as_shown": lead(-0.05, 0.001)}, baseline="gbdt")
    assert opening(found) == [
        FIRST,
        "It is ahead by 0.0200 [0.0100, 0.0300] (+3.8%) over trees (gbdt).",
        "More than chance is its lead over gbdt.",
        OF_BOTH,
        ON_NO_SLICE,
        f"What was shown (as_shown) is 0.0500 [0.0400, 0.0600] behind net. {REFERENCE}",
    ]
    assert next_step(found, None)[1] == (
        "python -m jobs.gate --config jobs/configs/start/gate.yaml --set out=gate --set production=runs/gbdt "
        "--set candidate=runs/net"
    )


def test_what_is_not_shown_is_not_said() -> None:
    leads = {"gbdt": lead(-0.02, 0.2, detectable=0.04), "as_shown": lead(-0.05, 0.001)}
    found = evaluation(THREE, leads, baseline="gbdt")
    assert opening(found)[2] == "It cannot be told from gbdt (p 0.2000): their order may be chance."
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


def test_what_was_shown_is_a_reference_and_never_the_winner() -> None:
    leads = {"net": lead(-0.01, 0.3), "as_shown": lead(0.02, 0.01)}
    found = evaluation({"as_shown": 0.55, "net": 0.52, "gbdt": 0.53}, leads, baseline="gbdt")
    best = best_of(found)
    assert best is not None
    assert best.name == "gbdt"
    assert [method.name for method in found.ranked] == ["gbdt", "net", "as_shown"]
    assert opening(found)[0].startswith("gbdt ranks best: NDCG@5 0.5300 ")
    assert f"What was shown (as_shown) is 0.0200 [0.0100, 0.0300] ahead of gbdt. {REFERENCE}" in opening(found)
    assert headline(found) == (
        "No model ranks better than what was shown (as_shown), which labels such as clicks favour: "
        "NDCG@5 -0.0200 [-0.0300, -0.0100] (-3.6%) for gbdt, the best"
    )
    assert "jobs.interleave" in next_step(found, None)[0]
    level = evaluation({"net": 0.55, "as_shown": 0.55}, {"as_shown": lead(0.0, 1.0)})
    assert f"What was shown (as_shown) is level with net, perhaps by chance. {REFERENCE}" in opening(level)


def test_leads_from_what_was_shown_are_refused() -> None:
    with pytest.raises(ValueError, match="its leads are not those of gbdt"):
        evaluation({"gbdt": 0.53, "as_shown": 0.55}, {"gbdt": lead(-0.02, 0.01)}, baseline="gbdt")


ENGINE = {"engine": 0.5, "bm25": 0.45, "gbdt": 0.53, "net": 0.55, "as_shown": 0.56}
OF_NET = {"engine": lead(-0.05, 0.01), "bm25": lead(-0.1, 0.01), "gbdt": lead(-0.02, 0.01), "as_shown": lead(0.01, 0.5)}


@pytest.mark.parametrize(
    ("means", "leads", "baseline", "said"),
    [
        (
            ENGINE,
            OF_NET,
            "gbdt",  # of the scores alone, which learn nothing, the best serves
            "net ranks better than engine, the order of a score alone: NDCG@5 +0.0500 [+0.0400, +0.0600] (+10.0%)",
        ),
        (
            ENGINE,
            OF_NET,
            "bm25",
            "net ranks better than bm25, the order of a score alone: NDCG@5 +0.1000 [+0.0900, +0.1100] (+22.2%)",
        ),
        (
            {"engine": 0.55, "net": 0.5},
            {"net": lead(-0.05, 0.01)},
            "engine",
            "No model ranks better than engine, the order of a score alone: NDCG@5 -0.0500 [-0.0600, -0.0400] (-9.1%) "
            "for net, the best",
        ),
        (
            {"production": 0.55, "candidate": 0.56, "as_shown": 0.5},
            {"production": lead(-0.01, 0.4), "as_shown": lead(-0.06, 0.01)},
            "production",
            "candidate, the best model, cannot be told from production: NDCG@5 +0.0100 [+0.0000, +0.0200] (+1.8%)",
        ),
        (
            {"gbdt": 0.5, "net": 0.55},
            {"gbdt": lead(-0.05, None, draws=3)},
            "gbdt",
            "net against gbdt, the baseline: NDCG@5 +0.0500 (+10.0%), over too few draws of labels to judge",
        ),
        (
            {"gbdt": 0.5, "net": 0.55},
            {"gbdt": lead(-0.05, 0.01)},
            None,
            "net ranks better than gbdt, the next best: NDCG@5 +0.0500 [+0.0400, +0.0600] (+10.0%)",
        ),
        ({"net": 0.55}, {}, None, "net, with nothing beside it: NDCG@5 0.5500 [0.5400, 0.5600]"),
        ({"net": None, "gbdt": None}, {}, None, "No group defines NDCG@5"),
    ],
)
def test_the_headline_is_the_best_model_against_what_serves(
    means: Mapping[str, float | None], leads: Mapping[str, Comparison], baseline: str | None, said: str
) -> None:
    assert headline(evaluation(means, leads, baseline=baseline)) == said


def test_a_second_score_alone_is_no_model() -> None:
    """The best of all is a score, the baseline another one, and the only model is behind the first."""
    against: Any = {"net": {PRIMARY: lead(0.05, 0.01)}, "engine": {PRIMARY: lead(0.1, 0.01)}}
    leads = {"net": lead(-0.05, 0.01), "bm25": lead(-0.1, 0.01)}
    found = evaluation({"engine": 0.6, "net": 0.55, "bm25": 0.5}, leads, baseline="bm25", against=against)
    assert headline(found).startswith("net ranks better than bm25, the order of a score alone: NDCG@5 +0.0500 [")


def test_revenue_is_named_where_gains_are_set() -> None:
    worth, against = {"gbdt": 0.7, "net": 0.6}, {"gbdt": {GAIN: lead(0.1, 0.01)}}
    leads = {"gbdt": lead(-0.02, 0.01)}
    found = evaluation({"gbdt": 0.53, "net": 0.55}, leads, baseline="net", against=against, gains=worth)
    assert opening(found)[-1] == (
        "By what documents bring, their gains, gbdt ranks best: Gain-NDCG@5 0.7000 [0.6900, 0.7100], "
        "+0.1000 [+0.0900, +0.1100] over net."
    )
    table = leaderboard(found)
    assert table.header[:3] == ["method", "NDCG@5", "Gain-NDCG@5"]
    assert [row[:3] for row in table.rows] == [["net", "0.5500", "0.6000"], ["gbdt", "0.5300", "0.7000"]]


def test_the_leaderboard_is_sorted_with_what_was_shown_below_it() -> None:
    means = {"as_shown": 0.56, "gbdt": 0.53, "none": None, "net": 0.55}
    found = evaluation(means, {}, baseline="gbdt")
    assert [row[0] for row in leaderboard(found).rows] == ["net", "gbdt", "none", "as_shown"]
    chart = leaders_chart(found, ALL)["data"]["values"]
    assert [(row["name"], row["series"]) for row in chart] == [
        ("net", "method"),
        ("gbdt", "baseline"),
        ("none", "method"),
        ("as_shown", "reference"),
    ]
    without = evaluation(means, {}, baseline="gbdt", slices={OUTLIERS: (0, {})})
    assert "Outlier-NDCG@5 (n=11)" in leaderboard(found).header
    assert not any("Outlier" in text for text in leaderboard(without).header)


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
