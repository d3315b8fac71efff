"""What is sent of a directory to a cluster, by git or by what is ignored, while others write there."""

import logging
from pathlib import Path

import pytest
from changing_folders import a_writer, by_git

from ltrscale.progress import log
from ltrscale.runtime import ray_internals
from ltrscale.runtime.submission import sent_copy

FILES = {
    ".gitignore": "/runs/\n__pycache__/\n",
    ".rayignore": "/docs/\n",
    "jobs/a.py": "print()",
    "jobs/gone.py": "",
    "docs/page.md": "",
    "shop/data/manifest.json": "{}",
    "shop/data/period=1/part.parquet": "rows",
    "runs/data/manifest.json": "{}",
}
LATER = {
    "jobs/new.py": "",
    "jobs/__pycache__/a.pyc": "",
    "notes/mine.yaml": "out: x",
    "shop/clicks.csv": "people",
    "shop/models/_manifest.json": "{}",
    "shop/models/weights": "",
}
SHIPPED = {".gitignore", ".rayignore", "jobs/a.py"}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_of_a_repository_it_is_what_git_tracks_and_new_source(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, FILES)
    by_git(tmp_path)
    write(tmp_path, LATER)
    (tmp_path / "jobs" / "gone.py").unlink()
    with caplog.at_level(logging.INFO, logger=log.name), sent_copy(tmp_path, ["notes/mine.yaml"]) as taken:
        assert set(taken.sent) == SHIPPED | {"jobs/new.py", "notes/mine.yaml"}
        assert (taken.folder / "notes" / "mine.yaml").read_text() == "out: x"
    assert [line.partition(",")[0] for line in caplog.messages if line.startswith("not sent")] == [
        f"not sent: {tmp_path}/shop/data"
    ]
    assert not taken.folder.exists()


def test_without_git_it_is_what_is_not_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {**FILES, **LATER})
    with caplog.at_level(logging.INFO, logger=log.name), sent_copy(tmp_path, []) as taken:
        assert set(taken.sent) == SHIPPED | {"jobs/gone.py", "jobs/new.py", "notes/mine.yaml", "shop/clicks.csv"}
    named = [line.partition(",")[0] for line in caplog.messages if line.startswith("not sent")]
    assert named == [f"not sent: {tmp_path}/shop/{name}" for name in ("data", "models")]


def test_a_checkout_that_another_repository_ignores_is_no_repository(tmp_path: Path) -> None:
    write(tmp_path, {"README": "", ".gitignore": "/vendor/\n"})
    by_git(tmp_path)
    write(tmp_path / "vendor", FILES)
    with sent_copy(tmp_path / "vendor", []) as taken:
        assert set(taken.sent) > SHIPPED


@pytest.mark.slow
@pytest.mark.parametrize("git", [False, True])
def test_it_stands_still_while_others_write(tmp_path: Path, git: bool) -> None:
    write(tmp_path, FILES)
    if git:
        by_git(tmp_path)
    with a_writer(tmp_path):
        for _ in range(20):
            with sent_copy(tmp_path, []) as taken:
                assert set(taken.sent) >= SHIPPED
                assert ray_internals.working_directory(taken.folder) == taken.sent
