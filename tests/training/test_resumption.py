"""Whole runs that are stopped again and again have the outputs and reports of a run that never stops."""

import json
import logging
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dataset_changes import add_period, with_renamed_files
from nightly import nightly
from small_trainers import combine, finetune, pretrain

from ltrscale import bundle, storage
from ltrscale import config as configs
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError, Stopped
from ltrscale.pretext.watch import Geometry
from ltrscale.progress import Report
from ltrscale.training import phases
from ltrscale.training.combine import CombineConfig
from ltrscale.training.finetune import FinetuneConfig, FinetuneJob
from ltrscale.training.loop import AccountError
from ltrscale.training.pretrain import PretrainConfig, PretrainJob

NETWORK = {"encoder": {"width": 8, "blocks": 1}}
Records = list[dict[str, Any]]
Run = Callable[[str, Report], None]
MEASURED = {"documents_per_s", "wait_percent", "workers", "wait_s", *Geometry._fields}
"""Figures of the time since the start or the resume."""


def splits(data: str) -> tuple[Split, Split]:
    return Split(data=(data,), periods=("2026-W01",)), Split(data=(data,), periods=("2026-W02",))


def pretraining(data: str, **changes: Any) -> Run:
    values = {"network": NETWORK, "epochs": 2, "stream": {"docs_per_batch": 600, "streams": 2}, **changes}
    config = PretrainConfig.model_validate(values)
    return lambda out, report: pretrain(config, splits(data)[0], out, origin={"a": 1}, report=report)


def finetuning(data: str, pretrained: str | None, **changes: Any) -> Run:
    values = {"network": NETWORK, "head_epochs": 2, "epochs": 2, "stream": {"docs_per_batch": 700, "streams": 2}}
    config = FinetuneConfig.model_validate({**values, "optimizer": {"learning_rate": 3e-2}, **changes})
    train, validation = splits(data)
    return lambda out, report: finetune(
        config, train, validation, out, pretrained=pretrained, origin={"b": 1}, report=report
    )


@pytest.fixture(scope="module")
def pretrained(synthetic_dataset: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("pretrained") / "model")
    pretraining(synthetic_dataset)(out, lambda _: None)
    return out


def whole(run: Run, out: Path) -> Records:
    """Run without a stop; returns the records of steps and epochs."""
    records: Records = []
    run(str(out), lambda record: records.append(dict(record)))
    return training_records(records)


def stopped_again_and_again(run: Run, out: Path, *, first: int) -> tuple[Records, list[int]]:
    """Run with requests to stop after step `first` - 1, and then after the first step of every second start.

    Returns:
        The records of steps and epochs of all starts, and the steps of the checkpoints left.
    """
    records: Records = []
    stops: list[int] = []

    def report(record: Any) -> None:
        records.append(dict(record))
        if "step" in record and (stops or record["step"] == first - 1):
            signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a run passes on a request that comes after its last step
    try:
        while True:
            try:
                run(str(out), report)
                return training_records(records), stops
            except Stopped:
                stops.append(max(record["step"] for record in records if "step" in record))
                assert len(stops) < 30
    finally:
        signal.signal(signal.SIGTERM, before)


def training_records(records: Records) -> Records:
    """Records of steps and epochs without measured times and sizes."""
    kept = [record for record in records if "step" in record or "epoch" in record]
    return [{name: value for name, value in record.items() if name not in MEASURED} for record in kept]


