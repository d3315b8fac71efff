"""Scoring a data set with a network against a bare loop over the same files: ids, scores and ranks in, Parquet out.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, F features.
"""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from jobs.bench.measure import (
    N_FEATURES,
    Row,
    group_table,
    mslr_features,
    mslr_lengths,
    plain_features,
    run_stage,
    write_tables,
)
from ltrscale import bundle, storage
from ltrscale.arrays import offsets
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.features import fit_transform
from ltrscale.models.ranker import Architecture, HeadConfig, Ranker
from ltrscale.processor import cpu_seconds
from ltrscale.scoring.score import ScoreJob

_GROUPS, _TURNS = 1000, 5
_DOCUMENTS = 1024  # in a batch of the bare loop, which is slower with 512, 2,048 or more


def bench_scoring(groups: int = _GROUPS) -> Iterator[Row]:
    """Score web search lists with the default network, by `jobs.score` and by a bare loop, in turns."""
    with storage.scratch.directory() as folder:
        data, model = str(folder / "data"), str(folder / "bundle")
        n = _write(data, groups)
        _save(model)
        files = [storage.listed_file(data, file.path) for file in open_dataset(data).manifest.files]
        turn = count()

        def ours() -> None:
            run_stage(ScoreJob(data=data, bundle=model, out=f"{folder}/{next(turn)}", device="cpu"))

        def peer() -> None:
            network = bundle.load(model).ranker()
            for file in files:
                _score_file(network, file, folder / f"{next(turn)}.parquet")

        ours_s, peer_s = cpu_seconds(ours, peer, repeats=_TURNS)
    note = f"{n:,} documents, {N_FEATURES} features, the default network; ids, scores and ranks written"
    yield Row.speed("scoring with a network / a bare torch loop", n, ours_s, peer_s, goal=0.9, note=note)


def _score_file(network: nn.Module, source: str, target: Path) -> None:
    """What a careful user would write for this network, in which no document sees another; it checks nothing."""
    file = pq.ParquetFile(source)
    with torch.inference_mode():
        writer = None
        for number in range(file.num_row_groups):
            table = file.read_row_group(number, ["query_id", "doc_ids", "features"], use_threads=False)
            lists, features = table["doc_ids"].combine_chunks(), table["features"].combine_chunks()
            offsets_Q1 = lists.offsets.to_numpy()
            x_NF = torch.frombuffer(features.values.buffers()[1], dtype=torch.float32).view(-1, N_FEATURES)
            parts = [network(QueryGroups(part, torch.tensor([0, len(part)]))) for part in torch.split(x_NF, _DOCUMENTS)]
            scores_N = torch.cat(parts).double().numpy()
            group_N = np.repeat(np.arange(len(offsets_Q1) - 1), np.diff(offsets_Q1))
            ranks_N = np.empty(len(scores_N), np.int32)
            ranks_N[np.lexsort((-scores_N, group_N))] = np.arange(len(scores_N)) - offsets_Q1[group_N] + 1
            columns = {"query_id": table["query_id"], "item_ids": lists}
            for name, values_N in (("scores", scores_N), ("ranks", ranks_N)):
                columns[name] = pa.ListArray.from_arrays(lists.offsets, pa.array(values_N))
            scored = pa.table(columns)
            writer = writer or pq.ParquetWriter(target, scored.schema, compression="zstd")
            writer.write_table(scored)
        if writer is not None:
            writer.close()


def _write(url: str, groups: int) -> int:
    """Write a data set of web search lists with ids; returns its number of documents."""
    rng, lengths_Q = np.random.default_rng(0), mslr_lengths(groups)
    n = int(lengths_Q.sum())
    features_NF = mslr_features(rng, n)
    ids_N = pa.array(rng.integers(0, 10 * n, n)).cast(pa.string())
    ids = {
        "query_id": pa.array(np.arange(groups)).cast(pa.string()),
        "doc_ids": pa.ListArray.from_arrays(pa.array(offsets(lengths_Q), pa.int32()), ids_N),
    }
    table = group_table(0, lengths_Q, features_NF, None, **ids)
    # as if behind a million documents: a small data set of its own would have small row groups
    write_tables(url, N_FEATURES, [("all", table)], before=(8_000, 1_000_000))
    return n


def _save(url: str) -> None:
    """Save the default network with random weights."""
    torch.manual_seed(0)
    network = NetworkConfig()
    transform = fit_transform([torch.randn(1000, N_FEATURES)], ["numeric"] * N_FEATURES, network.transform)
    architecture = Architecture(transform=network.transform, encoder=network.encoder, head=HeadConfig())
    ranker = Ranker(architecture, transform).eval()
    about = bundle.BundleFacts(config={}, features=plain_features(N_FEATURES), dataset_hash="", metrics={}, made_by={})
    bundle.save_ranker(url, ranker, about)
