"""The opening of a report: figures to sentences, in worked cases and awkward ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ltrscale.evaluation.bounds import Check, GateVerdict
from ltrscale.evaluation.measure.drift import ByPeriod, FeatureDrift, PeriodDrift
from ltrscale.evaluation.measure.outliers import OutlierDetector
from ltrscale.evaluation.measure.page import _charts, headline, leaderboard, opening
from ltrscale.evaluation.measure.periods import drifted
from ltrscale.evaluation.measure.report import EvaluatedData, Evaluation, MethodResult, MethodTrial
from ltrscale.evaluation.measure.slices import ALL, OUTLIERS
from ltrscale.evaluation.statistics.summarise import Comparison, Scope, Summary
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
            trials=(MethodTrial(url=f"runs/{name}", kind=KINDS.get(name, "neural")),),
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
        leave_out_constant=False,
        policies={},
        resamples=99,
        test=test,
        conditions={},
        corrected=None,
        detector=OutlierDetector(data="", features=(), gap=None, share=0, rules={}),
    )


THREE = {"net": 0.55, "gbdt": 0.53, "as_shown": 0.5}
TWO = {"net": 0.55, "gbdt": 0.53}
AHEAD = {"gbdt": lead(-0.02, 0.01)}
ENGINE = {"engine": 0.5, "bm25": 0.45, "gbdt": 0.53, "net": 0.55, "as_shown": 0.56}
OF_NET = {"engine": lead(-0.05, 0.01), "bm25": lead(-0.1, 0.01), "gbdt": lead(-0.02, 0.01), "as_shown": lead(0.01, 0.5)}
SLICES = {
    "query=long": (300, {"net": lead(-0.03, 0.02)}),
    "period=W07": (400, {"net": lead(-0.01, 0.6)}),
    "period=W08": (396, {"net": lead(0.03, 0.01)}),
    "device=tv": (99, {"net": lead(-0.2, 0.01)}),  # too small to be spoken of
}
GAINS = {"gbdt": 0.7, "net": 0.6}
CASES = {
    "beside what was shown, and trees": evaluation(
        THREE, {"gbdt": lead(-0.02, 0.01), "as_shown": lead(-0.05, 0.001)}, baseline="gbdt"
    ),
    "a lead that may be chance": evaluation(
        THREE, {"gbdt": lead(-0.02, 0.2, detectable=0.04), "as_shown": lead(-0.05, 0.001)}, baseline="gbdt"
    ),
    "a tiny lead": evaluation({"net": 0.55, "gbdt": 0.549}, {"gbdt": lead(-0.001, 0.9)}, baseline="gbdt"),
    "nothing differs": evaluation({"net": 0.55, "gbdt": 0.55}, {"gbdt": lead(0.0, 1.0)}, baseline="gbdt"),
    "one method alone": evaluation({"net": 0.55}, {}),
    "no baseline": evaluation(TWO, AHEAD),
    "the baseline is best itself": evaluation(
        {"gbdt": 0.55, "net": 0.53},
        {"net": lead(-0.02, 0.01)},
        baseline="gbdt",
        slices={"device=tv": (120, {"net": lead(0.03, 0.01)}), "device=phone": (400, {"net": lead(-0.05, 0.01)})},
    ),
    "one draw": evaluation(TWO, {"gbdt": lead(-0.02, 0.01, draws=1)}, baseline="gbdt"),
    "three draws": evaluation(TWO, {"gbdt": lead(-0.02, None, draws=3)}, baseline="gbdt"),
    "what was shown is ahead, and no winner": evaluation(
        {"as_shown": 0.55, "net": 0.52, "gbdt": 0.53},
        {"net": lead(-0.01, 0.3), "as_shown": lead(0.02, 0.01)},
        baseline="gbdt",
    ),
    "level with what was shown": evaluation({"net": 0.55, "as_shown": 0.55}, {"as_shown": lead(0.0, 1.0)}),
    "of the scores alone the best serves": evaluation(ENGINE, OF_NET, baseline="gbdt"),
    "a baseline that learns nothing serves": evaluation(ENGINE, OF_NET, baseline="bm25"),
    "a score that no model beats": evaluation(
        {"engine": 0.55, "net": 0.5}, {"net": lead(-0.05, 0.01)}, baseline="engine"
    ),
    "production": evaluation(
        {"production": 0.55, "candidate": 0.56, "as_shown": 0.5},
        {"production": lead(-0.01, 0.4), "as_shown": lead(-0.06, 0.01)},
        baseline="production",
    ),
    "the best of all is a score, and the only model is behind it": evaluation(
        {"engine": 0.6, "net": 0.55, "bm25": 0.5},
        {"net": lead(-0.05, 0.01), "bm25": lead(-0.1, 0.01)},
        baseline="bm25",
        against={"net": {PRIMARY: lead(0.05, 0.01)}, "engine": {PRIMARY: lead(0.1, 0.01)}},
    ),
    "the baseline is best, and no model serves": evaluation(
        {"gbdt": 0.55, "net": 0.53, "as_shown": 0.5},
        {"net": lead(-0.02, 0.01), "as_shown": lead(-0.05, 0.01)},
        baseline="gbdt",
    ),
    "a score serves beside a baseline that learns": evaluation(
        {"net": 0.55, "gbdt": 0.53, "engine": 0.5},
        {"gbdt": lead(-0.02, 0.01), "engine": lead(-0.05, 0.01)},
        baseline="gbdt",
    ),
    "gains": evaluation(TWO, AHEAD, baseline="net", against={"gbdt": {GAIN: lead(0.1, 0.01)}}, gains=GAINS),
    "behind on slices": evaluation(TWO, AHEAD, baseline="gbdt", slices=SLICES),
    "behind on no slice": evaluation(TWO, AHEAD, baseline="gbdt", slices={"period=W08": SLICES["period=W08"]}),
    "no group defines the metric": evaluation({"net": None, "gbdt": None}, {}),
}
GOLDEN = Path(__file__).with_name("openings.txt")
"""What each case says: the headline, the opening, the next step; read a change of it as a reader of a report would."""


def said(found: Evaluation) -> str:
    return "\n".join(filter(None, [headline(found), *opening(found), *next_step(found, None)]))


def test_every_case_says_what_it_should() -> None:
    assert "\n\n".join(f"[{name}]\n{said(found)}" for name, found in CASES.items()) + "\n" == GOLDEN.read_text()


def test_leads_from_what_was_shown_are_refused() -> None:
    with pytest.raises(ValueError, match="its leads are not those of gbdt"):
        evaluation({"gbdt": 0.53, "as_shown": 0.55}, {"gbdt": lead(-0.02, 0.01)}, baseline="gbdt")


def test_the_leaderboard_is_sorted_with_what_was_shown_below_it() -> None:
    means = {"as_shown": 0.56, "gbdt": 0.53, "none": None, "net": 0.55}
    found = evaluation(means, {}, baseline="gbdt")
    assert [row[0] for row in leaderboard(found).rows] == ["net", "gbdt", "none", "as_shown"]
    chart = next(_charts(found)).spec["data"]["values"]
    series = ["method", "baseline", "method", "reference"]
    assert [row["series"] for row in chart] == series
    without = evaluation(means, {}, baseline="gbdt", slices={OUTLIERS: (0, {})})
    assert "Outlier-NDCG@5 (n=11)" in leaderboard(found).header
    assert not any("Outlier" in text for text in leaderboard(without).header)
    by_gains = leaderboard(CASES["gains"])
    assert by_gains.header[:3] == ["method", "NDCG@5", "Gain-NDCG@5"]
    assert [row[:3] for row in by_gains.rows] == [["net", "0.5500", "0.6000"], ["gbdt", "0.5300", "0.7000"]]


@pytest.mark.parametrize(
    ("passed", "words"), [(True, "lets the candidate pass"), (False, "refuses the candidate, worse")]
)
def test_the_verdict_of_a_gate_is_thenext_step(passed: bool, words: str) -> None:
    checks = (Check(bound="margin", where="all", holds=passed, reason="worse by .02"),)
    verdict = GateVerdict(passed=passed, primary=PRIMARY, checks=checks, not_judged=(), not_excluded=())
    assert words in next_step(CASES["no baseline"], verdict)[0]


def period(**psi: float) -> PeriodDrift:
    features = {name: FeatureDrift(psi=value, missing=0.0) for name, value in psi.items()}
    counts: dict[str, Any] = {"groups": 9, "documents": 90, "length": 10.0, "length_psi": 0.0}
    return PeriodDrift(**counts, features=features, spreads={}, labels=None)


def test_one_feature_far_out_is_named_beside_a_small_median() -> None:
    flat = {f"f_{i}": 0.0003 for i in range(9)}
    train = period(**dict.fromkeys(flat, 0.0), price=0.0)
    drift = ByPeriod(train=train, periods={"W07": period(**flat, price=0.02), "W08": period(**flat, price=1.286)})
    assert drifted(drift) == (
        "Features that drifted most, by their PSI: price 1.286 in W08; the median of the 10 features is at most 0.0003."
    )
    none = ByPeriod(train=train, periods={"W07": period(**flat, price=0.02)})
    assert drifted(none) == (
        "No feature has drifted: the largest PSI is that of price 0.020 in W07, and the median of the 10 features is "
        "at most 0.0003."
    )
