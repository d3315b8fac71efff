"""What a study knows of a method beside its figures."""

from typing import Literal

from ltrscale.config import Strict

Family = Literal["trees", "not pretrained", "pretrained", "mixed", "feature", "in context"]


class MethodTraits(Strict):
    """The traits of a method, by which tables sort it."""

    family: Family
    """`pretrained` also through a teacher. `mixed` are trees that read or learn the scores of networks, `feature` is a
    fixed order without training, and `in context` a network that reads labelled groups without training."""
    pretext: str | None = None
    """What the encoder is pretrained with."""
    augment: str | None = None
    """The augmentation of its views."""
    strategy: Literal["LP", "MP", "FF"] | None = None
    """How a pretrained encoder is finetuned: linear probing, multilayer probing, full finetuning."""
    unlabelled: str | None = None
    """What trees learn from unlabelled groups: nothing, PCA, pseudo-labels, or both."""
    tuned: bool = False
    """Whether its settings are searched at each number of labelled groups."""
