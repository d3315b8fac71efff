"""Reading on the nodes of a Ray cluster that have the reader resource."""

import gc
import itertools
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from shared_cluster import SharedCluster

from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.readers import read_direct
from ltrscale.runtime.on_ray import read_with_ray

Make = Callable[..., Any]
_FIND_THE_DEAD_SOON = {"health_check_period_ms": 1000, "health_check_failure_threshold": 4}


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # Ray's
def test_tasks_wait_for_nodes_that_read_and_outlive_one(make_dataset: Make, shared_cluster: SharedCluster) -> None:
    shared_cluster.stop()
    made = make_dataset({"a": [[1, 2], [3]] * 10, "b": [[4]] * 10})
    plan = list(select(Split(data=(made.url,)), labelled=True).row_groups) * 30
    head = {"num_cpus": 4, "include_dashboard": False, "_system_config": _FIND_THE_DEAD_SOON}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        assert len(list(read_with_ray(plan[:30], ["gid"]))) == 30  # the workers of the first node are warm
        found: list[Any] = []
        with closing(read_with_ray(plan, ["gid"], read_on={"reader": 1})) as tables:
            consumer = threading.Thread(target=lambda: found.extend(itertools.islice(tables, 200)), daemon=True)
            consumer.start()
            consumer.join(2)
            assert not found
            nodes = [cluster.add_node(num_cpus=2, resources={"reader": 2}) for _ in range(2)]
            consumer.join(60)
            assert len(found) == 200
            cluster.remove_node(nodes[0], allow_graceful=False)
            found += tables
    finally:
        ray.shutdown()
        cluster.shutdown()
        gc.collect()
    assert [table["gid"].to_pylist() for table in found] == [
        table["gid"].to_pylist() for table in read_direct(plan, ["gid"])
    ]
