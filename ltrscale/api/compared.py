"""Rankers compared on the same rows, as `jobs.evaluate` does."""

from collections.abc import Mapping
from typing import Any

from ltrscale import storage
from ltrscale.api import frames
from ltrscale.api.conventions import NotFitted
from ltrscale.api.estimator import Keys, Ranker
from ltrscale.config import validate
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.serving.columns import how_read


def compare(
    rankers: Mapping[str, Ranker],
    X: Any,
    y: Any = None,
    *,
    out: str,
    group: Any = None,
    evaluate: Keys | None = None,
    **columns: Any,
) -> Evaluation:
    """Evaluate rankers on the same labelled groups like `jobs.evaluate`, print the table, and write the report.

    The first ranker is the baseline. Outlier rules are fitted on its validation groups. The rows are read once, as the
    first ranker reads them.

    Args:
        rankers: by name in the report; the first one must be fitted in this process.
        X: rows with the features of the rankers; no ranker may have been trained on them.
        y: labels, unless X has the label column.
        out: directory; `evaluation/report.md` is the report.
        group: a query id for each row, or the lengths of the groups; not for tables that have the query column.
        evaluate: further keys of `jobs.evaluate`, such as `{"ndcg_at": [10], "primary_cutoff": 10}`.
        columns: uses of columns that differ from those of the first ranker.

    Raises:
        InputError: as `jobs.prepare` and `jobs.evaluate`; a ranker is not fitted, or the first one was loaded; X is an
            array with other columns than a ranker learnt from, or a ranker reads its features differently from the
            first one, such as with other fills or dates.
    """
    if not rankers:
        raise InputError("compare: no rankers; give at least one, by name")
    for name, ranker in rankers.items():
        if ranker._model is None:
            raise NotFitted(f"compare: {name} is not fitted; fit it first")
        frames.check_width(X, ranker._model.array_width)
    name, first = next(iter(rankers.items()))
    if not hasattr(first, "splits_"):
        raise InputError(f"{name} was not fitted by this process, so its validation groups are not known; fit it first")
    _check_read_alike(rankers, columns)
    table, columns = frames.rows_as_table(X, y, group, {**first.columns_, **columns}, labels_needed=True)
    data = storage.join(out, "data")
    frames.prepare_tables({"test": table}, columns, first.prepare or {}, data)
    config = {
        "baseline": name,
        **(evaluate or {}),
        "models": {name: ranker._fitted().own_files() for name, ranker in rankers.items()},
        "splits": {**first.splits_.model_dump(), "test": {"data": data}},
    }
    job = EvaluateJob(out=storage.join(out, "evaluation"), evaluate=validate(EvaluateConfig, config, "compare"))
    job.run()
    return Evaluation.read(job.out)


def _check_read_alike(rankers: Mapping[str, Ranker], columns: Keys) -> None:
    """Refuse a ranker that would get other feature values when rows are read with the first ranker's settings."""
    first_name, first = next(iter(rankers.items()))
    for name, ranker in rankers.items():
        bundle = ranker._fitted().bundle
        own, others = (
            how_read({**reader.columns_, **columns}, reader.prepare or {}, bundle, "Ranker")
            for reader in (ranker, first)
        )
        if apart := [key for key, value in own.items() if value != others[key]]:
            raise InputError(
                f"compare: {name} reads its features otherwise than {first_name} ({', '.join(apart)}), and all are "
                f"scored on the same rows, read as {first_name} does; fit both alike, or compare their score"
            )
