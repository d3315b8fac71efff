"""Keys of the object storage and credentials of URLs are in no file that a pipeline, a search and scoring leave."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ltrscale import storage

TESTS = Path(__file__).resolve().parents[1]
CANARY = "canary0123456789"


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.s3
def test_no_file_has_a_key_or_the_credentials_of_a_url(s3: str, tmp_path: Path) -> None:
    out, kept = f"{s3}/secrets", tmp_path / "kept"
    word = f"--config=https://me:{CANARY}@host/a.yaml?X-Amz-Signature={CANARY}"
    command = [sys.executable, str(TESTS / "canary_pipeline.py"), out, str(kept), word, f"--set=a.token={CANARY}"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    files = {str(path): path.read_bytes() for path in kept.rglob("*") if path.is_file() and not path.is_symlink()}
    for part in ("gcs_server", "raylet", "python-core-worker", "runtime_env"):  # Ray's logs are among them
        assert any(part in name for name in files), part
    there = storage.list_files(out)
    for part in ("environment.json", "report.md", "metrics.jsonl", "manifest.json", "log.txt"):
        assert any(name.endswith(part) for name in there), part
    files |= {name: storage.read_bytes(name) for name in there} | {"said": (done.stdout + done.stderr).encode()}
    secrets = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")} | {"url": CANARY}
    found = [(what, name) for what, value in secrets.items() for name in files if value.encode() in files[name]]
    assert found == []
