"""Cells of a comparison: a model trained once on a draw of labels, its NDCG of each test list, and differences."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ltrscale import storage
from ltrscale.arrays import Doubles
from ltrscale.errors import InputError
from ltrscale.evaluation.statistics.crossed import crossed_means
from ltrscale.reports.document import Document, Figure
from ltrscale.reports.render import REPORT, markdown


class Cell(NamedTuple):
    """Where the record of a model lies, and the settings that it depends on, as JSON has them."""

    url: str
    asked: Mapping[str, object]

    @property
    def is_made(self) -> bool:
        """Whether the record is there.

        Raises:
            InputError: it is of other settings.
        """
        content = storage.read_if_there(self.url)
        if content is not None and json.loads(content).get("asked", self.asked) != self.asked:
            raise InputError(f"{self.url}: made with other {', '.join(self.asked)}; give another out, or remove it")
        return content is not None

    def write(self, ndcg_Q: Doubles, **measured: float) -> None:
        """Keep NDCG of each test list, which is NaN without a relevant document, and what else was measured."""
        values = [None if np.isnan(value) else float(value) for value in ndcg_Q]
        storage.write_bytes(self.url, json.dumps({"asked": self.asked, **measured, "ndcg": values}).encode())

    def read(self) -> dict[str, Any]:
        """What was measured; `ndcg` is an array."""
        record = json.loads(storage.read_bytes(self.url))
        return {**record, "ndcg": np.array(record["ndcg"], np.float64)}


def difference(leads: Sequence[Doubles], draws: int) -> Figure:
    """The mean over lists and draws, those of each fold crossed; from differences [Q] of each fold's draws in order."""
    starts = range(0, len(leads) + 1, draws)
    folds = [np.stack(leads[start:end], axis=1) for start, end in pairwise(starts)]
    folds_Q = np.repeat(np.arange(len(folds)), [len(values_QT) for values_QT in folds])
    means = crossed_means(np.concatenate(folds)[..., None], folds_Q)
    low_M, high_M = means.interval()
    return Figure(mean=float(means.mean_M[0]), low=float(low_M[0]), high=float(high_M[0]))


def publish(report: Document, out: str) -> None:
    """Write the report of a comparison into its directory, and print it."""
    text = markdown(report)
    storage.write_bytes(storage.join(out, REPORT), text.encode())
    print(text)
