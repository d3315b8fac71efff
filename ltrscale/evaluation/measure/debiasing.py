"""What a report says of trainings that corrected for positions: which did, and what it did."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Trained(NamedTuple):
    """A method with bundles."""

    name: str
    debiased: tuple[str | None, ...]
    """How the training of each bundle corrected for positions."""
    otherwise: tuple[str | None, ...]
    """Identity of each bundle's settings but for that and the seed."""
    means: Mapping[str, float | None]
    """Its figures by their names in the report: the primary metric, and the corrected one if there is one."""

    @property
    def how(self) -> str:
        """The corrections of its bundles; "" for none."""
        return " and ".join(dict.fromkeys(each for each in self.debiased if each))


def debiased(config: Mapping[str, Any]) -> str | None:
    """How the training of a bundle with this config corrected for positions.

    Example:
        >>> debiased({"debias": {"kind": "dla"}}), debiased({"unbiased": True}), debiased({"debias": None})
        ('dla', 'unbiased', None)
    """
    if config.get("unbiased"):
        return "unbiased"
    return (config.get("debias") or {}).get("kind")


def otherwise(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a bundle but for that and the seed."""
    return {name: value for name, value in config.items() if name not in ("debias", "unbiased", "seed")}


def stated(methods: Sequence[Trained], *, shown: bool) -> list[str]:
    """Which trainings corrected for positions, and what that did where a method is there with and without it.

    Args:
        methods: those with bundles.
        shown: whether the order that was shown is known; where it is not, and no training corrected for it, nothing is
            said.
    """
    did, without = [m for m in methods if m.how], [m for m in methods if not m.how]
    if not did:
        said = "No training corrected for positions: networks do with debias (dla or weights), trees with unbiased."
        return [said] if shown and methods else []
    named = ", ".join(f"{method.name} ({method.how})" for method in did)
    others = ", ".join(method.name for method in without) or "none"
    twins = [(one, other) for one in did for other in without if one.otherwise == other.otherwise and all(one.debiased)]
    return [
        f"Trained with a correction for positions: {named}; without: {others}.",
        *(_effect(*pair) for pair in twins),
    ]


def _effect(one: Trained, other: Trained) -> str:
    """The differences of a method from its twin without the correction."""
    pairs = ((name, mean, other.means[name]) for name, mean in one.means.items())
    figures = [f"{name} {a - b:+.4f}" for name, a, b in pairs if a is not None and b is not None]
    return (
        f"{one.name} has the settings of {other.name}, and the correction: {', '.join(figures)}. Raw "
        "figures reward the order that was shown, so a correction that works may lower them."
    )
