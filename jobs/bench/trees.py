"""Trees against LightGBM called directly: scoring speed, training time, and peak memory of training."""

import time
from collections.abc import Iterable, Iterator
from statistics import median

import lightgbm as lgb
import numpy as np
from numpy.typing import NDArray

from jobs.bench.measure import N_FEATURES, Row, peak_own_bytes, write_dataset
from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle import Bundle, load
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split, SplitsWithTest
from ltrscale.data.stream.batches import iterate
from ltrscale.processor import Timings, cpu_seconds
from ltrscale.trees.configs import LightGBMConfig
from ltrscale.trees.gbdt import GBDTJob

_LARGE = 8800  # lists of training: 1.1 million documents, a float matrix of 600 MB
_USUAL = 2200
_FEW = 20  # for warming up
_TREES, _TREES_SCORED, _TREES_FOR_MEMORY = 300, 500, 5
_ROUNDS = 2
_CONFIG = LightGBMConfig(num_trees=_TREES, num_threads=1, early_stopping_rounds=None)


def bench_trees() -> list[Row]:
    """Train on web search lists, from a data set and from the same matrix in memory, and score with the trees."""
    with storage.scratch.directory() as folder:
        large, medium, small = (_write(f"{folder}/{groups}", groups) for groups in (_LARGE, _USUAL, _FEW))
        return [_memory(large, small), _time(medium), _scoring(small, medium)]


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
    job.work({}, lambda _: None)
    return load(job.out)


def _train_and_validation(folder: str) -> Iterator[Split]:
    splits = _splits(folder)
    yield splits.train
    yield splits.validation


_Matrix = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]


def _matrix(selection: Selection) -> _Matrix:
    """Features, labels and lengths of all groups."""
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


def _memory(folder: str, warm_up: str) -> Row:
    ours, peer = (peak_own_bytes(work, warm_up, folder) for work in (_train_a_little, _train_a_little_directly))
    return Row(
        name="trees: peak memory, from a data set / from a matrix",
        ratio=ours / peer,
        goal=0.5,
        at_least=False,
        ours=f"{ours / 2**20:.0f} MB",
        peer=f"{peer / 2**20:.0f} MB",
        note=f"{_LARGE:,} lists, {N_FEATURES} features; the peer's matrix is filled in place",
    )


def _train_a_little(folder: str) -> object:
    return _train(folder, _TREES_FOR_MEMORY)


def _train_a_little_directly(folder: str) -> object:
    """Train as a user of LightGBM does whose data fit in memory."""
    matrices = (_matrix(select(split, labelled=True)) for split in _train_and_validation(folder))
    return _boost_directly(matrices, _TREES_FOR_MEMORY)


def _time(folder: str) -> Row:
    matrices = [_matrix(select(split, labelled=True)) for split in _train_and_validation(folder)]
    ours, peer = [], []
    for _ in range(_ROUNDS):
        start = time.process_time()
        _train(folder, _TREES)
        middle = time.process_time()
        _boost_directly(matrices, _TREES)
        ours.append(middle - start)
        peer.append(time.process_time() - middle)
    return Row(
        name="trees: training time, from a data set / from a matrix",
        ratio=Timings(ours) / Timings(peer),
        goal=1.05,
        at_least=False,
        ours=f"{median(ours):.1f} CPU-s",
        peer=f"{median(peer):.1f} CPU-s",
        note=f"{_USUAL:,} lists, {_TREES} trees, reading included; the peer's matrix is in memory already",
    )


def _scoring(folder: str, scored: str) -> Row:
    bundle = _train(folder, _TREES_SCORED)
    groups = QueryGroups.concat(list(iterate(select(_splits(scored).test, labelled=False))))
    booster = lgb.Booster(model_str=bundle.content.decode())
    features_NF, score = groups.features_NF.numpy(), bundle.scorer(threads=1)
    ours_s, peer_s = cpu_seconds(lambda: score(groups), lambda: booster.predict(features_NF, num_threads=1), repeats=5)
    return Row(
        name="trees: scoring / lightgbm.Booster.predict",
        ratio=peer_s / ours_s,
        goal=0.95,
        ours=f"{groups.n_documents / ours_s / 1000:.1f} k docs/CPU-s",
        peer=f"{groups.n_documents / peer_s / 1000:.1f} k docs/CPU-s",
        note=f"{bundle.metrics['trees']} trees, one thread",
    )
