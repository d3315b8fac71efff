"""The trials of an evaluation: the bundles or committed scores of each method, with what they state of themselves."""

from dataclasses import dataclass
from typing import Self

from ltrscale.bundle import load
from ltrscale.bundle.contents import Provenance
from ltrscale.config import digest, validate
from ltrscale.data.dataset.selection import Selection
from ltrscale.evaluation.measure.debiasing import debiased, otherwise
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.evaluation.measure.shown import AS_SHOWN, POSITIONS, has_positions
from ltrscale.ranking.loss import SigmoidConfig


@dataclass(frozen=True)
class MethodTrial:
    """The `number`-th bundle of a method, or its scores."""

    method: str
    number: int
    url: str
    kind: str
    labelled_groups: int | None = None
    """Number of labelled groups that it was trained on; None if the bundle does not state it."""
    validation_groups: int | None = None
    """Number of labelled groups that it was selected on; None if the bundle does not state it."""
    labels: str | None = None
    """Identity of all these labels; None if the bundle does not state it."""
    debiased: str | None = None
    """How its training corrected for positions."""
    otherwise: str | None = None
    """Identity of its settings but for that and the seed."""
    logits: bool = False
    """Whether its scores are logits of labels 0 and 1, for it was trained with the pointwise sigmoid loss."""

    @classmethod
    def of_bundle(cls, method: str, number: int, url: str) -> Self:
        """What a bundle states of itself."""
        bundle = load(url)
        return cls(
            method,
            number,
            url,
            bundle.kind,
            labelled_groups=bundle.count("labelled_groups"),
            validation_groups=bundle.count("validation_groups"),
            labels=validate(Provenance, bundle.made_by, url).labels(),
            debiased=debiased(bundle.config),
            otherwise=digest(otherwise(bundle.config)),
            logits=bundle.config.get("loss") == SigmoidConfig().model_dump(mode="json"),
        )


def trials_of(config: EvaluateConfig, test: Selection) -> list[MethodTrial]:
    """The trials of each method, in the order of the report; the order that was shown comes last, if there is one."""
    trials = [MethodTrial(name, 0, url, "scores") for name, url in config.scores.items()]
    for name, urls in config.models.items():
        trials += [MethodTrial.of_bundle(name, i, url) for i, url in enumerate(urls)]
    if config.as_shown and has_positions(test):
        trials.append(MethodTrial(AS_SHOWN, 0, POSITIONS, "order shown"))
    return trials
