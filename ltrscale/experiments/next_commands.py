"""The next commands that jobs print, which can be run as printed."""

import re
import shlex
from collections.abc import Mapping

from ltrscale import storage
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.progress import called


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


def rank_command(bundle: str, data: str, out: str) -> str | None:
    """The command that ranks the items of the newest period of a data set; None if its periods are not times."""
    if not re.match(r"\d{4}-", open_dataset(data).manifest.periods[-1]):
        return None
    return command("score", bundle=bundle, data=data, out=out, layout="items", periods="last 1")


def weekly_command(config: str) -> str | None:
    """The command for the next period; None if its config does not exist."""
    return f"{called('weekly')} --config {shlex.quote(config)} --inputs NEW_ROWS" if storage.exists(config) else None


def _set(settings: Mapping[str, str]) -> str:
    return "".join(f" --set {shlex.quote(f'{key}={value}')}" for key, value in settings.items())
