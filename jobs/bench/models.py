"""Trees against LightGBM used directly, and scoring a data set with a network against a bare loop over its files.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets, F features.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import lightgbm as lgb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from jobs.bench.measure import (
    LARGE,
    N_FEATURES,
    Row,
    group_table,
    mslr_features,
    mslr_lengths,
    peak_own_bytes,
    plain_features,
    run_stage,
    write_dataset,
    write_tables,
)
from ltrscale import bundle, storage
from ltrscale.arrays import Floats, Ints, offsets
from ltrscale.batch import QueryGroups
from ltrscale.bundle import Bundle, load
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split, SplitsWithTest
from ltrscale.data.stream.batches import iterate
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.features import fit_transform
from ltrscale.models.ranker import Architecture, HeadConfig, Ranker
from ltrscale.processor import cpu_seconds
from ltrscale.scoring.score import ScoreJob
from ltrscale.trees.configs import LightGBMConfig
from ltrscale.trees.gbdt import GBDTJob

_LARGE = 6600  # lists of training: .8 million documents, a float matrix of 450 MB
_USUAL = 500
_FEW = 20  # for warming up
_TREES, _TREES_SCORED, _TREES_FOR_MEMORY = 300, 500, 5
_CONFIG = LightGBMConfig(num_trees=_TREES, num_threads=1, early_stopping_rounds=None)


def _write(folder: str, groups: int) -> str:
    """Write data sets for training, validation and test; returns their folder."""
    for name, n in (("train", groups), ("validation", groups // 10), ("test", groups // 20)):
        write_dataset(f"{folder}/{name}", "none", groups=n)
    return folder


def _splits(folder: str) -> SplitsWithTest:
    names = ("train", "validation", "test")
    return SplitsWithTest(**{name: Split(data=(f"{folder}/{name}",)) for name in names})


def _train(folder: str, trees: int) -> Bundle:
    config = _CONFIG.replace(num_trees=trees)
    job = GBDTJob(out=f"{folder}/gbdt-{trees}", splits=_splits(folder), gbdt=config)
    run_stage(job)
    return load(job.out)


_Matrix = tuple[Floats, Floats, Ints]
"""Features, labels and lengths of all groups."""


def _matrices(folder: str) -> Iterator[_Matrix]:
    """Of training and of validation."""
    splits = _splits(folder)
    return (_matrix(select(split, labelled=True)) for split in (splits.train, splits.validation))


def _matrix(selection: Selection) -> _Matrix:
    # filled in place: concatenating batches would double the peak memory of the peer
    features_NF = np.empty((selection.n_documents, len(selection.features)), np.float32)
    labels, lengths, first = [], [], 0
    for groups in iterate(selection):
        assert groups.labels_N is not None
        features_NF[first : first + groups.n_documents] = groups.features_NF.numpy()
        first += groups.n_documents
        labels.append(groups.labels_N.numpy())
        lengths.append(groups.lengths_Q.numpy())
    return features_NF, np.concatenate(labels), np.concatenate(lengths)


def _boost_directly(matrices: Iterable[_Matrix], trees: int) -> lgb.Booster:
    parameters = _CONFIG.parameters(_CONFIG.gains(4))
    train, validation = matrices
    train_set = lgb.Dataset(train[0], train[1], group=train[2], params=parameters)
    validation_set = train_set.create_valid(validation[0], validation[1], group=validation[2], params=parameters)
    return lgb.train(parameters, train_set, trees, valid_sets=[validation_set])


def _train_a_little_directly(folder: str) -> object:
    """Train as a user of LightGBM does whose data fit in memory."""
    return _boost_directly(_matrices(folder), _TREES_FOR_MEMORY)


_WORKS = partial(_train, trees=_TREES_FOR_MEMORY), _train_a_little_directly


def bench_trees() -> Iterator[Row]:
    """Train on web search lists, from a data set and from the same matrix in memory, and score with the trees."""
    with storage.scratch.directory() as folder:
        usual, few = (_write(f"{folder}/{groups}", groups) for groups in (_USUAL, _FEW))
        for work in _WORKS:
            work(few)  # warms up
        yield _time(usual)
        yield _scoring(few, usual)


def bench_trees_memory() -> Iterator[Row]:
    """Peak memory of training, from a data set and from the same matrix."""
    with storage.scratch.directory() as folder:
        large, few = (_write(f"{folder}/{groups}", groups) for groups in (_LARGE, _FEW))
        ours, peer = (peak_own_bytes(work, few, large) for work in _WORKS)
        yield Row.memory(
            "trees: peak memory, from a data set / from a matrix",
            ours,
            peer,
            goal=0.5,
            note=f"{_LARGE:,} lists, {N_FEATURES} features; the peer's matrix is filled in place",
        )


def _time(folder: str) -> Row:
    matrices = [*_matrices(folder)]
    works = lambda: _train(folder, _TREES), lambda: _boost_directly(matrices, _TREES)
    ours, peer = cpu_seconds(*works, repeats=2, warm=True)
    name = "trees: training time, from a data set / from a matrix"
    note = f"{_USUAL:,} lists, {_TREES} trees, reading included; the peer's matrix is in memory already"
    return Row.ratio(name, ours, peer, "{:.1f} CPU-s", goal=1.05, note=note)


def _scoring(folder: str, scored: str) -> Row:
    bundle = _train(folder, _TREES_SCORED)
    groups = QueryGroups.concat(list(iterate(select(_splits(scored).test, labelled=False))))
    booster = lgb.Booster(model_str=bundle.content.decode())
    features_NF, score = groups.features_NF.numpy(), bundle.scorer(threads=1)
    ours_s, peer_s = cpu_seconds(lambda: score(groups), lambda: booster.predict(features_NF, num_threads=1), repeats=5)
    name, note = "trees: scoring / lightgbm.Booster.predict", f"{bundle.metrics['trees']} trees, one thread"
    return Row.speed(name, groups.n_documents, ours_s, peer_s, goal=0.95, note=note)


_GROUPS, _TURNS = 1000, 3
_DOCUMENTS = 1024  # in a batch of the bare loop, which is slower with 512, 2,048 or more


def bench_scoring(groups: int = _GROUPS) -> Iterator[Row]:
    """Score web search lists with the default network, by `jobs.score` and by a bare loop, in turns."""
    with storage.scratch.directory() as folder:
        data, model = str(folder / "data"), str(folder / "bundle")
        n = _write_with_ids(data, groups)
        _save_network(model)
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


def _write_with_ids(url: str, groups: int) -> int:
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
    write_tables(url, N_FEATURES, [("all", table)], **LARGE)
    return n


def _save_network(url: str) -> None:
    """Save the default network with random weights."""
    torch.manual_seed(0)
    network = NetworkConfig()
    transform = fit_transform([torch.randn(1000, N_FEATURES)], ["numeric"] * N_FEATURES, network.transform)
    architecture = Architecture(transform=network.transform, encoder=network.encoder, head=HeadConfig())
    ranker = Ranker(architecture, transform).eval()
    about = bundle.BundleFacts(config={}, features=plain_features(N_FEATURES), dataset_hash="", metrics={}, made_by={})
    bundle.save_ranker(url, ranker, about)
