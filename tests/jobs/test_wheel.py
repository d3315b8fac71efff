"""A wheel, installed in an environment of its own and used where there is no checkout."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shopping_log import shopping_log

ROOT = Path(__file__).resolve().parents[2]
# of what the demo compares, what is quick
QUICK = ("--set=synthetic.groups_per_week=60", "--set=splits.train.labelled_fraction=1", "--set=seeds=[0]")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel installs; the libraries are those of the environment of the tests."""
    source, wheels, site = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / file, source)
    for folder in ("ltrscale", "jobs"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    build = (*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source)
    subprocess.run(build, cwd=source, check=True)
    (wheel,) = wheels.iterdir()
    subprocess.run((*pip, "install", "--no-deps", "--no-index", "--target", site, wheel), cwd=source, check=True)
    return site


def run(site: Path, folder: Path, *words: str) -> str:
    """What `ltrscale` of the wheel says."""
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [site / "bin" / "ltrscale", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr + done.stdout


@pytest.mark.nightly
def test_it_has_all_that_the_jobs_read(site: Path) -> None:
    def files(below: Path) -> set[str]:
        every = {str(path.relative_to(below)) for top in ("ltrscale", "jobs") for path in (below / top).rglob("*.*")}
        return {name for name in every if "__pycache__" not in name}

    assert files(site) == files(ROOT)


@pytest.mark.nightly
def test_from_a_log_to_a_ranker(site: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    shopping_log().to_csv(tmp_path / "logs" / "shop.csv", index=False)
    said = run(site, tmp_path, "init", "logs/shop.csv")
    (prepare,) = re.findall(r"next: ltrscale (prepare .*)", said)
    assert "kept" in run(site, tmp_path, *prepare.split())

    (tmp_path / "mine.yaml").write_text(run(site, tmp_path, "init", "--example", "demo"))
    trees = "methods={trees: {kind: gbdt, gbdt: {num_trees: 10}}, other: {kind: gbdt, gbdt: {num_trees: 5}}}"
    few = ("--set=evaluate.baseline=trees", f"--set={trees}")
    said = run(site, tmp_path, "pipeline", "--config", "mine.yaml", *QUICK, *few)
    assert "next" in said
    assert "python -m" not in said

    auto = ("auto", "--config", "jobs/configs/start/auto-demo.yaml", "--set=budget=0.3")
    run(site, tmp_path, *auto, "--set=splits.train.labelled_fraction=1")
    assert (tmp_path / "runs" / "demo" / "auto" / "leaderboard" / "report.md").exists()
