"""The files of cluster/ besides code: the image, the EC2 cluster, the uploads, and the paths that they name."""

import copy
import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ray._private.runtime_env.packaging import create_package
from ray.autoscaler._private.util import prepare_config, validate_config

from ltrscale.runtime.workers import WorkersConfig

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "cluster"
RAY_UP: dict[str, Any] = yaml.safe_load((CLUSTER / "ray-up.yaml").read_text())
TYPES = RAY_UP["available_node_types"]


def test_ray_up_takes_its_file() -> None:
    validate_config(prepare_config(copy.deepcopy(RAY_UP)))


@pytest.mark.parametrize("wrong", [{"max_worker": 3}, {"docker": {"imagee": "x"}}, {"head_node_type": 3}])
def test_ray_up_catches_a_misspelt_field(wrong: dict[str, Any]) -> None:
    prepared = prepare_config(copy.deepcopy(RAY_UP))
    with pytest.raises(jsonschema.ValidationError):
        validate_config({**prepared, **wrong})


def test_ray_up_starts_what_the_types_promise() -> None:
    assert RAY_UP["head_node_type"] in TYPES
    assert TYPES["head"]["resources"] == {"CPU": 0}
    head, worker = (shlex.split(RAY_UP[f"{role}_start_ray_commands"][-1]) for role in ("head", "worker"))
    assert {"--head", "--num-cpus=0", "--dashboard-host=127.0.0.1"} <= set(head)
    port = next(word.partition("=")[2] for word in head if word.startswith("--port="))
    assert f"--address=$RAY_HEAD_IP:{port}" in worker
    assert sum(kind.get("max_workers", 0) for kind in TYPES.values()) <= RAY_UP["max_workers"]


def test_ray_up_has_the_workers_that_its_comments_name() -> None:
    text = (CLUSTER / "ray-up.yaml").read_text()
    (read_on,) = (yaml.safe_load(found) for found in re.findall(r"workers\.read_on: (\{.*?\})", text))
    (workers,) = (yaml.safe_load(found) for found in re.findall(r"workers: (\{.*?\})", text))
    assert all(TYPES["readers"]["resources"][name] >= amount for name, amount in read_on.items())
    gpus, of_a_worker = TYPES["gpus"]["resources"]["GPU"] * TYPES["gpus"]["max_workers"], workers.pop("gpus")
    assert WorkersConfig(**workers).most * of_a_worker <= gpus
    assert not set(read_on) & set(TYPES["gpus"]["resources"])


