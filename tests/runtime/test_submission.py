"""What `jobs.submit` refuses before anything is sent."""

import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs.submit import run
from jobs.verbs import command
from ltrscale import config as configs
from ltrscale.errors import InputError, UnavailableError
from ltrscale.runtime import dashboard
from ltrscale.runtime.submission import SubmitConfig, _sent, _started, job_log, relative_places, submission, submit
from ltrscale.scoring.score import ScoreJob

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "http://127.0.0.1:1"


def send(**settings: object) -> int:
    given = configs.validate(SubmitConfig, {"command": ["pretrain"], "address": NOBODY, **settings}, "test")
    return submit(given, submission(given, "0" * 64, ()))


def test_credentials_are_refused() -> None:
    with pytest.raises(InputError, match=r"environment\.MY_API_TOKEN: looks like a credential, .* mount a secret"):
        send(environment={"MY_API_TOKEN": "x"})
    with pytest.raises(InputError, match=r"s3://\*\*\*@bucket/x: has a credential"):
        send(command=["pretrain", "--set=out=s3://me:pass@bucket/x"])


def test_credentials_are_refused_in_a_job_whose_log_is_returned() -> None:
    with pytest.raises(InputError, match=r"s3://\*\*\*@bucket/x\S+: has a credential in its URL"):
        job_log(SubmitConfig(command=("doctor", "--set", 'store="s3://me:pass@bucket/x"'), address=NOBODY))
    with pytest.raises(UnavailableError, match="no dashboard answers there"):
        job_log(SubmitConfig(command=("doctor", "--set", 'store="s3://bucket/x"'), address=NOBODY))


def test_harmless_variables_are_sent() -> None:
    harmless = {"AWS_ENDPOINT_URL": "http://10.0.0.7:9000", "LTRSCALE_STORAGE_PATIENCE_S": 600, "NCCL_DEBUG": "INFO"}
    with pytest.raises(UnavailableError, match="no dashboard answers there"):  # the next thing that is looked at
        send(environment={**harmless, "PATH": "/opt/conda3/envs/Ranking/bin:/usr/local/bin:/usr/bin:/bin"})


def test_a_cluster_that_is_missing_or_silent_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dashboard.ADDRESS, raising=False)
    with pytest.raises(InputError, match="no cluster is named; give --address"):
        send(address=None)
    with pytest.raises(InputError, match=r"head:6379: no address of a dashboard; write it as http://"):
        send(address="head:6379")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(dashboard.socket, "create_connection", lambda *_, **__: silent.accept())
        silent.settimeout(0.1)  # as a connection whose packets a firewall drops
        with pytest.raises(UnavailableError, match=r"no dashboard answers there \(timed out\)"):
            send()


def test_a_job_and_a_way_to_find_it_are_needed() -> None:
    with pytest.raises(InputError, match="no job is named"):
        send(command=[])
    with pytest.raises(InputError, match="pretain: no such job; did you mean 'pretrain'"):
        command("pretain")


def test_the_id_is_that_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("ltrscale.runtime.submission.submit", lambda _, job: seen.append(job) or 0)
    path = "jobs/configs/data/prepare-mq2008.yaml"
    monkeypatch.chdir(ROOT)
    for words in (
        ["prepare", "--config", path],
        ["prepare", "--config", path, "--set", "ray=false"],
        ["prepare", "--config", path, "--set", "out=elsewhere"],
    ):
        with pytest.raises(SystemExit):
            run(SubmitConfig(command=tuple(words)))
    assert seen[0].name == seen[1].name != seen[2].name
    assert seen[1].entrypoint == f"python -m jobs.prepare --config {path} --set ray=false"
    assert seen[0].files == (path,)


def test_a_config_that_is_not_sent_is_named(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "pretrain.py").touch()
    (tmp_path / ".rayignore").write_text("/runs/\n")
    for place in ("runs", "mine"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.yaml").touch()

    def check(module: str, *files: str) -> None:
        job = submission(SubmitConfig(command=(module,)), "0", files)
        assert job is not None
        with _sent(str(tmp_path), job):
            pass

    check("pretrain", f"{tmp_path}/mine/a.yaml", "s3://bucket/a.yaml")
    with pytest.raises(InputError, match=r"runs/a\.yaml: is not sent with .* \.rayignore"):
        check("pretrain", f"{tmp_path}/runs/a.yaml")
    with pytest.raises(InputError, match=r"/etc/a\.yaml: is not sent"):
        check("pretrain", "/etc/a.yaml")
    with pytest.raises(InputError, match=r"jobs/finetune\.py is not in .* working_dir=null"):
        check("finetune")
    (tmp_path / ".env").write_text("DB_PWD=hunter2")
    with pytest.raises(InputError, match=r"^working_dir: \.env: would be sent"):
        check("pretrain")


def test_a_relative_path_is_refused_before_the_cluster_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("jobs/score.py", "runs/data/manifest.json", "models/ranker/manifest.json", "docs/x", "shipped/data/x"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / ".rayignore").write_text("/runs/\n/models/\n/docs/\n")
    monkeypatch.chdir(tmp_path)

    def check(folder: str | None = ".", **changed: object) -> None:
        places = {"out": "s3://b/out", "data": "s3://b/data", "bundle": "s3://b/ranker", **changed}
        own = configs.validate(ScoreJob, places, "test")
        config = SubmitConfig(command=("score",), address=NOBODY, working_dir=folder)
        _started(Client(), [], submission(config, "0", (), relative_places(own)), config, NOBODY)

    check()
    check(None)
    check(data="shipped/data", meta=["docs"])  # a column of this name, and a directory that is sent
    check(data=str(tmp_path / "runs" / "data"), bundle="nowhere/ranker")
    remedy = "give a place that every node sees, such as --set data=s3://BUCKET/runs/data"
    with pytest.raises(InputError, match=rf"^data: runs/data is .* on this machine only: .*\.rayignore name; {remedy}"):
        check(data="runs/data")
    with pytest.raises(InputError, match=r"^bundle\.1: models/ranker is a path in this directory"):
        check(bundle=["s3://b/one", "models/ranker"])
    with pytest.raises(InputError, match=r"^out: runs/scores is .* would be lost with the job's copy"):
        check(out="runs/scores")
    with pytest.raises(InputError, match="the nodes have the jobs, not this directory"):
        check(None, data="shipped/data")


def test_a_name_with_a_number_is_no_attempt_of_the_name_without(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Client("nightly", "nightly-2", "nightly~2", "nightly-2~2")
    monkeypatch.setattr("ltrscale.runtime.submission.connected", lambda _: nullcontext(cluster))

    for name in ("nightly", "nightly-2"):
        with pytest.raises(InputError, match="no such submission"):
            send(command=[], id=f"{name}~3", action="stop")
        assert send(id=name, working_dir=None, follow=False) == 0
        assert send(command=[], id=f"{name}~3", action="stop") == 0
    assert cluster.jobs == ["nightly", "nightly-2", "nightly~2", "nightly-2~2", "nightly~3", "nightly-2~3"]


class Client:
    """A cluster that takes every job; those that are there have ended."""

    def __init__(self, *jobs: str) -> None:
        self.jobs = [*jobs]

    def list_jobs(self) -> list[SimpleNamespace]:
        """All jobs."""
        ended = SimpleNamespace(is_terminal=lambda: True)
        return [
            SimpleNamespace(submission_id=job, start_time=i, status=ended, driver_exit_code=0)
            for i, job in enumerate(self.jobs)
        ]

    def submit_job(self, *, submission_id: str, **_: object) -> None:
        """Take it."""
        self.jobs.append(submission_id)
