"""A cluster without nodes for workers, whose autoscaler adds real nodes on this machine."""

import gc
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from faulty_pretraining import FaultyPretraining, attempts, check_exactly_once, run_pretraining
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID
from ray.cluster_utils import Cluster
from shared_cluster import SharedCluster

from jobs.s3 import environment, free_ports
from ltrscale.errors import InputError
from ltrscale.runtime.workers import WorkersConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),  # Ray's
]
HEAD_CPUS = 2
"""For reading; of workers none fits there, for the head has no label."""


@pytest.fixture(scope="module")
def autoscaling(tmp_path_factory: pytest.TempPathFactory, shared_cluster: SharedCluster) -> Iterator[None]:
    """A head, and an autoscaler that may add two nodes labelled `pool: train` with a CPU each.

    Ray's own `AutoscalingCluster` ends all processes of Ray on the machine when it starts.
    """
    import psutil  # which Ray brings along

    shared_cluster.stop()
    (port,) = free_ports(1)
    path = tmp_path_factory.mktemp("autoscaling") / "cluster.json"
    path.write_text(json.dumps(autoscaling_config(port)))
    settings = {
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with environment(**settings):
        head = {"num_cpus": HEAD_CPUS, "include_dashboard": False, "gcs_server_port": port}
        cluster = Cluster(initialize_head=True, head_node_args={**head, "autoscaling_config": str(path)})
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
        yield
    finally:
        ray.shutdown()
        # the autoscaler's nodes are its children and would outlive it
        of_nodes = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        cluster.shutdown()
        for process in of_nodes:
            if process.is_running():
                process.kill()
        gc.collect()


def autoscaling_config(port: int) -> dict[str, object]:
    """The config of Ray's autoscaler that starts nodes as processes of this machine."""
    no_nodes = {"resources": {"CPU": HEAD_CPUS}, "node_config": {}, "max_workers": 0}
    trainers = {"resources": {"CPU": 1}, "labels": {"pool": "train"}, "node_config": {}, "max_workers": 2}
    lists = ["setup_commands", "head_setup_commands", "worker_setup_commands", "initialization_commands"]
    lists += ["head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files"]
    return {
        "cluster_name": "test",
        "max_workers": 4,
        "provider": {
            "type": "external",  # the provider's own type needs a file that Ray's wheel lacks
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": f"{ray.util.get_node_ip_address()}:{port}",
            "head_node_id": FAKE_HEAD_NODE_ID,
            "launch_multiple": True,
            "disable_node_updaters": True,
        },
        "available_node_types": {"ray.head.default": no_nodes, "trainer": trainers},
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 60,
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "auth": {},
        **{key: [] for key in lists},
    }


@pytest.mark.nightly
@pytest.mark.usefixtures("autoscaling")
def test_workers_that_no_node_type_can_hold_end_the_run_with_one_line(synthetic_dataset: str, tmp_path: Path) -> None:
    workers = WorkersConfig(number=2, labels={"pool": "elsewhere"})
    with pytest.raises(
        InputError, match=r"^2 workers with 1 CPU each on nodes with pool: elsewhere: the cluster's auto"
    ):
        run_pretraining(FaultyPretraining(str(tmp_path / "steps")), synthetic_dataset, str(tmp_path), workers=workers)


@pytest.mark.nightly
@pytest.mark.usefixtures("autoscaling")
def test_the_autoscaler_adds_nodes_for_workers_where_there_are_none(
    synthetic_dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert [node["Alive"] for node in ray.nodes()] == [True]
    steps = str(tmp_path / "steps")
    with caplog.at_level(logging.INFO, "ltrscale"):
        run_pretraining(
            FaultyPretraining(steps),
            synthetic_dataset,
            str(tmp_path),
            workers=WorkersConfig(number=2, labels={"pool": "train"}),
        )
    assert (
        "waits for 2 workers with 1 CPU each on nodes with pool: train: none there yet, asked the autoscaler"
        in caplog.messages
    )
    trainers = {node["NodeID"] for node in ray.nodes() if node["Labels"].get("pool") == "train"}
    (only,) = attempts(steps)
    assert set(only.nodes.values()) == trainers
    assert len(trainers) == 2
    check_exactly_once(steps)
