"""The commands that a pipeline or a week logs as the next ones."""

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping

from ltrscale import storage
from ltrscale.bundle import load
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.progress import called, log
from ltrscale.storage import join


def best_on_validation(bundles: Mapping[str, str]) -> str:
    """The method with the best bundle, by the first validation metric that all have; without one, the first."""
    metrics: dict[str, dict[str, float]] = {}
    for name, url in bundles.items():
        of_bundle = load(url).metrics.items()
        found = {key: v for key, v in of_bundle if re.match(r"validation_(?!groups)", key)}
        metrics[name] = {key: float(value) for key, value in found.items() if isinstance(value, int | float)}
    first = next(iter(bundles))
    shared = next((key for key in metrics[first] if all(key in each for each in metrics.values())), None)
    if shared is None:
        return first
    best = max(metrics, key=lambda name: metrics[name][shared])
    log.info("best on validation, with the first seed: %s (%s %.4f)", best, shared, metrics[best][shared])
    return best


def after_pipeline(bundle: str, data: str, out: str, *, refitted: str | None, evaluation: str | None) -> Iterator[str]:
    """What to do with a pipeline's bundle, a line each; with its refit into `refitted` first, unless that is None."""
    if refitted is not None:
        yield f"to learn from the validation groups too: {command('refit', out=refitted, bundle=bundle)}"
        bundle = refitted
    if evaluation is not None:
        yield f"a page of HTML to look at: {command('report', evaluation=evaluation, out=join(out, 'page'))}"
    if re.match(r"\d{4}-", open_dataset(data).manifest.periods[-1]):  # periods are times
        ranked = {"bundle": bundle, "data": data, "out": join(out, "ranked")}
        yield f"to rank the newest period: {command('score', **ranked, layout='items', periods='last 1')}"
    predict = predict_command(bundle, data, join(out, "predictions"))
    yield f"to rank a file of raw rows, such as a new one: {predict}"
    if weekly := weekly_command(posixpath.join(posixpath.dirname(out.rstrip("/")) or ".", "weekly.yaml")):
        yield f"when the next period is there: {weekly}"


def command(job: str, **settings: str) -> str:
    """A command line that sets some keys.

    Example:
        >>> command("refit", out="runs/final", bundle="runs/the trees")
        "python -m jobs.refit --set out=runs/final --set 'bundle=runs/the trees'"
    """
    return f"{called(job)}{_set(settings)}"


def predict_command(bundle: str, data: str, out: str) -> str:
    """The command that ranks a file of raw rows: the data set's last file, to be replaced by a new one.

    It accepts the same share of bad rows as the data set.
    """
    made_by = open_dataset(data).manifest.made_by
    latest = (made_by.get("added") or [made_by])[-1].get("config", {})
    inputs = latest.get("inputs") or [{"path": "NEW_ROWS"}]
    allowed = latest.get("max_rejected", default := PrepareConfig.model_fields["max_rejected"].default)
    words = (("bundle", bundle), ("inputs", inputs[-1]["path"]), ("out", out))
    options = "".join(f" --{key} {shlex.quote(value)}" for key, value in words)
    return f"{called('predict')}{options}{_set({} if allowed == default else {'max_rejected': f'{allowed:g}'})}"


def weekly_command(config: str) -> str | None:
    """The command for the next period; None if its config does not exist."""
    return f"{called('weekly')} --config {shlex.quote(config)} --inputs NEW_ROWS" if storage.exists(config) else None


def _set(settings: Mapping[str, str]) -> str:
    return "".join(f" --set {shlex.quote(f'{key}={value}')}" for key, value in settings.items())
