"""The sizes of the first trainings of a log, which keep them short on a few cores.

Their minutes follow from the measured rates `FINETUNED`, `PRETRAINED` and `BOOSTED`.
"""

import math
from typing import NamedTuple

FINETUNED = {256: 24_000, 1024: 47_000}
"""Documents per second of one core in finetuning the network of jobs.init, by `docs_per_batch`; 4,096 is no
faster than 1,024. Processor time on the log of tests/shop.py, 552,000 documents with 13 columns, 2026-11-24."""
PRETRAINED = {1024: 9_000, 4096: 14_000}
"""The same rates for pretraining that network, in float32."""
BOOSTED = 190e6
"""Values per second of one core in LightGBM's lambdarank with 31 leaves: trees times documents times features. Random
numbers, 13 to 100 features, processor time, 2026-11-24."""
SCORED = 200_000
"""Documents that a model scores per second on one core."""
_INNER, _MEASURED_AT = 6 * 128, 13
"""Inputs of the layers after the first, and features in the measurement; work is proportional to their sum."""

SMALL = 100_000
"""Documents below which networks use small batches, because they need the steps."""
STUDIED = {"trees": 400, "pretraining": 16, "finetuning": 60}
"""Maximum trees and epochs of a pipeline; the epochs are those of docs/results/study-news.md."""
_SHARES = {"trees": 1.0, "pretraining": 5.0, "finetuning": 5.0}
"""Maximum minutes of the stages of a first pipeline: 11 of 15 on two cores, the rest is for evaluation and slower
cores."""
_OTHER = 1.0
_AT_LEAST = {"trees": 200, "pretraining": 1, "finetuning": 4}


class LogSize(NamedTuple):
    """The size of a log's training periods."""

    documents: int
    """Rows; pretraining reads all."""
    informative: int
    """Rows of lists with different labels, the only ones that trees and networks learn from."""
    features: int

    def part(self, share: float) -> "LogSize":
        """The size of a share of the periods."""
        return LogSize(round(share * self.documents), round(share * self.informative), self.features)


class FirstSizes(NamedTuple):
    """Settings of a first pipeline, and the minutes of its stages."""

    trees: int
    docs_per_batch: int
    epochs: int
    pretraining_docs_per_batch: int
    pretraining_epochs: int
    minutes: dict[str, float]
    """Maximum for `trees`, `pretraining`, and `finetuning` of all networks; patience may save some."""

    @property
    def share(self) -> float:
        """The share of the training documents that fits the time; at most 1."""
        return 1 / max(1.0, *(self.minutes[stage] / _SHARES[stage] for stage in _SHARES))

    @property
    def patience(self) -> int:
        """Epochs without a better validation metric after which a network stops: a quarter of all."""
        return math.ceil(self.epochs / 4)

    @property
    def total(self) -> float:
        """Minutes of the whole pipeline."""
        return sum(self.minutes.values()) + _OTHER


def first_sizes(size: LogSize, *, cores: int = 2, networks: int = 2, boosted: int = 1) -> FirstSizes:
    """The settings that keep a first pipeline short, at most those of the news study.

    Trees use all cores. Networks are assumed to use one, because small batches have little work for more. `networks` is
    the number of networks to finetune, and `boosted` that of models of trees to grow.
    """
    batch = 256 if size.informative < SMALL else 1024
    large = 1024 if size.documents < SMALL else 4096
    each = {  # minutes of one tree or one epoch of all models
        "trees": boosted * size.informative * size.features / (BOOSTED * cores) / 60,
        "pretraining": epoch_minutes(size.documents, PRETRAINED[large], size.features),
        "finetuning": networks * epoch_minutes(size.informative, FINETUNED[batch], size.features),
    }
    n = {
        stage: min(STUDIED[stage], max(_AT_LEAST[stage], int(_SHARES[stage] / (one or 1e-9))))
        for stage, one in each.items()
    }
    minutes = {stage: n[stage] * one for stage, one in each.items()}
    return FirstSizes(n["trees"], batch, n["finetuning"], large, n["pretraining"], minutes)


def epoch_minutes(documents: int, rate: float, features: int) -> float:
    """Minutes of an epoch on one core; work per document is proportional to the inputs of all layers."""
    return documents / rate * (_INNER + features) / (_INNER + _MEASURED_AT) / 60
