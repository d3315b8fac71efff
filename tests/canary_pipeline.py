"""A pipeline with two workers, a search and scoring on a cluster of their own; copies the cluster's scratch at the end.

python canary_pipeline.py URL FOLDER [WORD...]
"""

import shutil
import sys
from pathlib import Path

import ray

from ltrscale import config as configs
from ltrscale.config import validate
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.runtime.engine import ray_cluster
from ltrscale.scoring.score import ScoreJob
from ltrscale.tuning.tune import TuneJob

CONFIGS = Path(__file__).resolve().parents[1] / "jobs" / "configs"
SMALL = [
    "seeds=[0]",
    "workers=2",
    "synthetic.weeks=4",
    "synthetic.groups_per_week=60",
    "synthetic.n_features=8",
    "splits.train={periods: 2026-W01..2026-W02}",
    "splits.validation={periods: 2026-W03}",
    "splits.test={periods: 2026-W04}",
    "methods={network: {kind: neural, finetune: {network: {encoder: {width: 8, blocks: 1}}, epochs: 1,"
    " stream: {docs_per_batch: 500, streams: 2}}}}",
    "evaluate={baseline: network, resamples: 100}",
]


def main(url: str) -> None:
    """Run all three below a URL."""
    configs.load(PipelineJob, str(CONFIGS / "start" / "demo.yaml"), [f"out={url}/pipeline", *SMALL]).run()
    data = f"{url}/pipeline/data"
    weeks = {"train": "2026-W01..2026-W02", "validation": "2026-W03", "test": "2026-W04"}
    job = {
        "kind": "gbdt",
        "gbdt": {"num_trees": 5, "num_threads": 1},
        "splits": {name: {"data": data, "periods": period} for name, period in weeks.items()},
    }
    space = {"gbdt.num_leaves": {"low": 2, "high": 32, "integer": True}}
    values = {"out": f"{url}/search", "job": job, "space": space, "trials": 3, "concurrent": 2}
    validate(TuneJob, values, "test").run()
    score = {"bundle": f"{url}/search/trials/00001/model", "data": data, "ray": True}
    validate(ScoreJob, {"out": f"{url}/scores", **score}, "test").run()


if __name__ == "__main__":
    with ray_cluster(6):
        main(sys.argv[1])
        cluster = Path(ray._private.worker._global_node.get_session_dir_path()).parents[1]
        shutil.copytree(
            cluster.parent, sys.argv[2], ignore=shutil.ignore_patterns("sockets", "token", "listener-*"), symlinks=True
        )
