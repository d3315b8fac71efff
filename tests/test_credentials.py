"""Passwords, tokens and signatures in URLs and settings appear in no file, log or message."""

import functools
import http.server
import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from command_lines import run_here

from jobs.cli import Command, main
from ltrscale import storage
from ltrscale.errors import InputError, UnavailableError, without_credentials
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.progress import log
from ltrscale.stages.runs import environment

ROOT = Path(__file__).resolve().parents[1]
CANARY = "canary0123456789"


class Guarded(http.server.SimpleHTTPRequestHandler):
    def send_head(self) -> Any:
        refusals = {"forbidden": 403, "busy": 503}
        if (status := next((refusals[word] for word in refusals if word in self.path), None)) is None:
            return super().send_head()
        self.send_error(status)
        return None

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A server of LETOR text with one unreadable line; yields its address."""
    folder = tmp_path / "served"
    folder.mkdir()
    lines = [f"{i % 3} qid:{i // 5} 1:{i} 2:{i % 7}\n" for i in range(200)]
    (folder / "log.txt").write_text("".join([*lines, "none qid:99 1:1\n"]))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Guarded, directory=str(folder))) as served:
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


def settings(url: str, out: Path) -> list[str]:
    words = (f"out={out}", f"prepare.inputs=['{url}']", "prepare.source.kind=letor", "prepare.max_rejected=0.5")
    return [f"--set={word}" for word in words]


def files(out: Path) -> list[Path]:
    return [path for path in out.rglob("*") if path.is_file()]


def test_no_output_of_a_job_has_the_credentials_of_its_input(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    url = f"http://me:{CANARY}@{server}/log.txt?X-Amz-Signature={CANARY}&X-Amz-Security-Token={CANARY}&id=7"
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for given in (url, url.replace(CANARY, CANARY[::-1])):  # signed anew, the input is the same
        monkeypatch.setattr(sys, "argv", ["prepare", *settings(given, out)])
        main(Command("prepare", lambda: (PrepareJob, PrepareJob.run), "Prepare."))
    assert [path.relative_to(out) for path in files(out) if CANARY.encode() in path.read_bytes()] == []
    (quarantine,) = out.glob("quarantine/*.parquet")
    assert pq.read_table(quarantine)["file"].to_pylist() == [
        f"http://***@{server}/log.txt?X-Amz-Signature=***&X-Amz-Security-Token=***&id=7"
    ]
    said = capfd.readouterr().err
    assert CANARY not in said
    assert "is up to date" in said


@pytest.mark.slow
def test_what_is_said_of_a_refused_url_does_not_repeat_the_signature(server: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    url = f"http://me:{CANARY}@{server}/forbidden?sig={CANARY}"
    done = run_here("prepare", *settings(url, out))
    assert done.returncode == 2
    assert "/forbidden?sig=***" in done.stderr
    assert "Traceback" not in done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert [path for path in files(out) if CANARY in path.read_text()] == []


def test_what_a_web_server_refuses_is_reported_in_one_line(server: str) -> None:
    with pytest.raises(InputError, match=r"/forbidden: no permission to read .* check the address"):
        storage.read_bytes(f"http://{server}/forbidden")
    with pytest.raises(UnavailableError, match="/busy: cannot read: the store is overloaded"):
        storage.read_bytes(f"http://{server}/busy")


@pytest.mark.parametrize(
    ("text", "without"),
    [
        (f"s3://key:{CANARY}@bucket/a", "s3://***@bucket/a"),
        (f"['https://h/a?token={CANARY}', 'b']", "['https://h/a?token=***', 'b']"),
        (f"https://h/a?X-Goog-Credential={CANARY}&x=1", "https://h/a?X-Goog-Credential=***&x=1"),
        (f"https://h/a?AWSAccessKeyId={CANARY}&Expires=9", "https://h/a?AWSAccessKeyId=***&Expires=9"),
        ("s3://bucket/part-?.parquet and user@host", "s3://bucket/part-?.parquet and user@host"),
        ("https://h/a?id=7&page=2: no such file", "https://h/a?id=7&page=2: no such file"),
    ],
)
def test_what_is_taken_out_of_a_text(text: str, without: str) -> None:
    assert without_credentials(text) == without
    assert str(InputError(text)) == without
    assert without_credentials(without) == without


def test_settings_that_are_secret_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = (f"store.password={CANARY}", f"--set=aws_secret_access_key={CANARY}", f"store={{api_key: {CANARY}, a: 1}}")
    monkeypatch.setattr(sys, "argv", ["job", *secret, "out=runs/a"])
    recorded = environment()["command"]
    assert CANARY not in json.dumps(recorded)
    assert recorded == [
        "job", "store.password=***", "--set=aws_secret_access_key=***", "store={api_key: ***, a: 1}", "out=runs/a",
    ]  # fmt: skip


def test_the_log_has_no_credentials_wherever_it_goes(caplog: pytest.LogCaptureFixture) -> None:
    url = f"http://me:{CANARY}@host/a?sig={CANARY}"
    with caplog.at_level(logging.INFO, logger=log.name):
        log.info("reading %s", url)
        try:
            raise ValueError(url)
        except ValueError:
            log.exception("%d failures", 1)
    assert CANARY not in caplog.text
    assert "reading http://***@host/a?sig=***" in caplog.text
    assert "ValueError: http://***@host/a?sig=***" in caplog.text
    assert "1 failures" in caplog.text
