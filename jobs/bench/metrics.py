"""NDCG against ranx, every other metric against NDCG, on lists with the lengths of web search; whole evaluations."""

import warnings

import numpy as np
import torch

from jobs.bench.committed import bench_committed
from jobs.bench.measure import Row, mslr_lengths
from ltrscale.batch import to_offsets
from ltrscale.config import members
from ltrscale.devices import cpu_seconds
from ltrscale.errors import InputError
from ltrscale.ranking.choices import MetricConfig
from ltrscale.ranking.metrics import Metric, NDCGConfig, ndcg

GROUPS = 2_000


def bench_metrics() -> list[Row]:
    """NDCG@10 in documents per second; ranx's objects are built, and its code compiled, before the clock starts.

    Raises:
        InputError: ranx is not installed.
    """
    try:
        from ranx import Qrels, Run, evaluate
    except ImportError as error:
        raise InputError("only: benchmark 'metrics' needs ranx; pip install 'ltrscale[dev]' or leave it out") from error

    lengths_Q = mslr_lengths(GROUPS, seed=0)
    rng = np.random.default_rng(0)
    n = int(lengths_Q.sum())
    scores = rng.permutation(n) / n  # no ties: ranx orders them arbitrarily
    labels = rng.choice(5, n, p=[0.52, 0.32, 0.13, 0.02, 0.01])
    offsets_Q1 = to_offsets(torch.from_numpy(lengths_Q))
    labels[offsets_Q1[:-1].numpy()] = 1  # one relevant document per group: ranx has no undefined groups

    def by_group(values: np.ndarray) -> dict[str, dict[str, float]]:
        lists = np.split(values, offsets_Q1[1:-1].numpy())
        return {f"q{q}": {f"d{d}": value for d, value in enumerate(group.tolist())} for q, group in enumerate(lists)}

    qrels, run = Qrels(by_group(labels)), Run(by_group(scores))
    scores_N, labels_N = torch.from_numpy(scores), torch.from_numpy(labels).float()

    def ours() -> float:
        return float(ndcg(scores_N, labels_N, offsets_Q1, k=10).nanmean())

    def peer() -> float:
        return float(evaluate(qrels, run, "ndcg_burges@10", threads=1, save_results_in_run=False))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first call compiles ranx's code, which emits warnings
        assert abs(ours() - peer()) < 1e-6
    seconds, peer_seconds = cpu_seconds(ours, peer)
    return [
        Row(
            name=f"NDCG@10 of {GROUPS:,} groups: documents per CPU second, ours / ranx",
            ratio=peer_seconds / seconds,
            goal=4.0,
            at_least=True,
            ours=f"{n / seconds / 1e6:.1f} M/s",
            peer=f"{n / peer_seconds / 1e6:.1f} M/s",
            note="no ties",
        ),
        *(measure(cls) for cls in members(MetricConfig) if cls is not NDCGConfig),
        *bench_committed(),
    ]


def measure(cls: type[Metric], groups: int = GROUPS) -> Row:
    """One metric, cut off at 10 if it can be, against NDCG@10."""
    metric, peer, generator = cls.made(k=10), NDCGConfig(k=10), torch.Generator().manual_seed(0)
    offsets_Q1 = to_offsets(torch.from_numpy(mslr_lengths(groups, seed=0)))
    n = int(offsets_Q1[-1])
    lists = torch.randperm(n, generator=generator).double(), torch.randint(0, 5, (n,), generator=generator), offsets_Q1
    seconds, peer_seconds = cpu_seconds(lambda: metric.of(*lists), lambda: peer.of(*lists))
    return Row(
        name=f"{metric.name} of {groups:,} groups: documents per CPU second, ours / our NDCG@10",
        ratio=peer_seconds / seconds,
        goal=None,
        at_least=True,
        ours=f"{n / seconds / 1e6:.1f} M/s",
        peer=f"{n / peer_seconds / 1e6:.1f} M/s",
        note="no ties",
    )
