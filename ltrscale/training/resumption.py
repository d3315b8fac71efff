"""Stages that resume, and the files that they keep below their output directory until it is committed."""

import json
from collections.abc import Mapping
from typing import Any, Self

from ltrscale.config import Operational, is_made_by
from ltrscale.data.dataset.preflight import Preflight, PreflightConfig, checked, contents_of_read, difference, read_by
from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError
from ltrscale.progress import Report
from ltrscale.runtime import under_torchrun
from ltrscale.runtime.workers import ONE, Workers
from ltrscale.stages.stage import Origin, Stage
from ltrscale.storage import children, join, read_manifest, withdraw
from ltrscale.training import checkpoint as checkpoints
from ltrscale.training.checkpoint import list_checkpoints

CHECKPOINTS, PREFLIGHT, TRANSFORM, EPOCHS = "checkpoints", "preflight", "transform", "epochs"
PROBES = "probes"


def is_unfinished(out: str, origin: Mapping[str, Any]) -> bool:
    """Whether a run of this origin was interrupted and can resume from a checkpoint."""
    manifests = map(read_manifest, children(join(out, CHECKPOINTS)))
    return any(manifest is not None and is_made_by(manifest, origin) for manifest in manifests)


def begin(
    splits: Mapping[str, Split], config: PreflightConfig, out: str, *, origin: Mapping[str, Any], report: Report
) -> Preflight:
    """Check the data of a run that starts or resumes into `out`; returns the result of the pre-flight.

    Args:
        splits: the splits that the run reads, by the names that errors use.
        config: settings of the pre-flight.
        out: directory of the output.
        origin: config and inputs of the run.
        report: receives the counts of the pre-flight.

    Raises:
        InputError: a run with the same settings was interrupted there and has read other data; or as `checked`.
    """
    if not is_unfinished(out, origin):
        for checkpoint in list_checkpoints(join(out, CHECKPOINTS)):
            before = (read_manifest(checkpoint) or {}).get("made_by", {})
            others = [url for url, value in _data(origin).items() if _data(before).get(url) != value]
            if others and _settings(before) == _settings(origin):
                what = difference(read_by(join(out, PREFLIGHT)), contents_of_read(splits.values()))
                what = what or f"read other data than {others[0]} holds now: restore that data to resume the run"
                raise InputError(f"{out}: the unfinished run there {what}, or start anew with --fresh")
    return checked(splits, config, join(out, PREFLIGHT), origin, report=report)


def _settings(origin: Mapping[str, Any]) -> Any:
    """Stage and config of a run, without the periods that it read, which change as data arrives."""
    # through JSON: a deep copy, for the periods of the caller's config must stay
    plain = json.loads(json.dumps({"stage": origin.get("stage"), "config": origin.get("config", {})}))
    for split in plain["config"].get("splits", []):
        split["periods"] = []
    return plain


def _data(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Hashes of the data sets that a run read, and of the scores that served as its labels."""
    splits = origin.get("config", {}).get("splits", [])
    urls = {url for split in splits for url in (*split["data"], split["scores"])}
    return {url: value for url, value in origin.get("inputs", {}).items() if url in urls}


def finish(out: str) -> None:
    """Remove files that are useless once the output is committed; the pre-flight stays, for it names the data read."""
    _withdraw(out, TRANSFORM)
    _withdraw_probes(out)


def start_anew(out: str) -> None:
    """Remove everything that a run left, so that the next run starts from the beginning."""
    _withdraw(out, PREFLIGHT, TRANSFORM, EPOCHS)
    _withdraw_probes(out)


def _withdraw_probes(out: str) -> None:
    for probe in children(join(out, PROBES)):
        start_anew(probe)
        withdraw(probe)
    checkpoints.withdraw_checkpoint(join(out, PROBES))  # the directory that held them


def _withdraw(out: str, *names: str) -> None:
    """Withdraw all checkpoints, the committed directories with these names, and those directly inside them."""
    for checkpoint in children(join(out, CHECKPOINTS)):
        checkpoints.withdraw_checkpoint(checkpoint)
    checkpoints.withdraw_checkpoint(join(out, CHECKPOINTS))  # the directory that held them
    for url in (join(out, name) for name in names):
        for directory in (*children(url), url):
            withdraw(directory)


class TrainingStage(Stage):
    """A stage that resumes from checkpoints after an interruption."""

    workers: Operational[Workers] = ONE
    """Data-parallel workers; more than one run under Ray Train."""
    fresh: Operational[bool] = False
    """Start anew even if `out` is up to date; removes the checkpoints of an unfinished run."""

    def clear(self) -> None:
        """Remove checkpoints and everything else that a resume needs."""
        if self._starts_anew():
            start_anew(self.out)

    def is_done(self, origin: Origin) -> bool:
        """Whether the bundle is committed, and no checkpoint of this origin remains to resume from."""
        if self._starts_anew() or is_unfinished(self.out, origin):
            return False
        return super().is_done(origin)

    def recorded_as(self) -> Self:
        """The config without `fresh`: repeating the run must not delete it."""
        return self.replace(fresh=False)

    def _starts_anew(self) -> bool:
        # a restart by torchrun repeats the command, but must resume the run that it has begun
        return self.fresh and not under_torchrun.is_restarted()
