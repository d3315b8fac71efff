"""The RayJob of KubeRay: valid by the operator's schema, complete, and with resources that fit its cluster."""

import copy
import gzip
import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ltrscale.config import validate
from ltrscale.training.pretrain import PretrainJob

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "cluster" / "kuberay-rayjob.yaml"
CONFIG_MAP, RAY_JOB = yaml.safe_load_all(FILE.read_text())
CLUSTER = RAY_JOB["spec"]["rayClusterSpec"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]


def pod(group: dict[str, Any]) -> dict[str, Any]:
    spec = group["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def container(group: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod(group)["containers"]
    assert isinstance(only, dict)
    return only


@pytest.fixture(scope="module")
def validator() -> jsonschema.protocols.Validator:
    """Checks a RayJob by KubeRay's schema, where an unknown field is an error."""
    folder = ROOT.parent / "shared" / "kuberay"
    if not folder.is_dir():
        pytest.skip("KubeRay's custom resource definitions (../shared/kuberay) are not beside this checkout")
    with gzip.open(folder / "ray.io_rayjobs.yaml.gz") as stream:
        definition = yaml.load(stream, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = (v for v in definition["spec"]["versions"] if v["name"] == "v1")
    strict: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    close(strict)
    strict["properties"]["metadata"] = {
        "type": "object",
        "required": ["name"],
    }  # Kubernetes' own, not in the definition
    return jsonschema.Draft202012Validator(strict)


def close(node: Any) -> None:
    """Forbid unknown keys wherever a schema lists keys."""
    if isinstance(node, dict):
        if "properties" in node:
            node.setdefault("additionalProperties", False)
        for value in node.values():
            close(value)
    elif isinstance(node, list):
        for value in node:
            close(value)


def test_is_valid(validator: jsonschema.protocols.Validator) -> None:
    assert RAY_JOB["apiVersion"] == "ray.io/v1"
    assert RAY_JOB["kind"] == "RayJob"
    validator.validate(RAY_JOB)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("spec",), {"entryPoint": "python"}),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0), {"replica": 3}),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 1), {"replicas": "two"}),
        (("spec", "rayClusterSpec", "authOptions"), {"mode": "tokens"}),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0), {"envfrom": []}),
        (
            ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "volumes", 1, "emptyDir"),
            {"medum": "Memory"},
        ),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 1, "rayStartParams"), {"num-gpus": 8}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_misspelt_field_is_caught(
    validator: jsonschema.protocols.Validator, path: tuple[str | int, ...], wrong: dict[str, Any]
) -> None:
    changed = copy.deepcopy(RAY_JOB)
    node = changed
    for key in path:
        node = node[key]
    node.update(wrong)
    with pytest.raises(jsonschema.ValidationError, match=next(iter(wrong.values() if "mode" in wrong else wrong))):
        validator.validate(changed)


def test_what_it_names_exists() -> None:
    text = FILE.read_text()
    secrets = set(re.findall(r"create secret generic (\S+)", text))
    for group in GROUPS:
        volumes = {volume["name"]: volume for volume in pod(group)["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container(group)["volumeMounts"]}
        assert set(mounts) == set(volumes)
        assert mounts["shm"] == "/dev/shm"
        assert {source["secretRef"]["name"] for source in container(group)["envFrom"]} == secrets
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        maps = [volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume]
        assert set(maps) <= {CONFIG_MAP["metadata"]["name"]}
    assert {container(group)["image"] for group in GROUPS} == {container(GROUPS[0])["image"]}
    assert f"job/{RAY_JOB['metadata']['name']}" in text


def entrypoint_config() -> PretrainJob:
    """The config of the entrypoint, as the job reads it on the head."""
    words = shlex.split(RAY_JOB["spec"]["entrypoint"])
    assert words[:2] == ["python", "-m"]
    assert words[2] == "jobs.pretrain"
    assert find_spec(words[2]) is not None
    path = Path(words[words.index("--config") + 1])
    mounts = {mount["name"]: mount["mountPath"] for mount in container(GROUPS[0])["volumeMounts"]}
    assert mounts["config"] == str(path.parent)
    return validate(PretrainJob, yaml.safe_load(CONFIG_MAP["data"][path.name]), str(path))


def test_the_job_fits_the_cluster() -> None:
    job, groups = entrypoint_config(), CLUSTER["workerGroupSpecs"]
    with_gpus = [group for group in groups if "nvidia.com/gpu" in limits(group)]
    assert job.workers.most * job.workers.gpus == total(with_gpus, "nvidia.com/gpu")
    assert job.workers.most * job.workers.cpus <= total(with_gpus, "cpu")
    assert job.pretrain.stream.streams % job.workers.most == 0
    assert job.workers.read_on
    readers = [group for group in groups if job.workers.read_on.keys() <= resources(group).keys()]
    assert readers
    for group in readers:
        assert group not in with_gpus
        assert all(resources(group)[name] >= amount for name, amount in job.workers.read_on.items())


def limits(group: dict[str, Any]) -> dict[str, str]:
    found = container(group)["resources"]["limits"]
    assert isinstance(found, dict)
    return found


def total(groups: list[dict[str, Any]], resource: str) -> int:
    return sum(group["replicas"] * int(limits(group)[resource]) for group in groups)


def resources(group: dict[str, Any]) -> dict[str, float]:
    """The custom resources of a group's nodes, as the shell passes them to `ray start`."""
    (word,) = shlex.split(group["rayStartParams"].get("resources", "{}"))
    found = json.loads(word)
    assert isinstance(found, dict)
    return found


def test_the_head_does_no_work_and_asks_for_a_token() -> None:
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert CLUSTER["authOptions"] == {"mode": "token"}


def test_versions_are_those_of_the_project() -> None:
    pins = dict(line.split("==") for line in (ROOT / "cluster" / "constraints.txt").read_text().split())
    assert CLUSTER["rayVersion"] == pins["ray"]
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert container(GROUPS[0])["image"].endswith(f"/ltrscale:{version[1]}")
