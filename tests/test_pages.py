"""The commands of the README and the docs run as they are printed, page by page, in a checkout of their own."""

import functools
import gzip
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pages import PAGES, ROOT, blocks, configs, lines, link_data, short
from shopping_log import shopping_log

from jobs.s3 import free_ports
from ltrscale.simulate.synthetic import SyntheticLogConfig, write_log

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.s3, pytest.mark.timeout(1800)]

# Pages whose commands go on from those of others.
AFTER = {
    "serving": ["quick-start"],
    "watching": ["quick-start"],
    "methods": ["quick-start"],
    "weeks": ["quick-start"],
    "report": ["quick-start"],
    "trees": ["guide"],
}
# Commands, by page and first words, that are read only (tests/test_readme.py).
LEFT_OUT = {
    ("README", "make test"): "it runs this file",
    ("README", "make check"): "it is a part of make test",
    ("serving", "tritonserver"): "it needs Triton",
    ("serving", "curl"): "it needs OpenSearch with its plugin",
    ("simulators", "python -m jobs.prepare --config jobs/configs/data/prepare-mslr"): "1 GB that may not be passed on",
    ("simulators", "python -m jobs.relabel --config binary.yaml"): "the same data",
    ("methods", "python -m jobs.evaluate --config news.yaml"): "an hour: a week of the news log and models of it",
    ("tuning", "python ../shared/data/news/make_log.py"): "an hour: the figures of the section Measured",
    ("tuning", "python -m jobs.prepare --config jobs/configs/data/prepare-news.yaml"): "the same",
    ("tuning", "python -m jobs.tune --config jobs/configs/start/tune-lightgbm.yaml --set"): "the same",
    ("guide", "python -m jobs.crossval"): "five folds with twenty methods each",
}


def left_out(page: str, line: str) -> bool:
    return any(page == of and " ".join(line.split()).startswith(first) for of, first in LEFT_OUT)


def commands(page: Path) -> list[str]:
    """All shell and Python blocks of a page, as commands of bash."""
    parts = []
    for block in blocks(page, "sh", "py"):
        if block.language == "py":
            parts.append(f"python - <<'END'\n{block.text}END")
        else:
            parts += [line for line in lines(block.text) if not left_out(page.stem, line)]
    # a gate that stays shut, with status 3, has done its work
    return [short(part + " || [ $? = 3 ]" if re.search(r"jobs\.(gate|weekly)", part) else part) for part in parts]


WITH_COMMANDS = [page for page in PAGES if page.stem != "contributing" and commands(page)]


