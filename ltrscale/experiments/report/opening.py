"""The opening of the report: what the evaluation says in words, what to look at, and what to do next."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from ltrscale.errors import InputError
from ltrscale.evaluation.measure.opening import best_of, is_shown, opening, rival_of
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import AS_SHOWN
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.evaluation.weeks.decay import Decay, drifted
from ltrscale.evaluation.weeks.verdict import Verdict
from ltrscale.experiments.report.sources import Sources
from ltrscale.reports.document import Command, Text

T = TypeVar("T")
_ASKED = 2
"""Features of which the opening asks."""
_HOPELESS = 20.0
"""Times the groups and draws, beyond which a difference is not worth its proof."""


def paragraphs(sources: Sources, *, gate: str | None = None, drift: str | None = None) -> list[Text | Command]:
    """What the report opens with; sections say what cannot be read."""
    verdicts = list(_readable(_verdict(gate)))
    asked = dict(_readable(_unanswered(sources, verdicts)))
    texts = [" ".join(opening(sources.evaluation)), *_readable(_drift(drift)), *leaks([*asked.values()])]
    step, command = next_step(sources.evaluation, verdicts[0] if verdicts else None, [*asked])
    return [*(Text(text) for text in [*texts, step] if text), *([Command(command)] if command else [])]


def _readable(found: Iterator[T]) -> Iterator[T]:
    """What comes until a source cannot be read."""
    with suppress(InputError):
        yield from found


def _verdict(gate: str | None) -> Iterator[Verdict]:
    """That of the gate, if one is named."""
    if gate is not None:
        yield Verdict.read(gate)


def _drift(url: str | None) -> Iterator[str]:
    """The features that drifted most, where a drift report is named."""
    if url is not None:
        yield drifted(Decay.read(url).drift)


def _unanswered(sources: Sources, verdicts: Sequence[Verdict]) -> Iterator[tuple[str, str]]:
    """The features that rank too well alone, with the question, unless the `bounds.expected` of the gate has them."""
    checks = [check for verdict in verdicts for check in verdict.checks]
    expected = {check.where for check in checks if check.bound == "expected" and check.holds}
    yield from (item for item in sources.questions.items() if item[0] not in expected)


def leaks(questions: Sequence[str]) -> Iterator[str]:
    """The paragraph of these questions, of which it has the first."""
    asked = [*questions[:_ASKED]]
    if (more := len(questions) - _ASKED) > 0:
        asked.append(f"Section Features asks the same of {more} more.")
    if asked:
        yield f"Before this is believed: {' '.join(asked)} If not, leave it out (leave_out of a method)."


def next_step(evaluation: Evaluation, verdict: Verdict | None, asked: Sequence[str] = ()) -> tuple[str, str]:
    """What to do next: a sentence, and its command where there is one; `asked` are the features in question."""
    best, rival = best_of(evaluation), rival_of(evaluation)
    if verdict is not None:
        if verdict.passed:
            return "Next: the gate lets the candidate pass; jobs.export and jobs.predict take its bundle.", ""
        return f"Next: the gate refuses the candidate, {verdict.reasons[0]}; its section has every bound.", ""
    if best is None:
        return "", ""
    if asked:
        return _answer(asked)
    if rival is None:
        return "Next: evaluate another method beside it, such as trees (methods of jobs.pipeline has several).", ""
    if best.name == AS_SHOWN:
        return (
            "Next: labels that the shown order favours less, such as clicks corrected for position (jobs.clicks), "
            "or a test on users (jobs.interleave)."
        ), ""
    lead = evaluation.leads[rival]
    if lead.p_holm is None:
        return (
            "Next: more draws of labels, with the config of the pipeline; models that are trained are kept:",
            f"python -m jobs.pipeline --config pipeline.yaml --set 'seeds={list(range(FEWEST_DRAWS))}'",
        )
    if not is_shown(lead):
        return f"Next: {_more(lead.difference, lead.detectable)} jobs.study says what more labels would bring.", ""
    return _gate(evaluation, production=rival, candidate=best.name)


def _answer(asked: Sequence[str]) -> tuple[str, str]:
    """What either answer to the question leads to, and the command of a no."""
    text = (
        f"Next: that answer. If yes, name {', '.join(asked)} in bounds.expected of jobs.gate, which otherwise refuses "
        "what leans on it. If no, train without it, with the config of the pipeline:"
    )
    left_out = shlex.quote(f"splits.train.leave_out={json.dumps([*asked], ensure_ascii=False)}")
    return text, f"python -m jobs.pipeline --config pipeline.yaml --set {left_out}"


def _gate(evaluation: Evaluation, *, production: str, candidate: str) -> tuple[str, str]:
    """The command that judges one bundle against another; committed scores have none."""
    bundles = {m.name: m.bundles[0] for m in evaluation.methods if m.name != AS_SHOWN and "scores" not in m.kinds}
    if not {production, candidate} <= bundles.keys():
        return f"Next: {candidate} may go into production; jobs.export and jobs.predict take its bundle.", ""
    text = f"Next: the gate, before {candidate} goes into production, with your splits in place of the example's:"
    named = {"production": production, "candidate": candidate}
    settings = " ".join(f"--set {key}={shlex.quote(bundles[name])}" for key, name in named.items())
    return text, f"python -m jobs.gate --config jobs/configs/start/gate.yaml --set out=gate {settings}"


def _more(difference: float, detectable: float | None) -> str:
    """How much more data a difference of this size takes."""
    if not difference or not detectable:
        return "the two are equally good here; take the one that costs less."
    times = (detectable / difference) ** 2
    if times > _HOPELESS:
        return f"a difference this small takes more than {_HOPELESS:g} times the data; take the one that costs less."
    return f"a difference of this size takes about {max(times, 1.5):.1f} times the query groups and draws of labels."
