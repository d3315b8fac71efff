"""The commands of the README and the docs run as they are printed, page by page, in a checkout of their own.

A page that goes on from another runs in a copy of that one's checkout, all others in a copy of a newcomer's. So two
processes of the tests can share the pages, and a page that needs more than it says fails.
"""

import gzip
import json
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
from made_once import MadeOnce
from nightly import nightly
from pages import PAGES, ROOT, blocks, configs, lines, link_data, short
from shopping_log import shopping_log
from synthetic_columns import write_synthetic

from jobs.s3 import free_ports
from ltrscale.simulate.synthetic import SyntheticLogConfig

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.s3, pytest.mark.timeout(1800)]

# The page that a page's commands go on from.
AFTER = {
    "quick-start": "README",
    "own-data": "README",
    "serving": "quick-start",
    "watching": "quick-start",
    "methods": "quick-start",
    "weeks": "quick-start",
    "report": "quick-start",
    "study": "guide",
    "trees": "guide",
    "scoring": "distillation",
}
# The pages that a newcomer reads first; all others run at night, for tests run the same jobs.
BY_DAY = {"README", "quick-start", "own-data"}
# Commands, by page and first words, that are read only (tests/test_readme.py).
LEFT_OUT = {
    ("README", "make test"): "it runs this file",
    ("README", "make check"): "it is a part of make test",
    ("serving", "tritonserver"): "it needs Triton",
    ("serving", "curl"): "it needs OpenSearch with its plugin",
    ("simulators", "python -m jobs.prepare --config jobs/configs/data/prepare-mslr"): "1 GB that may not be passed on",
    ("simulators", "python -m jobs.relabel --config binary.yaml"): "the same data",
    ("simulators", "python -m jobs.simulate"): "5 GB; tests/simulate/test_portal.py makes smaller ones",
    ("simulators", "python -m tests.chaos.scale"): "eleven jobs, each killed; tests/chaos/test_scale.py kills one",
    ("methods", "python -m jobs.evaluate --config news.yaml"): "an hour: a week of the news log and models of it",
    ("tuning", "python ../shared/data/news/make_log.py"): "an hour: the figures of the section Measured",
    ("tuning", "python -m jobs.prepare --config jobs/configs/data/prepare-news.yaml"): "the same",
    ("tuning", "python -m jobs.tune --config jobs/configs/start/tune-lightgbm.yaml --set"): "the same",
    ("auto", "python -m jobs.auto"): "5 and 90 minutes; tests/experiments/auto/test_auto.py has half of one",
    (
        "guide",
        "python -m jobs.pipeline --config jobs/configs/results/crossval-letor.yaml",
    ): "five folds of twenty methods",
    ("watching", "prometheus"): "it is a server for a cluster; tests/cluster/test_prometheus.py starts it",
    ("distributed", "docker build"): "it needs a builder of images",
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


def to_come(page: str) -> int:
    """The number of commands of a page and of the longest way on from it."""
    after = [to_come(other) for other, before in AFTER.items() if before == page]
    return len(COMMANDS[page]) + max(after, default=0)


COMMANDS = {page.stem: found for page in PAGES if page.stem != "extending" and (found := commands(page))}
IN_ORDER = sorted(COMMANDS, key=to_come, reverse=True)

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
trap 'times; [ ! -d runs/dev-s3 ] || { python cluster/local.py stop; python cluster/dev_s3.py stop; }' EXIT
PS4='+ $SECONDS s: '
set -x
"""


def newcomer(place: Path, shared_data: Path) -> None:
    """A checkout with what `make install` makes, real data beside it, and a newcomer's own logs in it."""
    home = place / "ltrscale"
    for folder in ("jobs", "ltrscale", "cluster", "docs"):
        shutil.copytree(ROOT / folder, home / folder)  # with what is compiled
    for file in ("Makefile", "pyproject.toml", "README.md", ".gitignore", ".rayignore"):
        shutil.copy2(ROOT / file, home / file)
    link_data(place / "shared" / "data", shared_data)
    (home / ".venv").mkdir()
    for part in Path(sys.prefix).iterdir():
        (home / ".venv" / part.name).symlink_to(part)
    for stamp in (".installed", ".installed-dev", ".compiled"):
        (home / ".venv" / stamp).unlink(missing_ok=True)
        (home / ".venv" / stamp).touch()
    for config in (home / "jobs" / "configs").rglob("*.yaml"):
        config.write_text(short(config.read_text()))
    write_logs(home, shared_data)


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
    for week, file in enumerate(write_synthetic(synthetic, home.parent / "synthetic"), 1):
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
    write_events(home / "logs")
    scores = pd.DataFrame({"qid": np.repeat(range(20), 5), "doc": range(100), "y": rng.integers(0, 3, 100)})
    scores.assign(s=rng.normal(size=100).round(1)).to_csv(home / "scores.csv", index=False)


def write_events(logs: Path) -> None:
    """The indices of OpenSearch's UBI: lists of three items, each second one with a click."""
    queries, events = [], []
    for k in range(90):
        seen = {"query_id": f"q{k}", "client_id": f"c{k % 9}", "timestamp": f"2026-01-{5 + k % 25:02}T10:00:00Z"}
        items = [f"p{(k + place) % 20}" for place in range(3)]
        queries.append({**seen, "user_query": f"words {k % 4}", "query_response_hit_ids": items})
        clicked = {"object": {"object_id": items[k % 3]}, "position": {"ordinal": k % 3 + 1}}
        events += [{**seen, "action_name": "click", "event_attributes": clicked}] * (k % 2)
    (logs / "ubi").mkdir()
    for name, rows in (("queries", queries), ("events", events)):
        (logs / "ubi" / f"ubi_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pd.DataFrame({"item": [f"p{i}" for i in range(20)], "price": range(20), "rating": range(20, 0, -1)}).to_csv(
        logs / "catalogue.csv", index=False
    )


@pytest.fixture(scope="module")
def checkout(made_once: MadeOnce, shared_data: Path) -> Callable[[str], Path]:
    """The checkout in which the commands of a page have run, and in `wrong`, if something is, what."""

    def after(page: str) -> Path:
        return made_once(f"page-{page}", lambda place: make(place, page))

    def make(place: Path, page: str) -> None:
        before = after(AFTER[page]) if page in AFTER else made_once("newcomer", lambda new: newcomer(new, shared_data))
        shutil.copytree(before, place, symlinks=True, dirs_exist_ok=True)
        if not (place / "wrong").exists() and (wrong := went_wrong(page, place / "ltrscale")):
            (place / "wrong").write_text(wrong)

    return after


def went_wrong(page: str, home: Path) -> str:
    """Run a page's commands, but those of jobs that have run for an earlier page; returns the end of a failed log."""
    others = ("AWS_", "RAY_", "LTRSCALE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    environment |= {
        "PATH": f"{home / '.venv' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(home),
        "RAY_worker_niceness": "0",  # Ray's 15 would let its workers wait for all other tests
        "PORT": str(free_ports(1)[0]),
    }
    (path,) = (path for path in PAGES if path.stem == page)
    for name, text in configs(path).items():
        (home / name).write_text(short(text))
    script = [line for line in COMMANDS[page] if as_job(line) not in has_run(page)]
    log = home / f"{page}.log"
    with log.open("w") as out:
        shell = subprocess.Popen(
            ["bash", "-c", PRELUDE + "\n".join(script)],
            cwd=home,
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
    said = log.read_text()
    if left_out := [line for line in said.splitlines() if "report: left out: the chart" in line]:
        return f"{page}: {left_out[0]}"
    return f"{page}: status {status}\n{said[-5000:]}" if status else ""


def has_run(page: str) -> set[str]:
    """The jobs that the pages before a page have run to their end."""
    if page not in AFTER:
        return set()
    before = AFTER[page]
    jobs = {
        as_job(line) for line in COMMANDS[before] if re.match(r"python -m jobs\.(?!submit)|ltrscale|make demo", line)
    }
    return jobs | has_run(before)


def as_job(line: str) -> str:
    """The command with the longer of a job's two names."""
    return re.sub(r"^ltrscale (?=\w)", "python -m jobs.", line)


@pytest.mark.parametrize("page", [page if page in BY_DAY else nightly(page) for page in IN_ORDER])
def test_commands_run(checkout: Callable[[str], Path], page: str) -> None:
    wrong = checkout(page) / "wrong"
    assert not wrong.exists(), wrong.read_text()


def test_commands_left_out_are_on_their_pages() -> None:
    printed = {
        (page.stem, " ".join(line.split())) for page in PAGES for b in blocks(page, "sh") for line in lines(b.text)
    }
    for of, first in LEFT_OUT:
        assert any(page == of and line.startswith(first) for page, line in printed), (of, first)
