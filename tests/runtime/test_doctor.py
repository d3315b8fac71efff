"""`jobs.doctor` as a whole, on this machine; tests/cluster/test_submission.py runs it on a cluster."""

import json
from pathlib import Path

import pytest

from jobs.verbs import command
from ltrscale.config import Config
from ltrscale.runtime import checks, doctor
from ltrscale.runtime.doctor import DoctorConfig


def config_of(name: str) -> type[Config]:
    return command(name).config


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LTRSCALE_STORAGE_PATIENCE_S", "0")
    monkeypatch.setattr(
        checks, "spill_disk", lambda *_: checks.CheckResult("ok", "room")
    )  # the disk of this machine may be full


def test_a_laptop_without_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = str(tmp_path / "store")
    assert doctor.doctor(DoctorConfig(store=store, ports=(1,)), config_of) == 0
    well = capsys.readouterr().out
    assert well.startswith("this machine\n  ok       python 3.")
    assert "writes, reads and deletes" in well
    assert well.splitlines()[-1].endswith(" 0 error")

    (tmp_path / "store").rmdir()
    (tmp_path / "store").touch()
    (tmp_path / "pretrain.yaml").write_text("otu: x\n")
    broken = DoctorConfig(store=store, ports=(1,), config=str(tmp_path / "pretrain.yaml"))
    assert doctor.doctor(broken, config_of) == 1
    ill = capsys.readouterr().out
    assert "  error    " in ill
    assert "           -> check the disk" in ill
    assert max(map(len, ill.splitlines())) <= 80 + len(store)
    assert ill.splitlines()[-1].endswith(" 2 error")


def test_machines_read_json(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.doctor(DoctorConfig(format="json", ports=(1,)), config_of)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {each["where"] for each in found} == {"this machine"}
    assert all({"level", "what", "remedy"} < set(each) for each in found)


def test_a_store_with_a_credential_is_not_sent_to_a_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "check_answers", lambda _: None)
    for store, problem in (("s3://me:pass@b/x", "has a credential in its URL"), (None, "no dashboard answers there")):
        doctor.doctor(DoctorConfig(address="http://127.0.0.1:1", store=store, ports=(1,)), config_of)
        assert problem in " ".join(capsys.readouterr().out.split())


def test_a_cluster_that_does_not_answer_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.doctor(DoctorConfig(address="http://127.0.0.1:1", ports=(1,)), config_of) == 1
    assert "no dashboard answers there" in " ".join(capsys.readouterr().out.split())
