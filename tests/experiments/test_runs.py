"""Runs are listed from their records alone, and two are compared by what differs."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import InputError, UnavailableError
from ltrscale.experiments.records import timed
from ltrscale.experiments.runs import RunsJob, comparison, listing, read_run, runs_below
from ltrscale.stages.runs import recorded


class Network(Config):
    width: int = 8


class Job(Config):
    out: str
    network: Network = Network()
    epochs: int = 2


def write(out: Path, *, fails: bool = False, folder: str = "run", commit: bool = True, width: int = 8) -> str:
    job = Job(out=str(out), network=Network(width=width))
    try:
        with recorded(str(out), job, "finetune", name=folder) as report:
            report({"phase": "full", "step": 1, "loss": 0.9})
            report({"phase": "full", "epoch": 1, "loss": 0.5, "documents_per_s": 1234, "validation_ndcg@5": 0.25})
            if fails:
                raise InputError("no good")
    except InputError:
        return str(out)
    if commit:
        with storage.Commit(str(out)) as made:
            with made.file("config.json") as path:
                path.write_text(json.dumps({"metrics": {"ndcg@5": 0.3, "trees": None}}))
            made.finish({"made_by": {"stage": "finetune"}})
    return str(out)


def text(table: Any) -> list[list[str]]:
    console = Console(width=300, file=io.StringIO(), record=True)
    console.print(table)
    return [line.split() for line in console.export_text().splitlines()]


def test_a_store_that_fails_after_a_training_does_not_hide_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_answer(url: str, *_: Any) -> None:
        raise UnavailableError(f"{url}: no answer")

    def train() -> None:
        with timed(str(tmp_path / "spent"), of="any"):
            write(tmp_path / "model")
            monkeypatch.setattr(storage, "write_bytes", no_answer)
            raise RuntimeError("the loss is NaN")

    with pytest.raises(RuntimeError, match="the loss is NaN"):
        train()


def test_all_runs_below_a_directory_are_listed_with_their_state(tmp_path: Path) -> None:
    write(tmp_path / "b" / "model")
    write(tmp_path / "a", folder=storage.HIDDEN_RUN, commit=False)
    environment = tmp_path / "a" / storage.HIDDEN_RUN / "environment.json"
    began = json.loads(environment.read_text())
    assert began.pop("ended") >= began["time"]
    environment.write_text(json.dumps(began))  # as a killed process leaves it
    write(tmp_path / "c", fails=True)
    runs = list(runs_below(str(tmp_path)))
    assert [(run.out, run.state) for run in runs] == [
        (str(tmp_path / "a"), "not done"),
        (str(tmp_path / "b" / "model"), "done"),
        (str(tmp_path / "c"), "failed"),
    ]
    done = runs[1]
    assert (done.stage, done.settings["network.width"], done.metrics["ndcg@5"]) == ("finetune", "8", 0.3)
    assert done.metrics["loss"] == 0.5
    assert done.seconds is not None
    (row,) = [line for line in text(listing(runs)) if line and line[0] == done.out]
    assert row[1] == "finetune"
    assert row[-3:] == ["1,234", "validation_ndcg@5", "0.2500"]


class Evaluated(Config):
    out: str
    primary_cutoff: int = 5


def test_of_several_methods_the_best_is_named_with_the_metric_of_the_comparison(tmp_path: Path) -> None:
    out = tmp_path / "evaluation"
    with recorded(str(out), Evaluated(out=str(out)), "evaluate") as report:
        report({"method": "trees", "ndcg@1": 0.9, "ndcg@5": 0.25, "click_ndcg@5": 0.99})
        report({"method": "a network", "ndcg@1": 0.5, "ndcg@5": 0.75, "click_ndcg@5": 0.1})
        report({"method": "bm25", "ndcg@1": 0.6, "ndcg@5": 0.5, "click_ndcg@5": 0.2})
    run = read_run(str(out))
    assert run.main == "a network: ndcg@5 0.7500"
    assert run.metrics["trees: ndcg@1"] == 0.9
    assert ["trees:", "ndcg@5", "0.25", "0.25", "+0"] in text(comparison(run, run))


def test_the_time_is_that_of_the_last_start(tmp_path: Path) -> None:
    write(tmp_path / "a", fails=True)
    metrics = tmp_path / "a" / "run" / "metrics.jsonl"
    earlier = [
        {**json.loads(line), "time": json.loads(line)["time"] - 7200} for line in metrics.read_text().splitlines()
    ]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in earlier))
    assert read_run(str(tmp_path / "a")).seconds is None  # the start that is recorded has left no record
    write(tmp_path / "a")
    seconds = read_run(str(tmp_path / "a")).seconds
    assert seconds is not None
    assert 0 <= seconds < 3600


def test_two_runs_are_compared_by_the_settings_that_differ_and_all_metrics(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", width=16, commit=False)
    lines = text(comparison(read_run(a), read_run(b)))
    assert ["network.width", "8", "16"] in lines
    assert not [line for line in lines if line and line[0] in ("epochs", "out")]
    assert ["loss", "0.5", "0.5", "+0"] in lines
    assert ["ndcg@5", "0.3", "-"] in lines
    assert ["documents_per_s", "1234", "1234", "+0"] in lines


def test_where_no_run_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("nothing")
    with pytest.raises(InputError, match="no run is recorded below it"):
        RunsJob(under=str(tmp_path)).run()
    with pytest.raises(InputError, match="no run is recorded there; name the output directory of a job"):
        RunsJob(compare=(str(tmp_path), str(tmp_path))).run()
