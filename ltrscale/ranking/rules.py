"""The rules in which implementations of a metric differ, as one value with a short text.

Two programs that both report NDCG@5 rarely agree, because a formula leaves much open: what equal scores mean, what a
group without a relevant document counts, which gain and discount there are. `Rules` has one field for each such
choice. `ltrscale.ranking.libraries` says which rules other programs follow, and computes a metric under any rules.
"""

from collections.abc import Collection
from typing import Literal, Self

from pydantic import model_validator

from ltrscale.config import Config


class Rules(Config):
    """What a metric's formula leaves open; the defaults are the policy of this package.

    The order of the fields is the order in which `ltrscale.evaluation.measure.reconcile` switches them.

    Example:
        >>> Rules(ties="input").text(("ties", "gain", "undefined"))
        'ties in the order of the input; gain 2^y - 1; groups without relevance left out'
    """

    scores: Literal["given", "float32"] = "given"
    """Whether scores are rounded to float32 first, which makes ties of scores that differ by less."""
    ties: Literal["expected", "input", "item", "worst", "block"] = "expected"
    """Tied documents: the expectation over their orders, in the order of the input, by falling item name, the lower
    label first, or each at the last rank of the tied ones (average precision only)."""
    relevant: Literal["threshold", "from_1", "best"] = "threshold"
    """Relevant documents: from the metric's threshold on, from label 1 on, or with the group's best label."""
    gain: Literal["exponential", "linear"] = "exponential"
    """Gain of label y in DCG: 2^y - 1 or y."""
    discount: Literal["log2", "letor"] = "log2"
    """Discount in DCG: 1 / log2(1 + rank), or 1 at ranks 1 and 2 and 1 / log2(rank) after."""
    ideal: Literal["full", "ranked", "uncut"] = "full"
    """Ideal DCG: of the best k documents of the full list, of the k ranked first only, or of all documents at all
    ranks."""
    short: Literal["length", "padded", "zero"] = "length"
    """A list shorter than k is evaluated at its length, as if filled with documents that are not relevant, or is 0."""
    undefined: Literal["left_out", "zero", "one"] = "left_out"
    """A group without a relevant document is left out of the mean, or counts 0 or 1."""

    @model_validator(mode="after")
    def _has_an_order(self) -> Self:
        if self.ideal == "ranked" and self.ties == "expected":
            raise ValueError("ideal ranked needs an order of tied documents; set ties to input, item or worst")
        return self

    def text(self, names: Collection[str], *, threshold: float = 1.0) -> str:
        """The rules with these names in one line; `threshold` is the lowest label of a relevant document."""
        said = [_TEXTS[name][value] for name, value in self if name in names]
        return "; ".join(text.format(threshold=threshold) for text in said if text)


_TEXTS: dict[str, dict[str, str]] = {
    "scores": {"given": "", "float32": "scores in float32"},
    "ties": {
        "expected": "ties by expectation",
        "input": "ties in the order of the input",
        "item": "ties by falling item name",
        "worst": "of ties the lower label first",
        "block": "ties at their last rank",
    },
    "relevant": {
        "threshold": "relevant from label {threshold:g} on",
        "from_1": "relevant from label 1 on",
        "best": "relevant with the group's best label",
    },
    "gain": {"exponential": "gain 2^y - 1", "linear": "gain y"},
    "discount": {"log2": "discount 1 / log2(1 + rank)", "letor": "discount 1, 1, then 1 / log2(rank)"},
    "ideal": {
        "full": "ideal at k from the full list",
        "ranked": "ideal from the first k ranks",
        "uncut": "ideal at all ranks",
    },
    "short": {
        "length": "lists shorter than k at their length",
        "padded": "lists shorter than k filled up",
        "zero": "lists shorter than k count 0",
    },
    "undefined": {
        "left_out": "groups without relevance left out",
        "zero": "groups without relevance count 0",
        "one": "groups without relevance count 1",
    },
}
"""Each value of each rule in a few words; empty for what goes without saying."""