def check_equal(one: Path, other: Path) -> None:
    first, second = (bundle.load(str(out)) for out in (one, other))
    assert first.content == second.content
    assert first.metrics == second.metrics
    for out in (one, other):
        assert storage.children(str(out / "checkpoints")) == storage.children(str(out / "transform")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first"), [("adamw", 2), ("adagrad", 3), nightly("sgd", 2)])
def test_pretraining_stopped_after_every_other_step(
    synthetic_dataset: str, tmp_path: Path, kind: str, first: int
) -> None:
    run = pretraining(synthetic_dataset, optimizer={"kind": kind, "learning_rate": 0.01, "weight_decay": 0.1})
    records = whole(run, tmp_path / "whole")
    n = sum("step" in record for record in records)
    again, stops = stopped_again_and_again(run, tmp_path / "stopped", first=first)
    assert stops == [*range(first, n + 1, 2)]
    assert again == records
    check_equal(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
@pytest.mark.parametrize(("patience", "first"), [(2, 2), nightly(2, 3), nightly(20, 2), (20, 3)])
def test_finetuning_stopped_after_every_other_step(
    synthetic_dataset: str, pretrained: str, tmp_path: Path, first: int, patience: int
) -> None:
    changes = {} if patience == 20 else {"optimizer": {"learning_rate": 0.3}, "head_epochs": 8, "epochs": 8}
    run = finetuning(synthetic_dataset, pretrained, patience=patience, **changes)
    records = whole(run, tmp_path / "whole")
    epochs = [record["phase"] for record in records if "epoch" in record]
    assert set(epochs) == {"head", "full"}
    assert patience > 2 or len(epochs) < 16  # it ran out
    n = sum("step" in record for record in records)
    again, stops = stopped_again_and_again(run, tmp_path / "stopped", first=first)
    assert stops == [*range(first, n + 1, 2)]
    assert again == records
    check_equal(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.nightly
def test_averaged_heads_with_rates_by_layer_and_epochs_of_several_passes_stopped_after_every_other_step(
    synthetic_dataset: str, pretrained: str, tmp_path: Path
) -> None:
    stream = {"docs_per_batch": 4000, "groups_per_batch": 40, "streams": 2, "steps_per_epoch": 7}
    rates = {"head_phase": 3, "encoder": 0.5, "layer_decay": 0.8}
    run = finetuning(
        synthetic_dataset, pretrained, head_epochs=1, epochs=2, stream=stream, rates=rates, heads=2, average=0.7
    )
    records = whole(run, tmp_path / "whole")
    epochs = [record for record in records if "epoch" in record]
    groups = select(splits(synthetic_dataset)[0], labelled=True).n_groups
    assert [record["groups"] for record in epochs] == [-(-7 * 40 // groups) * groups] * 3
    assert sum("step" in record for record in records) >= 3 * 7
    again, _ = stopped_again_and_again(run, tmp_path / "stopped", first=2)
    assert again == records
    check_equal(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["simclr_rank", nightly("scarf")])
def test_finetuning_with_an_auxiliary_loss_stopped_after_every_other_step(
    synthetic_dataset: str, pretrained: str, tmp_path: Path, method: str
) -> None:
    stream = {"docs_per_batch": 900, "streams": 2, "window": 2}
    auxiliary = {"weight": 0.5, "every": 2, "method": {"kind": method}, "stream": stream}
    run = finetuning(synthetic_dataset, pretrained, head_epochs=1, epochs=3, auxiliary=auxiliary)
    records = whole(run, tmp_path / "whole")
    n = sum("step" in record for record in records)
    again, stops = stopped_again_and_again(run, tmp_path / "stopped", first=2)
    assert stops == [*range(2, n + 1, 2)]
    assert again == records
    losses = [r["auxiliary_loss"] for r in records if "step" in r and r["phase"] == "full"]
    assert all((loss is None) == bool(step % 2) for step, loss in enumerate(losses))
    check_equal(tmp_path / "whole", tmp_path / "stopped")
    plain = whole(finetuning(synthetic_dataset, pretrained, head_epochs=1, epochs=3), tmp_path / "plain")
    assert [record for record in plain if record["phase"] == "head"] == [r for r in records if r["phase"] == "head"]
    assert plain != records


@pytest.mark.slow
@pytest.mark.parametrize("first", [2, nightly(3)])
def test_combining_stopped_after_every_other_step(
    synthetic_dataset: str, pretrained: str, tmp_path: Path, first: int
) -> None:
    parts = [str(tmp_path / name) for name in ("one", "two")]
    for part, start in zip(parts, (pretrained, None), strict=True):
        finetuning(synthetic_dataset, start, head_epochs=1, epochs=1)(part, lambda _: None)
    config = CombineConfig.model_validate({"how": "concat", "epochs": 3, "stream": {"docs_per_batch": 700}})
    train, validation = splits(synthetic_dataset)

    def run(out: str, report: Report) -> None:
        combine(config, parts, train, validation, out, origin={}, report=report)

    records = whole(run, tmp_path / "whole")
    again, stops = stopped_again_and_again(run, tmp_path / "stopped", first=first)
    assert stops
    assert again == records
    check_equal(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
def test_an_epoch_is_reported_in_numbers_and_in_a_line(
    synthetic_dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ltrscale")
    records: Records = []
    pretraining(synthetic_dataset)(str(tmp_path / "out"), lambda record: records.append(dict(record)))
    selection = select(splits(synthetic_dataset)[0], labelled=False)
    checked, *trained = records
    assert (checked["files_good"], checked["groups"]) == (checked["files"], selection.n_groups)
    steps, epochs = ([r for r in trained if name in r] for name in ("step", "epoch"))
    assert [set(step) for step in steps] == [{"step", "loss", "groups", "documents", "wait_s"}] * len(steps)
    assert [epoch["epoch"] for epoch in epochs] == [1, 2]
    for epoch in epochs:
        assert (epoch["groups"], epoch["documents"]) == (selection.n_groups, selection.n_documents)
        assert epoch["checksum"] == epochs[0]["checksum"] > 0
        assert (epoch["missed"], epoch["repeated"]) == (0, 0)
        assert epoch["documents_per_s"] > 0
        (worker,) = epoch["workers"]
        assert 0 <= worker["wait_percent"] == epoch["wait_percent"] <= 100
        assert 0.05 < worker["memory_gb"] < 64
        assert 0 < epoch["alignment"] < 4
        assert epoch["uniformity"] < 0 < epoch["accuracy"] < 1
        assert epoch["loss_left"] > 0
    (line,) = [message for message in caplog.messages if message.startswith("pretraining, epoch 2 of 2: ")]
    counts = rf"{selection.n_groups:,} groups \(0 missed, 0 repeated\), {selection.n_documents:,} documents, "
    assert re.search(counts + r"[\d,]+ documents/s, waiting for data [\d.]+%, loss [\d.]+$", line)


def pretrain_job(data: str, out: Path, **changes: Any) -> PretrainJob:
    settings = {"network": NETWORK, "epochs": 1, "stream": {"docs_per_batch": 400, "streams": 2}}
    values = {"out": str(out), "train": {"data": data, "periods": "2026-W01"}, "pretrain": settings}
    for key, value in changes.items():
        (values if key == "fresh" else settings)[key] = value
    return validate(PretrainJob, values, "test")


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Sets the step after which pretraining stages are asked to stop, which run one more step; None for no stop."""
    chosen: list[int | None] = [None]

    work = PretrainJob.work

    def stopping(job: PretrainJob, origin: Any, report: Report) -> None:
        def report_then_stop(record: Any) -> None:
            report(record)
            if record.get("step", 0) == chosen[0]:
                signal.raise_signal(signal.SIGTERM)

        work(job, origin, report_then_stop)

    monkeypatch.setattr(PretrainJob, "work", stopping)
    return lambda step: chosen.__setitem__(0, step)


def run_job(job: PretrainJob, caplog: pytest.LogCaptureFixture) -> str:
    """Run a stage; returns how it began: `resumed`, `up to date`, or empty."""
    caplog.clear()
    try:
        job.run()
    finally:
        began = [word for word in ("resumed from", "is up to date") if word in caplog.text]
    return "".join(began)


@pytest.mark.slow
def test_the_same_command_resumes_and_fresh_starts_anew(
    synthetic_dataset: str, tmp_path: Path, stop_after: Callable[[int | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ltrscale")
    out = tmp_path / "out"
    job = pretrain_job(synthetic_dataset, out)
    stop_after(1)
    with pytest.raises(
        Stopped, match=rf"^after step 2, checkpoint written to {out}/checkpoints; the same command resumes"
    ):
        run_job(job, caplog)
    assert {Path(url).name for url in storage.children(str(out))} == {"run", "checkpoints", "preflight", "transform"}
    stop_after(None)
    other_pace = pretrain_job(synthetic_dataset, out, checkpoint_minutes=3)
    assert run_job(other_pace, caplog) == "resumed from"
    made = bundle.load(str(out)).content
    assert run_job(job, caplog) == "is up to date"

    fresh = pretrain_job(synthetic_dataset, out, fresh=True)
    stop_after(2)
    with pytest.raises(Stopped):
        run_job(fresh, caplog)
    assert "resumed" not in caplog.text
    assert bundle.load(str(out)).content == made  # until the new one is committed
    stop_after(None)
    assert run_job(job, caplog) == "resumed from"
    stop_after(2)
    with pytest.raises(Stopped):
        run_job(fresh, caplog)
    stop_after(None)
    assert run_job(fresh, caplog) == ""
    assert bundle.load(str(out)).content == made
    assert not configs.load(PretrainJob, str(out / "run" / "config.yaml")).fresh


@pytest.mark.slow
def test_checkpoints_of_another_config_are_reported_and_removed_at_the_end(
    synthetic_dataset: str, tmp_path: Path, stop_after: Callable[[int | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    stop_after(1)
    with pytest.raises(Stopped):
        pretrain_job(synthetic_dataset, out).run()
    stop_after(None)
    assert run_job(pretrain_job(synthetic_dataset, out, seed=1), caplog) == ""
    assert "not resuming from the checkpoints there, which belong to another config or other data" in caplog.text
    assert not (out / "checkpoints").exists()
    alone = tmp_path / "alone"
    pretrain_job(synthetic_dataset, alone, seed=1).run()
    assert bundle.load(str(out)).content == bundle.load(str(alone)).content


@pytest.mark.slow
def test_a_run_whose_only_checkpoint_has_a_damaged_manifest_starts_anew(
    synthetic_dataset: str, tmp_path: Path, stop_after: Callable[[int | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    job = pretrain_job(synthetic_dataset, out)
    stop_after(1)
    with pytest.raises(Stopped):
        job.run()
    stop_after(None)
    (checkpoint,) = map(Path, storage.children(str(out / "checkpoints")))
    (checkpoint / "manifest.json").write_text("{")
    assert run_job(job, caplog) == ""
    assert "manifest.json: not JSON" in caplog.text
    assert bundle.load(str(out)).content
    assert not (out / "checkpoints").exists()


def grow(data: str) -> None:
    add_period(data, "2026-W05", like="2026-W02")


def replace_a_file(data: str) -> None:
    manifest = open_dataset(data).manifest
    first = manifest.files[0]._replace(sha256="0" * 64)
    files = (first, *manifest.files[1:])
    storage.write_bytes(f"{data}/manifest.json", manifest.replace(files=files).model_dump_json().encode())


def shrink(data: str) -> None:
    manifest = open_dataset(data).manifest
    files = [file for file in manifest.files if file.period != "2026-W02"]
    storage.write_bytes(f"{data}/manifest.json", manifest.replace(files=files).model_dump_json().encode())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (grow, "did not read period '2026-W05' of {data}: name the periods that it read to go on with it"),
        (shrink, "read period '2026-W02' of {data} too: put it back, or name it, to go on with it"),
        (replace_a_file, "read other files of period '2026-W01' of {data}: put them back to go on with it"),
    ],
    ids=["a period more", "a period less", "another file"],
)
def test_an_unfinished_run_of_other_data_is_refused_and_left_as_it_is(
    synthetic_dataset: str,
    tmp_path: Path,
    stop_after: Callable[[int | None], None],
    caplog: pytest.LogCaptureFixture,
    change: Callable[[str], None],
    message: str,
) -> None:
    caplog.set_level(logging.INFO, "ltrscale")
    data, out = with_renamed_files(synthetic_dataset, tmp_path / "data"), tmp_path / "out"
    job = pretrain_job(data, out).replace(train={"data": data})
    stop_after(1)
    with pytest.raises(Stopped):
        run_job(job, caplog)
    stop_after(None)
    before = open_dataset(data).manifest.model_dump_json().encode()
    kept = {path: path.read_bytes() for name in ("checkpoints", "transform", "preflight") for path in files(out / name)}
    assert kept
    change(data)
    with pytest.raises(InputError) as error:
        run_job(job, caplog)
    assert (
        str(error.value) == f"{out}: the unfinished run there {message.format(data=data)}, or start anew with --fresh"
    )
    assert {path: path.read_bytes() for path in kept} == kept
    if change is grow:
        job = job.replace(train={"data": data, "periods": "2026-W01..2026-W04"})
    else:
        storage.write_bytes(f"{data}/manifest.json", before)
    assert run_job(job, caplog) == "resumed from"
    alone = pretrain_job(synthetic_dataset, tmp_path / "alone").replace(train={"data": synthetic_dataset})
    alone.run()
    assert bundle.load(str(out)).content == bundle.load(str(tmp_path / "alone")).content


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_fresh_reads_what_is_there_now(
    synthetic_dataset: str, tmp_path: Path, stop_after: Callable[[int | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ltrscale")
    data, out = with_renamed_files(synthetic_dataset, tmp_path / "data"), tmp_path / "out"
    job = pretrain_job(data, out).replace(train={"data": data})
    stop_after(1)
    with pytest.raises(Stopped):
        run_job(job, caplog)
    stop_after(None)
    grow(data)
    assert run_job(job.replace(fresh=True), caplog) == ""
    assert bundle.load(str(out)).dataset_hash == select(Split(data=(data,)), labelled=False).hash


@pytest.mark.slow
def test_bad_files_are_left_out_of_training_and_validation(synthetic_dataset: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(synthetic_dataset, data)
    manifest = open_dataset(str(data)).manifest
    lost = manifest.files[0]
    assert lost.period == "2026-W01"
    (data / lost.path).unlink()
    values = {"data": str(data), "periods": ["2026-W01..2026-W02"]}
    job = pretrain_job(str(data), tmp_path / "pretrained").replace(train=values)
    with pytest.raises(InputError, match=r"train: 1 of \d+ files, with \d+ of \d+ query groups, are not what the man"):
        job.run()
    assert not (tmp_path / "pretrained" / "transform").exists()  # nothing was read
    tolerant = {**job.pretrain.model_dump(), "preflight": {"max_bad": 0.9}}
    job.replace(pretrain=tolerant).run()
    made = bundle.load(str(tmp_path / "pretrained"))
    assert made.dataset_hash == select(Split(**values), labelled=False, without=[str(data / lost.path)]).hash
    where = {"train": values, "validation": {**values, "periods": ["2026-W03"]}, "test": {"data": str(data)}}
    where["test"]["periods"] = ["2026-W04"]
    settings = {"preflight": {"max_bad": 0.9}, "head_epochs": 1, "epochs": 1}
    ranker = {"out": str(tmp_path / "ranker"), "pretrained": str(tmp_path / "pretrained"), "splits": where}
    validate(FinetuneJob, {**ranker, "finetune": settings}, "test").run()
    records = [json.loads(line) for line in (tmp_path / "ranker" / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = select(Split(**values), labelled=True, without=[str(data / lost.path)]).n_groups
    assert {record["groups"] for record in records if "epoch" in record} == {expected}


def test_groups_that_were_missed_are_reported_before_the_run_ends(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_account = phases.listed
    monkeypatch.setattr(phases, "listed", lambda *given: whole_account(*given).plus(3, 0, 1234))
    records: Records = []
    with pytest.raises(AccountError, match="epoch 0 read Account"):
        pretraining(synthetic_dataset)(str(tmp_path / "out"), lambda record: records.append(dict(record)))
    assert records[-1] == {"missed": 3, "repeated": 0}
    assert not any("epoch" in record for record in records)
