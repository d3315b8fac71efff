"""Faults while a checkpoint is saved: a kill at any moment, a full disk, unreachable storage."""

import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from small_disks import fill_disk, small_disk_at
from small_trainers import make_trainer, pretrain
from torch import Tensor

from ltrscale import bundle, storage
from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError, UnavailableError
from ltrscale.progress import Report
from ltrscale.storage.faults import PATIENCE
from ltrscale.storage.s3 import PatientS3
from ltrscale.training.checkpoint import Progress, Snapshot, list_checkpoints, read_checkpoint
from ltrscale.training.loop import StepResult, Trainer
from ltrscale.training.pretrain import PretrainConfig
from ltrscale.training.resumption import Checkpoints
from tests.chaos.faulty_proxy import FaultyProxy

Weights = dict[str, Tensor]
CHANGES = {"os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}


def checkpoints_in(url: str) -> Checkpoints:
    return Checkpoints(url, origin={"run": "a"}, data="", every_s=3600.0)


def save(saver: Checkpoints, trainer: Trainer, result: StepResult) -> None:
    saver.after(replace(result, checkpoint_due=True), trainer, Progress())
    saver._wait()


def forked(function: Callable[[], None]) -> int:
    """Run a function in a fork of this process, which must have no other threads; returns its wait status."""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    try:
        function()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


class TrainerWithCheckpoints:
    """A trainer after step 3, the two checkpoints written before, and their content."""

    def __init__(self, data: str, url: str) -> None:
        torch.set_num_threads(1)
        self.trainer = make_trainer(data, "simclr_rank")
        self.weights: dict[int, Weights] = {}
        running = self.trainer.epoch()
        with checkpoints_in(url) as saver:
            for _ in range(3):
                self.result = next(running)
                step = self.trainer.state.step
                self.weights[step] = {name: value.clone() for name, value in self.trainer.model.state_dict().items()}
                if step < 3:
                    save(saver, self.trainer, self.result)
        running.close()

    def save_third(self, url: str) -> None:
        """Save the checkpoint of step 3, as after a resume from step 2."""
        with checkpoints_in(url) as saver:
            assert saver.newest() is not None
            save(saver, self.trainer, self.result)

    def check(self, url: str) -> int:
        """Resume from the files that a kill has left, and go on; returns the step of the checkpoint."""
        with checkpoints_in(url) as saver:
            snapshot = saver.newest()
            assert snapshot is not None
            self.check_whole(snapshot)
            resumed = snapshot.step
            if resumed == 2:
                save(saver, self.trainer, self.result)
        assert [self.check_whole(read_checkpoint(c)) for c in list_checkpoints(url)][-1] == 3
        assert {file.rpartition("/")[0] for file in storage.list_files(url)} == set(list_checkpoints(url))
        return resumed

    def check_whole(self, snapshot: Snapshot) -> int:
        for name, value in self.weights[snapshot.step].items():
            assert torch.equal(snapshot.tensors["weights"][name], value), (snapshot.step, name)
        return snapshot.step


def kill_at_file_operation(url: str, number: int) -> None:
    """Kill this process before its n-th operation that opens a file below a URL or changes a folder."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in CHANGES or (event == "open" and url in str(arguments[0])):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def killed_everywhere(_: int, data: str, folder: str) -> None:
    """Kill a save before each of its file operations in turn."""
    base = f"{folder}/base"
    saved = TrainerWithCheckpoints(data, base)
    outcomes = []
    while True:
        url = f"{folder}/{len(outcomes)}"
        shutil.copytree(base, url)

        def killed(url: str = url, number: int = len(outcomes) + 1) -> None:
            kill_at_file_operation(url, number)
            saved.save_third(url)

        status = forked(killed)
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        outcomes.append(saved.check(url))
        shutil.rmtree(url)
    assert outcomes == sorted(outcomes)
    assert outcomes.count(2) > 10
    assert outcomes.count(3) > 3


@pytest.mark.nightly
def test_killed_at_each_point_of_a_save(synthetic_dataset: str, tmp_path: Path) -> None:
    mp.spawn(killed_everywhere, args=(synthetic_dataset, str(tmp_path)))


def kill_at_request(number: int) -> None:
    """Kill this process before (odd numbers) or after (even numbers) it sends a request that changes something."""
    from aiobotocore.httpsession import AIOHTTPSession

    sent, send = 0, AIOHTTPSession.send

    async def killing(self: Any, request: Any) -> Any:
        nonlocal sent
        changing = request.method in ("PUT", "POST", "DELETE")
        sent += changing
        if changing and 2 * sent - 1 == number:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await send(self, request)
        if changing and 2 * sent == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    AIOHTTPSession.send = killing


def killed_at_requests(_: int, data: str, folder: str, s3: str) -> None:
    """Kill a save before and after each request that changes something; each use of S3 has its own process."""
    saved = TrainerWithCheckpoints(data, f"{folder}/base")
    resumed = Path(folder) / "resumed"

    def killed(url: str, number: int) -> None:
        storage.filesystem(url)[0].put(f"{folder}/base/", url, recursive=True)
        kill_at_request(number)
        saved.save_third(url)

    def checked(url: str) -> None:
        resumed.write_text(str(saved.check(url)))

    outcomes = []
    while True:
        url = storage.join(s3, f"killed-{len(outcomes)}")
        status = forked(lambda url=url: killed(url, len(outcomes) + 1))
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert forked(lambda url=url: checked(url)) == 0
        outcomes.append(int(resumed.read_text()))
    assert outcomes == sorted(outcomes)
    assert outcomes.count(2) >= 5  # two files and the manifest
    assert outcomes.count(3) >= 1


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.nightly
def test_killed_around_each_request_of_an_upload(synthetic_dataset: str, tmp_path: Path, s3: str) -> None:
    mp.spawn(killed_at_requests, args=(synthetic_dataset, str(tmp_path), storage.join(s3, tmp_path.name)))


def run_pretraining(data: str, out: str, report: Report) -> None:
    """Pretrain in many steps, with checkpoints as often as possible."""
    values = {"network": {"encoder": {"width": 8, "blocks": 1}}, "epochs": 2, "checkpoint_minutes": 1e-9}
    config = PretrainConfig.model_validate({**values, "stream": {"docs_per_batch": 60, "streams": 2}})
    pretrain(config, Split(data=(data,), periods=("2026-W01",)), out, origin={}, report=report)


@pytest.fixture(scope="module")
def undisturbed(synthetic_dataset: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of a pretraining without faults."""
    out = str(tmp_path_factory.mktemp("undisturbed") / "model")
    run_pretraining(synthetic_dataset, out, lambda _: None)
    return bundle.load(out).content


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    with small_disk_at(tmp_path / "disk", 1) as folder:
        yield folder


class Faults:
    """A report function that breaks the storage once a checkpoint is committed, and repairs it after two failures.

    Args:
        caplog: the test's log.
        break_it: makes writes fail.
        mend: makes writes succeed again; None leaves the storage broken.
    """

    def __init__(
        self, caplog: pytest.LogCaptureFixture, break_it: Callable[[], None], mend: Callable[[], None] | None
    ) -> None:
        caplog.set_level(logging.INFO, "ltrscale")
        self.caplog = caplog
        self.plan = [("checkpoint of step", break_it), *([(", 2 in a row: ", mend)] if mend else [])]

    def __call__(self, record: Any) -> None:
        """Called after a step, before a checkpoint starts."""
        if "step" not in record or not self.plan:
            return
        message, change = self.plan[0]
        deadline = time.monotonic() + 5  # if nothing is being written, it will be after the next step
        while message not in self.caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        if message in self.caplog.text:
            change()
            del self.plan[0]

    @property
    def warnings(self) -> list[str]:
        return [record.getMessage() for record in self.caplog.records if record.levelno == logging.WARNING]


@pytest.mark.nightly
def test_a_disk_that_is_full_for_a_while(
    synthetic_dataset: str, small_disk: Path, undisturbed: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults(caplog, lambda: fill_disk(small_disk), (small_disk / "ballast").unlink)
    run_pretraining(synthetic_dataset, str(small_disk / "out"), faults)
    assert not faults.plan
    warnings = faults.warnings
    assert len(warnings) == 2
    for number, warning in enumerate(warnings, start=1):
        assert re.match(
            rf"checkpoint of step \d+ not written, {number} in a row: {small_disk}/out/checkpoints/step-\d+/\S+: "
            r"disk full: [\d,]+ bytes are needed\b.*\b[\d,]+ are free in .*; training continues$",
            warning,
        )
    assert bundle.load(str(small_disk / "out")).content == undisturbed


@pytest.mark.nightly
def test_a_disk_that_stays_full(
    synthetic_dataset: str, small_disk: Path, undisturbed: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    out = small_disk / "out"
    message = r"3 checkpoints in a row could not be written .*disk full: .*the same command resumes from step-\d+$"
    with pytest.raises(InputError, match=message):
        run_pretraining(synthetic_dataset, str(out), Faults(caplog, lambda: fill_disk(small_disk), None))
    kept = list_checkpoints(str(out / "checkpoints"))
    assert kept
    step = read_checkpoint(kept[-1]).step
    (small_disk / "ballast").unlink()
    caplog.clear()
    records: list[Any] = []
    run_pretraining(synthetic_dataset, str(out), records.append)
    assert f"resumed from {kept[-1]}" in caplog.text
    assert next(record["step"] for record in records if "step" in record) == step + 1
    assert bundle.load(str(out)).content == undisturbed


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.nightly
def test_a_store_that_cannot_be_reached_for_a_while(
    synthetic_dataset: str,
    s3: str,
    tmp_path: Path,
    undisturbed: bytes,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def endpoint(url: str) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        PatientS3.clear_instance_cache()

    monkeypatch.setenv(PATIENCE, "1")
    out, there = storage.join(s3, tmp_path.name), os.environ["AWS_ENDPOINT_URL"]
    faults = Faults(caplog, lambda: endpoint("http://127.0.0.1:9"), lambda: endpoint(there))
    run_pretraining(synthetic_dataset, out, faults)
    assert not faults.plan
    of_checkpoints = [warning for warning in faults.warnings if "in a row" in warning]
    assert len(of_checkpoints) == 2
    assert all(f"{out}/checkpoints/" in w and "check the network and AWS_ENDPOINT_URL" in w for w in of_checkpoints)
    assert bundle.load(out).content == undisturbed


@pytest.mark.s3
def test_a_checkpoint_that_cannot_be_reached_is_not_taken_for_a_damaged_one(
    synthetic_dataset: str, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, url = str(tmp_path / "base"), storage.join(s3, tmp_path.name)
    TrainerWithCheckpoints(synthetic_dataset, local)
    PatientS3.clear_instance_cache()
    storage.filesystem(url)[0].put(local + "/", url, recursive=True)
    monkeypatch.setenv(PATIENCE, "1")
    with FaultyProxy(os.environ["AWS_ENDPOINT_URL"], 1.0) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        PatientS3.clear_instance_cache()
        proxy.fault, proxy.match = "reset", lambda _, path: "step-00000002/" in path and not path.endswith(".json")
        with checkpoints_in(url) as saver, pytest.raises(UnavailableError, match="step-00000002"):
            saver.newest()
        proxy.share = 0.0
        with checkpoints_in(url) as saver:
            snapshot = saver.newest()
        assert snapshot is not None
        assert snapshot.step == 2
    PatientS3.clear_instance_cache()


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.nightly
def test_a_store_that_is_gone_for_a_while_stops_no_run(
    synthetic_dataset: str,
    s3: str,
    tmp_path: Path,
    undisturbed: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data, out = (storage.join(s3, tmp_path.name, name) for name in ("data", "out"))
    PatientS3.clear_instance_cache()
    storage.filesystem(data)[0].put(synthetic_dataset + "/", data, recursive=True)
    with FaultyProxy(os.environ["AWS_ENDPOINT_URL"], 0.0) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        PatientS3.clear_instance_cache()
        leaving = [threading.Event()]

        def leave(gone: threading.Event) -> None:
            with proxy.gone():
                gone.set()
                time.sleep(12)

        def report(record: Any) -> None:
            if "step" in record and leaving:
                gone = leaving.pop()
                threading.Thread(target=leave, args=(gone,)).start()
                gone.wait()

        run_pretraining(data, out, report)
        assert not leaving
        assert bundle.load(out).content == undisturbed
    PatientS3.clear_instance_cache()
    assert [line for line in caplog.messages if line.startswith("storage answers again after")]
