"""Trees against LightGBM called directly: scoring speed, training time, and peak memory of training."""

from collections.abc import Iterable, Iterator
from functools import partial

import lightgbm as lgb
import numpy as np

from jobs.bench.measure import N_FEATURES, Row, peak_own_bytes, run_stage, write_dataset
from ltrscale import storage
from ltrscale.arrays import Floats, Ints
from ltrscale.batch import QueryGroups
from ltrscale.bundle import Bundle, load
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split, SplitsWithTest
from ltrscale.data.stream.batches import iterate
from ltrscale.processor import cpu_seconds
from ltrscale.trees.configs import LightGBMConfig
from ltrscale.trees.gbdt import GBDTJob

_LARGE = 6600  # lists of training: .8 million documents, a float matrix of 450 MB
_USUAL = 500
_FEW = 20  # for warming up
_TREES, _TREES_SCORED, _TREES_FOR_MEMORY = 300, 500, 5
_CONFIG = LightGBMConfig(num_trees=_TREES, num_threads=1, early_stopping_rounds=None)


def bench_trees() -> Iterator[Row]:
    """Train on web search lists, from a data set and from the same matrix in memory, and score with the trees."""
    with storage.scratch.directory() as folder:
        large, usual, few = (_write(f"{folder}/{groups}", groups) for groups in (_LARGE, _USUAL, _FEW))
        works = partial(_train, trees=_TREES_FOR_MEMORY), _train_a_little_directly
        ours, peer = (peak_own_bytes(work, large, few) for work in works)
        yield Row.memory(
            "trees: peak memory, from a data set / from a matrix",
            ours,
            peer,
            goal=0.5,
            note=f"{_LARGE:,} lists, {N_FEATURES} features; the peer's matrix is filled in place",
        )
        for work in works:
            work(few)  # warms up
        yield _time(usual)
        yield _scoring(few, usual)


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


def _time(folder: str) -> Row:
    matrices = [*_matrices(folder)]
    works = lambda: _train(folder, _TREES), lambda: _boost_directly(matrices, _TREES)
    ours, peer = cpu_seconds(*works, repeats=2, warm=True)
    return Row(
        name="trees: training time, from a data set / from a matrix",
        figure=ours / peer,
        goal=1.05,
        at_least=False,
        ours=f"{ours:.1f} CPU-s",
        peer=f"{peer:.1f} CPU-s",
        note=f"{_USUAL:,} lists, {_TREES} trees, reading included; the peer's matrix is in memory already",
    )


def _scoring(folder: str, scored: str) -> Row:
    bundle = _train(folder, _TREES_SCORED)
    groups = QueryGroups.concat(list(iterate(select(_splits(scored).test, labelled=False))))
    booster = lgb.Booster(model_str=bundle.content.decode())
    features_NF, score = groups.features_NF.numpy(), bundle.scorer(threads=1)
    ours_s, peer_s = cpu_seconds(lambda: score(groups), lambda: booster.predict(features_NF, num_threads=1), repeats=5)
    name, note = "trees: scoring / lightgbm.Booster.predict", f"{bundle.metrics['trees']} trees, one thread"
    return Row.speed(name, groups.n_documents, ours_s, peer_s, goal=0.95, note=note)
