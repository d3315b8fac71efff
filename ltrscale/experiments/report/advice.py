"""The next step after an evaluation: a sentence, and the command that takes it."""

import json
import shlex
from collections.abc import Sequence

from ltrscale.evaluation.bounds import GateVerdict
from ltrscale.evaluation.measure.page import best_of, competitor_of, is_beyond_chance, serving_of
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import AS_SHOWN
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.progress import called


def next_step(evaluation: Evaluation, verdict: GateVerdict | None, features: Sequence[str] = ()) -> tuple[str, str]:
    """The next step: a sentence, and its command if any; `features` are suspicious ones."""
    best, competitor, serving = best_of(evaluation), competitor_of(evaluation), serving_of(evaluation)
    if verdict is not None:
        if verdict.passed:
            return "Next: the gate lets the candidate pass; jobs.export and jobs.predict take its bundle.", ""
        return f"Next: the gate refuses the candidate, {verdict.reasons[0]}; its section has every bound.", ""
    if best is None:
        return "", ""
    if features:
        return _answer(features)
    if competitor is None or serving is None:
        return "Next: evaluate another method beside it, such as trees (methods of jobs.pipeline has several).", ""
    shown = evaluation.leads.get(AS_SHOWN)
    if shown is not None and shown.difference > 0:
        return (
            "Next: labels that the shown order favours less, such as clicks corrected for position (jobs.clicks), "
            "or a test on users (jobs.interleave)."
        ), ""
    # the order shown has no bundle: a gate compares with the baseline instead, if that is not the best itself
    production = competitor if serving == AS_SHOWN and competitor == evaluation.baseline else serving
    leads = [evaluation.leads[name] for name in {competitor, production} - {best.name}]
    if any(lead.p_holm is None for lead in leads):
        return (
            "Next: more draws of labels, with the config of the pipeline; models that are trained are kept:",
            f"{called('pipeline')} --config pipeline.yaml --set 'seeds={list(range(FEWEST_DRAWS))}'",
        )
    if not all(map(is_beyond_chance, leads)):
        return "Next: take the one that costs less, or see with jobs.study what more labels, draws or groups bring.", ""
    if production == best.name:
        return f"Next: keep {production}; nothing here ranks better, and jobs.study shows what more labels bring.", ""
    return _gate(evaluation, production=production, candidate=best.name)


def _answer(features: Sequence[str]) -> tuple[str, str]:
    """What to do if the features are legitimate or not, and the command if not."""
    text = (
        f"Next: that answer. If yes, name {', '.join(features)} in bounds.expected of jobs.gate, which otherwise "
        "refuses what leans on it. If no, train without it, with the config of the pipeline:"
    )
    left_out = shlex.quote(f"splits.train.leave_out={json.dumps([*features], ensure_ascii=False)}")
    return text, f"{called('pipeline')} --config pipeline.yaml --set {left_out}"


def _gate(evaluation: Evaluation, *, production: str, candidate: str) -> tuple[str, str]:
    """A sentence, and the command of the gate if both methods have bundles."""
    bundles = {m.name: m.trials[0].url for m in evaluation.methods if m.name != AS_SHOWN and "scores" not in m.kinds}
    if not {production, candidate} <= bundles.keys():
        return f"Next: {candidate} may go into production; jobs.export and jobs.predict take its bundle.", ""
    text = f"Next: the gate, before {candidate} goes into production, with your splits in place of the example's:"
    bundle_keys = {"production": production, "candidate": candidate}
    settings = " ".join(f"--set {key}={shlex.quote(bundles[name])}" for key, name in bundle_keys.items())
    return text, f"{called('gate')} --config jobs/configs/start/gate.yaml --set out=gate {settings}"