# What a newcomer stops when he has seen it: servers that run until then, and background processes.
PRELUDE = """
set -euo pipefail
serve() { # runs a server until it answers
    "$@" --port "$PORT" & local server=$!
    for _ in $(seq 100); do curl -fs "127.0.0.1:$PORT" >/dev/null && break; sleep 0.3; done
    curl -fsS "127.0.0.1:$PORT" >/dev/null; kill $server; wait $server || true
}
tensorboard() { serve "$(type -P tensorboard)" "$@"; }
optuna-dashboard() { serve "$(type -P optuna-dashboard)" "$@"; }
trap '[ ! -d runs/dev-s3 ] || { python cluster/local.py stop; python cluster/dev_s3.py stop; }' EXIT
set -x
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    """A checkout with what `make install` makes, real data beside it, and a newcomer's own logs in it."""
    home = tmp_path_factory.mktemp("newcomer") / "ltrscale"
    for folder in ("jobs", "ltrscale", "cluster", "docs"):
        shutil.copytree(ROOT / folder, home / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("Makefile", "pyproject.toml", "README.md", ".gitignore", ".rayignore"):
        shutil.copy2(ROOT / file, home / file)
    link_data(home.parent / "shared" / "data", shared_data)
    (home / ".venv").mkdir()
    for part in Path(sys.prefix).iterdir():
        (home / ".venv" / part.name).symlink_to(part)
    (home / ".venv" / ".installed").unlink(missing_ok=True)
    (home / ".venv" / ".installed").touch()
    for config in (home / "jobs" / "configs").rglob("*.yaml"):
        config.write_text(short(config.read_text()))
    write_logs(home, shared_data)
    return home


def write_logs(home: Path, shared_data: Path) -> None:
    """The logs that the pages take for the reader's own."""
    letor = home / "MSLR-WEB30K" / "Fold1"
    for folder in (letor, home / "logs" / "2026"):
        folder.mkdir(parents=True)
    log = shopping_log()
    log.to_csv(home / "logs" / "shop.csv", index=False)
    later = log[log["search_id"].str.len() == 2].assign(searched_at="17.03.2026 12:00")
    later.assign(search_id="n" + later["search_id"]).to_csv(home / "logs" / "shop-2026-W12.csv", index=False)
    for name in ("train", "vali", "test"):
        sample = shared_data / "letor" / "MSLR-sample" / "train.txt.gz"
        (letor / f"{name}.txt").write_bytes(gzip.decompress(sample.read_bytes()))
    for name in ("rank.train", "rank.test"):
        example = shared_data / "letor" / "lightgbm-example"
        (home / name).write_bytes(gzip.decompress((example / f"{name}.gz").read_bytes()))
        shutil.copy(example / f"{name}.query", home)
    (home / "train_data").mkdir()  # as Baidu-ULTR has it: a query with two documents
    session = "11\t1\x012\t7\n1\tmd5-1\t1\x019\t4\t599\t0\t0\n2\tmd5-2\t2\t5\t599\t1\t0\n"
    (home / "train_data" / "part-00001.gz").write_bytes(gzip.compress(session.encode()))
    synthetic = SyntheticLogConfig(weeks=9, groups_per_week=150)
    rng = np.random.default_rng(0)
    for week, file in enumerate(write_log(synthetic, str(home.parent / "synthetic"), report=lambda _: None), 1):
        rows = pd.read_parquet(file).rename(
            columns={"query_id": "search_id", "item_id": "product_id", "label": "purchased"}
        )
        rows["price"], rows["f_clicks"] = rng.lognormal(3, 1, len(rows)), rng.poisson(3, len(rows))
        rows["purchased"] = rows["purchased"].clip(upper=1)
        rows["position"] = rows.groupby("search_id").cumcount() + 1
        rows["clicked"] = rng.integers(0, 2, len(rows))
        rows["search_text"] = "words " + rows["search_id"].str[-1]
        rows["session_id"] = rows["search_id"]
        if week < 9:
            rows.to_parquet(home / "logs" / "2026" / f"W{week:02}.parquet")
        else:
            rows.drop(columns="purchased").to_parquet(home / "logs" / "2026-W09.parquet")
    scores = pd.DataFrame({"qid": np.repeat(range(20), 5), "doc": range(100), "y": rng.integers(0, 3, 100)})
    scores.assign(s=rng.normal(size=100).round(1)).to_csv(home / "scores.csv", index=False)


@pytest.fixture(scope="module")
def run(checkout: Path) -> Callable[[str], str]:
    """Runs a page's commands, after those of the pages that it goes on from, each page once; returns what went wrong.

    Pages share the checkout. A job that ran for an earlier page is up to date, so it is not started again.
    """
    others = ("AWS_", "RAY_", "LTRSCALE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    environment |= {
        "PATH": f"{checkout / '.venv' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(checkout),
        "RAY_worker_niceness": "0",  # Ray's 15 would let its workers wait for all other tests
        "PORT": str(free_ports(1)[0]),
    }
    known: set[str] = set()

    @functools.cache
    def once(page: str) -> str:
        for before in AFTER.get(page, []):
            if wrong := once(before):
                return wrong
        (path,) = (path for path in PAGES if path.stem == page)
        for name, text in configs(path).items():
            (checkout / name).write_text(short(text))
        script = [line for line in commands(path) if line not in known]
        log = checkout / f"{page}.log"
        with log.open("w") as out:
            shell = subprocess.Popen(
                ["bash", "-c", PRELUDE + "\n".join(script)],
                cwd=checkout,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = shell.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGTERM)
        known.update(line for line in script if line.startswith("python -m jobs.") and "submit" not in line)
        return f"{page}: status {status}\n{log.read_text()[-5000:]}" if status else ""

    return once


@pytest.mark.parametrize("page", [page.stem for page in WITH_COMMANDS])
def test_commands_run(run: Callable[[str], str], page: str) -> None:
    wrong = run(page)
    assert not wrong, wrong


def test_commands_left_out_are_on_their_pages() -> None:
    printed = {
        (page.stem, " ".join(line.split())) for page in PAGES for b in blocks(page, "sh") for line in lines(b.text)
    }
    for of, first in LEFT_OUT:
        assert any(page == of and line.startswith(first) for page, line in printed), (of, first)
