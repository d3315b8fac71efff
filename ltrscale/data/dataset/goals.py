"""Goals: the labels by name of a data set that has several, and the weighted sum of them that a job reads as labels.

The first goal is the column `labels`, which says which groups have labels; each further one is a column `label_NAME`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from ltrscale.arrays import Floats
from ltrscale.errors import InputError, suggestion

GOAL = "label_"
"""What the columns of all goals but the first begin with."""
GoalName = Annotated[str, Field(pattern=r"^\w[\w.+-]*$", max_length=64)]
GoalWeight = Annotated[float, Field(ge=0, le=1e6)]
LabelWeights = tuple[tuple[str, float], ...]
"""The columns whose weighted sum serves as labels, in the order of their names, with weights above 0."""
LABELS: LabelWeights = (("labels", 1.0),)


def _some_weight(labels: str | dict[str, float]) -> str | dict[str, float]:
    if isinstance(labels, dict) and not any(labels.values()):
        raise ValueError("each weight is 0; give a goal a weight above 0")
    return labels


Labels = Annotated[GoalName | dict[GoalName, GoalWeight], AfterValidator(_some_weight)]
"""The labels that a job reads: `labels`, `relevance`, a goal, or a weighted sum of these."""


def goals_of(labels: str | Mapping[str, float]) -> dict[str, float]:
    """The goals that labels are the weighted sum of; none for `labels` and `relevance`, which have no name."""
    if isinstance(labels, str):
        return {} if labels in ("labels", "relevance") else {labels: 1.0}
    return dict(labels)


def goal_column(name: str, goals: Sequence[str]) -> str:
    """The column of a goal, or of `labels` and `relevance`, in a data set with these goals.

    Raises:
        InputError: the data set has no such goal; names the nearest.

    Example:
        >>> goal_column("click", ["click", "order"]), goal_column("order", ["click", "order"])
        ('labels', 'label_order')
    """
    if name in ("labels", "relevance") or name in goals[:1]:
        return "labels" if name in goals else name
    if name not in goals:
        known = suggestion(name, goals, "its goals are") if goals else "it has none; prepare it with columns.labels"
        raise InputError(f"labels: the data set has no goal {name!r}; {known}")
    return f"{GOAL}{name}"


def label_weights(labels: str | Mapping[str, float], goals: Sequence[str]) -> LabelWeights:
    """The columns of a split's labels, in a data set with these goals.

    Raises:
        InputError: as `goal_column`.

    Example:
        >>> label_weights({"order": 1.0, "click": 0.2, "cart": 0.0}, ["click", "cart", "order"])
        (('label_order', 1.0), ('labels', 0.2))
    """
    named = {labels: 1.0} if isinstance(labels, str) else labels
    return tuple(sorted((goal_column(name, goals), float(weight)) for name, weight in named.items() if weight))


def weighed(weights: LabelWeights, values: Callable[[str], Floats]) -> Floats:
    """The weighted sum of columns, whose values a function reads; a single column of weight 1 stays as it is.

    Example:
        >>> columns = {"labels": np.array([1, 0], np.float32), "label_order": np.array([1, 1], np.float32)}
        >>> weighed((("label_order", 1.0), ("labels", 0.5)), columns.__getitem__).tolist()
        [1.5, 1.0]
    """
    if len(weights) == 1 and weights[0][1] == 1.0:
        return values(weights[0][0])
    # in float64, so that 0.1 + 0.2 becomes the float32 nearest to 0.3
    total_N = sum(weight * values(name).astype(np.float64) for name, weight in weights)
    return np.asarray(total_N, np.float32)
