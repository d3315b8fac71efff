"""The base class of metrics, their names, and the rules that a formula leaves open.

Two programs that both report NDCG@5 rarely agree, because a formula leaves much open: how to treat ties and groups
without a relevant document, and which gain and discount to use. `Rules` has one field for each such choice.
`ltrscale.ranking.libraries` lists the rules of other programs and computes a metric under any rules.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from ltrscale.config import Config

if TYPE_CHECKING:
    from torch import Tensor

    from ltrscale.batch import QueryGroups

_FORM = re.compile(r"(?P<kind>\w+)(\((?P<keys>\w+=[^=,()@\s]+(, ?\w+=[^=,()@\s]+)*)\))?(@(?P<k>[1-9]\d*))?")


class Name(NamedTuple):
    """The parts of a metric's name; as text it is the name.

    Example:
        >>> Name.parsed("rbp(persistence=0.9)@10")
        Name(kind='rbp', keys=(('persistence', '0.9'),), k=10)
        >>> str(Name.parsed("ndcg@5")), str(Name("rbp", (("persistence", "0.9"),)))
        ('ndcg@5', 'rbp(persistence=0.9)')
    """

    kind: str
    keys: tuple[tuple[str, str], ...] = ()
    """The metric's own keys that differ from their defaults, with their values."""
    k: int | None = None
    """The cut-off."""

    @classmethod
    def parsed(cls, text: str) -> Self:
        """The parts of a name.

        Raises:
            ValueError: the text is not a valid name, or states a key twice.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} has not the form kind(key=value)@k")
        keys = [key.strip().partition("=") for key in (match["keys"] or "").split(",") if key]
        if len({key for key, _, _ in keys}) < len(keys):
            raise ValueError(f"{text!r} states a key twice")
        cutoff = None if match["k"] is None else int(match["k"])
        return cls(match["kind"], tuple((key, value) for key, _, value in keys), cutoff)

    def __str__(self) -> str:
        """The name."""
        keys = f"({','.join(f'{key}={value}' for key, value in self.keys)})" if self.keys else ""
        return self.kind + keys + (f"@{self.k}" if self.k is not None else "")


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
        texts = [_TEXTS[name][value] for name, value in self if name in names]
        return "; ".join(text.format(threshold=threshold) for text in texts if text)


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
"""Each value of each rule in a few words; empty where the default needs no mention."""


FirstRanks = Annotated[int, Field(ge=1, description="Cut-off: the first ranks that count.")]
Threshold = Annotated[float, Field(gt=0, description="Documents are relevant from this label on.")]
_SET_FOR_ALL = ("kind", "k", "threshold", "grades", "gains")
"""Keys that an evaluation sets for every metric that has them."""


class Metric(Config):
    """A metric as a config selects it.

    It may have a cut-off `k`, a `threshold`, the lowest relevant label, and its own keys, which its name states.
    """

    kind: str
    function: ClassVar[Callable[..., Tensor]]
    """Computes the value of each group, shape [Q], from scores, labels, offsets and the keys."""
    label: ClassVar[str] = ""
    """The name in tables, without the cut-off; the kind in capitals by default."""
    definition: ClassVar[str] = ""
    """One sentence that defines the metric in reports, without the policy that all metrics share."""
    normalised: ClassVar[bool] = True
    """True if the best order always has value 1."""
    cut_as_precision: ClassVar[bool] = False
    """True if an evaluation uses the cut-offs of precision, not those of NDCG."""
    rules: ClassVar[Rules] = Rules()
    """The choices that the metric's formula leaves open."""
    ruled_by: ClassVar[tuple[str, ...]] = ()
    """Rules that affect it, besides ties, undefined groups and, if it has a threshold, relevance."""

    @classmethod
    def made(
        cls, *, k: int | None = None, threshold: float = 1.0, grades: int = 4, own: Iterable[tuple[str, str]] = ()
    ) -> Self:
        """Create the metric; values without a field are ignored, except for its own keys."""
        values = {"k": k, "threshold": threshold, "grades": grades}
        known_values = {name: value for name, value in values.items() if name in cls.model_fields and value is not None}
        return cls.model_validate(known_values | dict(own))

    @classmethod
    def needs_cutoff(cls) -> bool:
        """True if the metric always has a cut-off, as in `ndcg@5`."""
        return "k" in cls.model_fields and cls.model_fields["k"].default is not None

    @classmethod
    def own_keys(cls) -> tuple[str, ...]:
        """The keys stated in the metric's name: those that an evaluation does not set for all metrics."""
        return tuple(key for key in cls.model_fields if key not in _SET_FOR_ALL)

    @property
    def name(self) -> str:
        """The kind, its own keys that differ from their defaults, and the cut-off if there is one.

        Example:
            >>> from ltrscale.ranking.metrics import MRRConfig, NDCGConfig
            >>> NDCGConfig(k=10).name, MRRConfig().name
            ('ndcg@10', 'mrr')
        """
        values = self.model_dump()
        changed = {key: values[key] for key in self.own_keys() if values[key] != type(self).model_fields[key].default}
        keys = tuple((key, str(value).removesuffix(".0")) for key, value in changed.items())
        return str(Name(self.kind, keys, values.get("k")))

    @classmethod
    def affected_by(cls) -> tuple[str, ...]:
        """The rules that matter to the metric."""
        relevant = ("relevant",) if "threshold" in cls.model_fields else ()
        return ("scores", "ties", *relevant, *cls.ruled_by, "undefined")

    @property
    def policy(self) -> str:
        """The rules in one line, stored with every figure.

        Example:
            >>> from ltrscale.ranking.metrics import MRRConfig
            >>> MRRConfig().policy
            'ties by expectation; relevant from label 1 on; groups without relevance left out'
        """
        values = self.model_dump()
        own_settings = [f"{key} {values[key]}" for key in self.own_keys()]
        return "; ".join([*own_settings, self.rules.text(self.affected_by(), threshold=values.get("threshold", 1.0))])

    def values(self, scores_N: Tensor, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """The value of each group, shape [Q]; NaN where it is undefined."""
        settings = {name: value for name, value in self if name != "kind"}
        return self.function(scores_N, labels_N, offsets_Q1, **settings)

    def values_on(self, scores_N: Tensor, groups: QueryGroups) -> Tensor:
        """Like `values`, for labelled groups; a metric may read more than their labels."""
        assert groups.labels_N is not None
        return self.values(scores_N, groups.labels_N, groups.offsets_Q1)

    def divisor(self, labels_N: Tensor, offsets_Q1: Tensor) -> Tensor:
        """The normaliser that depends on all relevant documents of a group, shape [Q]; 0 if there are none.

        It is 1 for a metric without such a normaliser. `Judged` replaces the list's by that of all judged documents.
        """
        return (~self.values(labels_N, labels_N, offsets_Q1).isnan()).double()