def test_ray_up_has_the_pools_of_kubernetes() -> None:
    """CPU nodes that read and GPU nodes that train, both from nothing, on spot machines."""
    *_, job = yaml.safe_load_all((CLUSTER / "kuberay-rayjob.yaml").read_text())
    pools = {group["groupName"] for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    assert pools == set(TYPES) - {"head"}
    for pool in pools:
        assert TYPES[pool]["min_workers"] == 0
        assert TYPES[pool]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in TYPES["head"]["node_config"]


def dockerfile() -> list[list[str]]:
    """The instructions of the Dockerfile, as words."""
    text = re.sub(r"^#.*\n", "", (CLUSTER / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.strip()]


def test_the_image_has_what_it_copies() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [source for words in dockerfile() if words[0] == "COPY" for source in words[1:-1]]
    assert "ltrscale" in copied
    assert sorted(copied) == sorted(kept)
    for source in copied:
        assert (ROOT / source).exists(), source


def test_the_image_is_pinned_as_the_environment_is() -> None:
    instructions = dockerfile()
    assert [words[1] for words in instructions if words[0] == "FROM"] == ["python:3.11-slim-bookworm"]
    installs = [words for words in instructions if "pip" in words and "install" in words]
    assert len(installs) == 2
    assert all(words[words.index("-c") :][:2] == ["-c", "cluster/constraints.txt"] for words in installs)
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert python == ">=3.11"


def pins() -> dict[str, str]:
    """The pinned version of each package, by its normalised name."""
    lines = (CLUSTER / "constraints.txt").read_text().split()
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def required(*requirements: str) -> set[str]:
    """The packages that these bring along, by what the packages of this environment say of themselves."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        package = waiting.pop()
        name = canonicalize_name(package.name)
        if name in found and not package.extras:
            continue
        found.add(name)
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            extras = ("", *package.extras)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return found


OF_CUDA = ("nvidia-", "cuda-", "triton")
"""What torch and xgboost bring along for GPUs; torch pins its own."""


def test_every_package_of_the_image_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {name for name in required(*project) if not name.startswith(OF_CUDA)}
    assert {"ray", "torch", "lightgbm"} <= needed
    assert len(needed) > 50
    assert needed - set(pins()) <= {"setuptools"}, "which torch needs, of any version"
    assert {"boto3", "botocore", "s3transfer", "jmespath"} <= set(pins()), "which only the image has"


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # it asks an index of packages, without downloading them
def test_pip_would_install_what_is_pinned(tmp_path: Path) -> None:
    """The last installation of the Dockerfile, tried in a folder with what the image has by then."""
    copied = [source for words in dockerfile() if words[0] == "COPY" for source in words[1:-1]]
    for source in copied:
        (tmp_path / "image" / source).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, tmp_path / "image" / source)
    (*_, words) = (words for words in dockerfile() if "pip" in words)
    assert words[:3] == ["RUN", "pip", "install"]
    trial = ["--dry-run", "--quiet", "--ignore-installed", f"--report={tmp_path / 'report.json'}"]
    command = [sys.executable, "-m", "pip", "install", *trial, *words[3:]]
    done = subprocess.run(command, cwd=tmp_path / "image", capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    packages = [item["metadata"] for item in json.loads((tmp_path / "report.json").read_text())["install"]]
    found = {canonicalize_name(package["name"]): package["version"].partition("+")[0] for package in packages}
    assert found.pop("ltrscale") == "0.1.0"
    assert found.keys() >= {"ray", "torch", "lightgbm", "boto3"}
    bound = {name: version for name, version in found.items() if not name.startswith((*OF_CUDA, "setuptools"))}
    assert bound == {name: pins().get(name) for name in bound}


def test_a_token_is_asked_for_wherever_the_image_runs() -> None:
    (environment,) = (words[1:] for words in dockerfile() if words[0] == "ENV")
    assert {"RAY_AUTH_MODE=token", "RAY_USAGE_STATS_ENABLED=0"} <= set(environment)
    assert "~/.ray/auth_token" in RAY_UP["file_mounts"]


def test_uploads_hold_the_jobs_and_little_else(tmp_path: Path) -> None:
    """The files that `ray job submit --working-dir .` sends, with Ray's own defaults."""
    package = tmp_path / "package.zip"
    create_package(str(ROOT), package, include_gitignore=True, excludes=[".git", ".venv", "venv", "__pycache__"])
    with zipfile.ZipFile(package) as archive:
        names = archive.namelist()
    for needed in ("jobs/pretrain.py", "jobs/configs/start/distributed-dev.yaml", "ltrscale/runtime/workers.py"):
        assert needed in names
    unwanted = ("runs/*", ".venv/*", ".git/*", "data/*", "tests/*", "docs/*", ".*_cache/*", "*.pyc")
    assert [name for name in names if any(fnmatch(name, pattern) for pattern in unwanted)] == []
    assert package.stat().st_size < 6 << 20  # with 1.2 MiB of weights of `kind: in_context`


@pytest.mark.parametrize("path", sorted(p for p in CLUSTER.iterdir() if p.is_file()), ids=lambda path: path.name)
def test_paths_that_are_named_exist(path: Path) -> None:
    for named in re.findall(r"\b(?:cluster|jobs/configs/\w+)/[\w.-]*\w", path.read_text()):
        assert (ROOT / named).exists(), named
    for module in re.findall(r"-m (jobs\.\w+)", path.read_text()):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
