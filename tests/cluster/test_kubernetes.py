"""The RayJob of KubeRay: valid by the schemas of Kubernetes and the operator, complete, and fit for its cluster."""

import copy
import gzip
import json
import re
import shlex
import tomllib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray._private import ray_constants

from ltrscale.config import validate
from ltrscale.training.pretrain import PretrainJob

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "cluster" / "kuberay-rayjob.yaml"
CONFIG_MAP, NETWORK_POLICY, RAY_JOB = yaml.safe_load_all(FILE.read_text())
(WEEKLY,) = yaml.safe_load_all((FILE.parent / "weekly-argo.yaml").read_text())
PINS = dict(line.split("==") for line in (FILE.parent / "constraints.txt").read_text().split())
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


@pytest.mark.slow
def test_is_valid(validator: jsonschema.protocols.Validator) -> None:
    assert RAY_JOB["apiVersion"] == "ray.io/v1"
    assert RAY_JOB["kind"] == "RayJob"
    validator.validate(RAY_JOB)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("spec",), {"entryPoint": "python"}),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 1), {"replicas": "two"}),
        (("spec", "rayClusterSpec", "authOptions"), {"mode": "tokens"}),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0), {"envfrom": []}),
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


def as_pod(spec: dict[str, Any], labels: dict[str, str] | None = None) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", "labels": labels or {}}, "spec": spec}


def weekly_pod() -> dict[str, Any]:
    (template,) = WEEKLY["spec"]["workflowSpec"]["templates"]
    containers = [{"name": "main", **template["container"]}]
    return as_pod({"containers": containers, "volumes": WEEKLY["spec"]["workflowSpec"]["volumes"]})


def resources_of_kubernetes() -> list[dict[str, Any]]:
    """What Kubernetes itself defines: the pods of a RayJob and of a workflow, and the objects beside them."""
    pods = [as_pod(pod(group), group["template"]["metadata"]["labels"]) for group in GROUPS]
    return [CONFIG_MAP, NETWORK_POLICY, *pods, weekly_pod()]


@pytest.mark.parametrize("resource", resources_of_kubernetes(), ids=lambda resource: resource["kind"])
def test_kubernetes_takes_it(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    ("number", "path", "wrong"),
    [
        (1, ("spec",), {"policyType": ["Ingress"]}),
        (4, ("spec",), {"terminationGracePeriodSeconds": "long"}),
        (5, ("spec", "containers", 0), {"envfrom": []}),
    ],
)
def test_kubernetes_would_not_take_a_misspelt_field(
    number: int, path: tuple[str | int, ...], wrong: dict[str, Any]
) -> None:
    changed = copy.deepcopy(resources_of_kubernetes()[number])
    node = changed
    for key in path:
        node = node[key]
    node.update(wrong)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(changed, kubernetes_validate.latest_version(), strict=True)


def test_both_pools_grow_from_nothing_on_spot_machines() -> None:
    assert CLUSTER["enableInTreeAutoscaling"] is True
    assert CLUSTER["autoscalerOptions"]["version"] == "v2"
    assert {group["groupName"]: group["maxReplicas"] for group in GROUPS[1:]} == {"readers": 4, "gpus": 2}
    assert {(group["replicas"], group["minReplicas"]) for group in GROUPS[1:]} == {(0, 0)}
    assert {pod(group)["restartPolicy"] for group in GROUPS} == {"Never"}, "which autoscaler v2 wants"
    head, *workers = (pod(group)["nodeSelector"] for group in GROUPS)
    ((label, _),) = head.items()
    assert all(selector.keys() == head.keys() and selector[label] != head[label] for selector in workers)
    for group in GROUPS[1:]:
        taint = {"key": label, "operator": "Equal", "value": pod(group)["nodeSelector"][label], "effect": "NoSchedule"}
        assert taint in pod(group)["tolerations"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod(GROUPS[2])["tolerations"]
    assert isinstance(entrypoint_config().workers.number, tuple), "spot machines come and go"


def test_a_pod_that_is_taken_away_drains_before_it_is_killed() -> None:
    """`ray start` of this version marks its node as draining at SIGTERM, for as long as the variable says."""
    assert hasattr(ray_constants, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")
    for group in GROUPS[1:]:
        drain = {each["name"]: each["value"] for each in container(group)["env"]}
        seconds = float(drain["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert 30 <= seconds <= pod(group)["terminationGracePeriodSeconds"] - 30


def test_only_who_must_reaches_the_pods() -> None:
    spec = NETWORK_POLICY["spec"]
    (labels,) = {tuple(group["template"]["metadata"]["labels"].items()) for group in GROUPS}
    assert spec["podSelector"]["matchLabels"] == dict(labels)
    assert spec["policyTypes"] == ["Ingress"]
    among, dashboard, metrics = spec["ingress"]
    assert among == {"from": [{"podSelector": spec["podSelector"]}]}
    ports = {port["name"]: port["containerPort"] for port in container(GROUPS[0])["ports"]}
    assert [port["port"] for port in dashboard["ports"]] == [ports["dashboard"]]
    assert [port["port"] for port in metrics["ports"]] == [ports["metrics"]]
    submitter = {"matchLabels": {"batch.kubernetes.io/job-name": RAY_JOB["metadata"]["name"]}}
    assert {"podSelector": submitter} in dashboard["from"]
    assert all(ports["metrics"] in (p["containerPort"] for p in container(group)["ports"]) for group in GROUPS)


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
    """The amount when a pool has grown to its limit."""
    return sum(group["maxReplicas"] * int(limits(group)[resource]) for group in groups)


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
    assert CLUSTER["rayVersion"] == PINS["ray"] == version("ray")
    assert version("torch").partition("+")[0] == PINS["torch"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    images = {
        image
        for path in (ROOT / "cluster").iterdir()
        if path.is_file()
        for image in re.findall(r"registry\.example\.com/[\w/-]+:[\w.]+", path.read_text())
    }
    assert images == {f"registry.example.com/ltrscale:{project['version']}"} == {container(GROUPS[0])["image"]}
