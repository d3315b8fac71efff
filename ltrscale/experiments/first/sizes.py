"""How large the first runs on a log may be: settings that end in time on a few cores, and the minutes that they take.

Minutes follow from rates that were measured: see `FINETUNED`, `PRETRAINED` and `BOOSTED`.
"""

import math
from typing import NamedTuple

FINETUNED = {256: 24_000, 1024: 47_000}
"""Documents per second of one core in finetuning the network of `first_pipeline`, by `docs_per_batch`; 4,096 is no
faster than 1,024. Processor time on the log of tests/shop.py, 552,000 documents with 13 columns, 2026-11-24."""
PRETRAINED = {1024: 9_000, 4096: 14_000}
"""The same of its pretraining, in float32."""
BOOSTED = 190e6
"""Values per second of one core in LightGBM's lambdarank with 31 leaves: trees times documents times features. Random
numbers, 13 to 100 features, processor time, 2026-11-24."""
_INNER, _MEASURED_AT = 6 * 128, 13
"""Inputs of the network's layers behind the first, and features in the measurement: its work is by the sum of all."""

SMALL = 100_000
"""Documents below which networks learn from small batches: they need the steps."""
STUDIED = {"trees": 400, "pretraining": 16, "finetuning": 60}
"""Trees and epochs that a pipeline has at most: the epochs are those of docs/results/study-news.md."""
_SHARES = {"trees": 1.0, "pretraining": 5.0, "finetuning": 5.0}
"""Minutes of the stages of a first pipeline at most: it may take 15 on two cores, and evaluation and slower cores need
the others."""
_OTHER = 1.0
_FEWEST = {"trees": 200, "pretraining": 1, "finetuning": 4}


class LogSize(NamedTuple):
    """What the training periods of a log hold."""

    documents: int
    """Rows, which pretraining reads."""
    told_apart: int
    """Rows of the lists whose labels differ, the only ones that trees and networks learn from."""
    features: int

    def part(self, share: float) -> "LogSize":
        """That of a share of the periods."""
        return LogSize(round(share * self.documents), round(share * self.told_apart), self.features)


class FirstSizes(NamedTuple):
    """Settings of a first pipeline, and the minutes of its stages."""

    trees: int
    docs_per_batch: int
    epochs: int
    pretraining_docs_per_batch: int
    pretraining_epochs: int
    minutes: dict[str, float]
    """Of `trees`, `pretraining`, and `finetuning` of all networks, at most: patience may save some."""
    full: dict[str, float]
    """The same with as many trees and epochs as the news study had."""
    share: float
    """The share of the training documents with which it ends in time; 1 where all do."""

    def is_full(self, stage: str) -> bool:
        """Whether a stage has as many trees or epochs as the study."""
        return self.minutes[stage] == self.full[stage]

    @property
    def patience(self) -> int:
        """Epochs without a better validation metric after which a network stops: a quarter of all."""
        return math.ceil(self.epochs / 4)

    @property
    def total(self) -> float:
        """Minutes of the whole pipeline."""
        return sum(self.minutes.values()) + _OTHER

    @property
    def in_full(self) -> float:
        """Minutes of the whole pipeline with as many trees and epochs as the news study had."""
        return sum(self.full.values()) + _OTHER


def first_sizes(size: LogSize, *, cores: int = 2, models: float = 2) -> FirstSizes:
    """The settings with which a first pipeline ends in time, at most those of the news study.

    Trees use all cores. A network is taken to use one: small batches give others little to do.

    Args:
        size: what trees and networks learn from.
        cores: those of the machine.
        models: networks to finetune, and half as many models of trees to grow.

    Example:
        >>> sizes = first_sizes(LogSize(documents=550_000, told_apart=195_000, features=13))
        >>> sizes.docs_per_batch, sizes.epochs, sizes.pretraining_docs_per_batch, sizes.pretraining_epochs
        (1024, 36, 4096, 7)
        >>> round(sizes.total), round(sizes.in_full), sizes.share
        (11, 20, 1.0)
    """
    batch = 256 if size.told_apart < SMALL else 1024
    large = 1024 if size.documents < SMALL else 4096
    each = {  # a tree or an epoch of all models
        "trees": models / 2 * size.told_apart * size.features / (BOOSTED * cores) / 60,
        "pretraining": epoch_minutes(size.documents, PRETRAINED[large], size.features),
        "finetuning": models * epoch_minutes(size.told_apart, FINETUNED[batch], size.features),
    }
    n = {
        stage: min(STUDIED[stage], max(_FEWEST[stage], int(_SHARES[stage] / (one or 1e-9))))
        for stage, one in each.items()
    }
    minutes = {stage: n[stage] * one for stage, one in each.items()}
    full = {stage: STUDIED[stage] * one for stage, one in each.items()}
    over = max(1.0, *(minutes[stage] / _SHARES[stage] for stage in minutes))
    return FirstSizes(n["trees"], batch, n["finetuning"], large, n["pretraining"], minutes, full, 1 / over)


def epoch_minutes(documents: int, rate: float, features: int) -> float:
    """Minutes of an epoch on one core: a network's work for a document is by the inputs of all its layers."""
    return documents / rate * (_INNER + features) / (_INNER + _MEASURED_AT) / 60
