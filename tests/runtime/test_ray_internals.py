"""Uses of Ray's internals: the tested version, the modules that may use them, and that they still exist."""

import ast
import logging
from pathlib import Path

import pytest
import ray

from ltrscale.runtime import ray_internals

ROOT = Path(__file__).parents[2]
ADAPTERS = {"ltrscale/runtime/ray_internals.py", "ltrscale/runtime/under_ray.py"}


def test_the_pinned_version_of_ray_is_the_one_that_its_inside_was_looked_at_with() -> None:
    pins = dict(line.split("==") for line in (ROOT / "cluster" / "constraints.txt").read_text().split())
    remedy = (
        f"ltrscale/runtime/ray_internals.py, ltrscale/runtime/under_ray.py and cluster/local.py use the inside of Ray "
        f"{ray_internals.VERSION}: look at each in the new version, run the tests marked ray, then change VERSION"
    )
    assert pins["ray"] == ray_internals.VERSION, remedy
    assert ray.__version__ == ray_internals.VERSION, remedy


def private_names(path: Path) -> list[str]:
    """The names of Ray that a module uses and that begin with an underscore or contain `internal`."""
    found, of_ray = [], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            found += [name for name in names if name.startswith("ray.") and ("._" in name or ".execution" in name)]
            of_ray |= (
                {alias.asname or alias.name.split(".")[0] for alias in node.names} if names[0][:3] == "ray" else set()
            )
        elif isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            if "iter_internal" in node.attr or (whole.split(".")[0] in of_ray and node.attr.startswith("_")):
                found.append(whole)
    return found


@pytest.mark.slow
def test_only_the_adapters_use_the_inside_of_ray() -> None:
    users = {
        str(path.relative_to(ROOT))
        for folder in ("ltrscale", "jobs")
        for path in (ROOT / folder).rglob("*.py")
        if private_names(path)
    }
    assert users == ADAPTERS


def test_a_name_that_a_new_version_no_longer_has_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'GONE'"), ray_internals._replaced(ray, "GONE", 1):
        pass


def test_no_keys_of_s3_travel_with_the_trials_of_a_search() -> None:
    from ray.tune.execution import class_cache

    ray_internals.keep_keys_out_of_trials()
    assert class_cache.ENV_VARS_TO_PROPAGATE
    assert not [name for name in class_cache.ENV_VARS_TO_PROPAGATE if name.startswith("AWS_")]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_an_autoscaler_that_does_not_answer_in_time_is_not_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ray_internals._log_unknown.cache_clear()
    monkeypatch.setattr(ray_internals, "_ANSWER_S", 1e-5)  # even then an idle machine answers in time now and again
    with caplog.at_level(logging.WARNING):
        assert [ray_internals.unmet_requests() for _ in range(300)] == [None] * 300
    assert [record.message for record in caplog.records] == [
        "the cluster does not say what its autoscaler cannot provide (RPC error: Deadline Exceeded)"
    ]
