"""Each check of `jobs.doctor`, before and after something is broken."""

import os
import re
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobs.s3 import environment
from jobs.verbs import command
from ltrscale import storage
from ltrscale.runtime import checks
from ltrscale.storage import conditions
from ltrscale.storage.files import below


def config_of(name: str) -> Any:
    return command(name).config


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Let packages have other versions; an empty one is not installed."""
    real = metadata.version

    def version(name: str) -> str:
        if name in versions and not versions[name]:
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)


def test_the_pinned_versions_are_well() -> None:
    line = checks.packages(checks.pinned_versions(), "constraints.txt has")
    assert line.level == "ok"
    assert f"ray {metadata.version('ray')}" in line.what


@pytest.mark.parametrize(
    ("versions", "level", "named"),
    [
        ({"ray": "2.1.0"}, "error", "ray 2.1.0, .* constraints.txt has: ray 2.60.0$"),
        ({"pyarrow": "1.0.0"}, "warning", "constraints.txt has: pyarrow"),
        ({"lightgbm": ""}, "error", "lightgbm missing"),
        ({"torch": "2.13.0+cu126"}, "ok", r"torch 2\.13\.0\+cu126"),
    ],
    ids=str,
)
def test_wrong_versions(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], level: str, named: str) -> None:
    installed(monkeypatch, **versions)
    line = checks.packages(checks.pinned_versions(), "constraints.txt has")
    assert line.level == level
    assert re.search(named, line.what)
    assert ("make install" in line.remedy) == (level != "ok")


def test_another_python_is_an_error_in_its_minor_version_only() -> None:
    ours = checks.versions()
    major, minor, _ = ours["python"].split(".")
    same, other = {**ours, "python": f"{major}.{minor}.99"}, {**ours, "python": f"{major}.{int(minor) + 1}.0"}
    assert checks.packages(same, "theirs are").level == "ok"
    assert checks.packages(other, "theirs are").level == "error"


def test_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    monkeypatch.setattr(checks, "_DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert checks.gpus() == checks.CheckResult("ok", "no GPU; torch computes on the CPU")
    assert "Ray counts 2 GPUs, torch 0" in checks.gpus(2).what

    driver.write_text("NVRM version: 550.1\nGCC")
    monkeypatch.setattr(torch.version, "cuda", None)
    without = checks.gpus()
    assert without.level == "error"
    assert "NVRM version: 550.1" in without.what
    assert "has no CUDA" in without.what
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "but no GPU; torch is for CUDA 12.8" in checks.gpus().what

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=150e9))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(2))
    assert checks.gpus(2) == checks.CheckResult("ok", "2 x NVIDIA H200 (150 GB), CUDA 12.8, NCCL 2.27.3")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "no NCCL" in checks.gpus(2).what

    def faulty(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image\nmore")

    monkeypatch.setattr(torch, "ones", faulty)
    assert "GPU 0 cannot compute (CUDA error: no kernel image)" in checks.gpus(2).what


def test_memory_and_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def has(total: float, free: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=total, free=free))

    has(64e9, 50e9)
    assert checks.shared_memory(10e9).level == "ok"
    assert checks.spill_disk(tmp_path, 10e9).level == "ok"
    has(64e6, 64e6)
    small = checks.shared_memory(10e9)
    assert (small.level, "--shm-size=11g" in small.remedy) == ("warning", True)
    has(64e9, 8e9)
    assert checks.spill_disk(tmp_path, 10e9).level == "warning"
    has(64e9, 3e9)
    assert "95% full" in checks.spill_disk(tmp_path, 10e9).what
    assert checks.default_store() > 1e8


@pytest.mark.parametrize(("ahead_s", "level"), [(0.4, "ok"), (-20, "warning"), (1000, "error")])
def test_clocks(ahead_s: float, level: str) -> None:
    assert checks.clocks({"a": 0.1, "b": ahead_s}).level == level


def test_configs(tmp_path: Path) -> None:
    def check(name: str, text: str, job: str | None = None) -> checks.CheckResult:
        (tmp_path / name).write_text(text)
        return checks.config_validity(str(tmp_path / name), job, config_of)

    good = "out: runs/a\ntrain: {data: runs/b, periods: 2026-W01..2026-W02}\n"
    assert check("pretrain-shop.yaml", good).level == "ok"
    assert "shop: no such job" in check("shop.yaml", good).what
    assert check("shop.yaml", good, "pretrain").level == "ok"
    wrong = check("pretrain.yaml", good + "sead: 1\n")
    assert (wrong.level, "sead: unknown key" in wrong.what) == ("error", True)
    assert checks.config_validity(str(tmp_path / "pretrain-none.yaml"), None, config_of).level == "error"


STORE_CHECKS: list[Callable[[str], checks.CheckResult]] = [
    checks.store_access,
    checks.store_conditions,
    checks.store_clock,
]


def test_a_local_store(tmp_path: Path) -> None:
    assert [check(str(tmp_path)).level for check in STORE_CHECKS] == ["ok"] * 3
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert checks.store_access(f"{tmp_path}/file").level == "error"


@pytest.mark.slow
@pytest.mark.s3
def test_s3(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{s3}/doctor"
    lines = [check(url) for check in STORE_CHECKS]
    assert [line.level for line in lines] == ["ok"] * 3, lines
    assert not any(below(url)), "SeaweedFS keeps the directory"

    monkeypatch.setitem(conditions._probed, ("tests", os.environ["AWS_ENDPOINT_URL"]), False)
    careless = checks.store_conditions(url)
    assert (careless.level, careless.remedy.startswith("run one writer")) == ("warning", True)
    monkeypatch.setattr(storage, "clock_ahead_s", lambda _: -1000.0)
    assert checks.store_clock(url).level == "error"

    with environment(AWS_SECRET_ACCESS_KEY="wrong"):
        refused = checks.store_access(url)
    assert (refused.level, "check AWS_ACCESS_KEY_ID" in refused.remedy) == ("error", True)
    assert checks.store_access("s3://none/doctor").level == "error"
    with environment(AWS_ENDPOINT_URL="http://127.0.0.1:1", LTRSCALE_STORAGE_PATIENCE_S="0.1"):
        absent = checks.store_access(url)
    assert (absent.level, absent.remedy) == ("error", "check the network and AWS_ENDPOINT_URL")
