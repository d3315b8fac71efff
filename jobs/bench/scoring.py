"""Scoring a data set with a network against a bare loop over the same files: ids, scores and ranks in, Parquet out.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, F features.
"""

from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from jobs.bench.measure import N_FEATURES, Row, mslr_lengths, quiet_cpu_seconds
from ltrscale import bundle, storage
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.manifest import Feature, Manifest, open_dataset
from ltrscale.data.dataset.writer import DatasetWriter, commit_dataset
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.features import fit_transform
from ltrscale.models.ranker import Architecture, HeadConfig, Ranker
from ltrscale.scoring.score import ScoreJob

_GROUPS, _TURNS = 1000, 5
_DOCUMENTS = 1024  # in a batch of the bare loop, which is slower with 512, 2,048 or more
_FEATURES = tuple(Feature(name=f"f{i}") for i in range(N_FEATURES))


def bench_scoring(groups: int = _GROUPS) -> list[Row]:
    """Score web search lists with the default network, by `jobs.score` and by a bare loop, in turns."""
    with storage.scratch.directory() as folder:
        data, model = str(folder / "data"), str(folder / "bundle")
        n = _write(data, groups)
        _save(model)
        files = [storage.listed_file(data, file.path) for file in open_dataset(data).manifest.files]
        turn = count()

        def ours() -> None:
            job = ScoreJob(data=data, bundle=model, out=f"{folder}/{next(turn)}", device="cpu")
            job.work({}, lambda _: None)

        def peer() -> None:
            network = bundle.load(model).ranker()
            for file in files:
                _score_file(network, file, folder / f"{next(turn)}.parquet")

        ours_s, peer_s = quiet_cpu_seconds(ours, peer, repeats=_TURNS)
    return [
        Row(
            name="scoring with a network / a bare torch loop",
            ratio=peer_s / ours_s,
            goal=0.9,
            ours=f"{n / ours_s / 1000:.1f} k docs/CPU-s",
            peer=f"{n / peer_s / 1000:.1f} k docs/CPU-s",
            note=f"{n:,} documents, {N_FEATURES} features, the default network; ids, scores and ranks written",
        )
    ]


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
    rng, lengths_Q = np.random.default_rng(0), mslr_lengths(groups, seed=0)
    n = int(lengths_Q.sum())
    x_NF = np.where(rng.random((n, N_FEATURES)) < 0.4, 0, rng.normal(size=(n, N_FEATURES)).round(2))
    offsets_Q1 = np.concatenate([[0], np.cumsum(lengths_Q)]).astype(np.int32)
    ids_N = pa.array(rng.integers(0, 10 * n, n)).cast(pa.string())
    columns = {
        "gid": pa.array(np.arange(groups)),
        "query_id": pa.array(np.arange(groups)).cast(pa.string()),
        "doc_ids": pa.ListArray.from_arrays(pa.array(offsets_Q1), ids_N),
        "features": pa.ListArray.from_arrays(
            pa.array(offsets_Q1 * N_FEATURES), pa.array(x_NF.ravel().astype(np.float32))
        ),
        "labels": pa.nulls(groups, pa.list_(pa.float32())),
    }
    with storage.Commit(url) as commit:
        # as if behind a million documents: a small data set of its own would have small row groups
        writer = DatasetWriter(commit, n_features=N_FEATURES, before=(8_000, 1_000_000))
        writer.add("all", pa.table(columns))
        commit_dataset(commit, Manifest(features=_FEATURES, files=writer.close()))
    return n


def _save(url: str) -> None:
    """Save the default network with random weights."""
    torch.manual_seed(0)
    network = NetworkConfig()
    transform = fit_transform([torch.randn(1000, N_FEATURES)], ["numeric"] * N_FEATURES, network.transform)
    architecture = Architecture(transform=network.transform, encoder=network.encoder, head=HeadConfig())
    ranker = Ranker(architecture, transform).eval()
    about = bundle.BundleFacts(config={}, features=_FEATURES, dataset_hash="", metrics={}, made_by={})
    bundle.save_ranker(url, ranker, about)
