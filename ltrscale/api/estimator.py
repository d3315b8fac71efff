"""`Ranker`: the jobs as a scikit-learn estimator, on tables in memory.

A table becomes a data set directory, the stages of a pipeline train on it, and the bundle that they commit scores rows.
So a `Ranker` gives the same results as the jobs with the same settings.

Shapes: N rows (documents), F features.
"""

import os
import shutil
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator

from ltrscale import bundle as bundles
from ltrscale import storage
from ltrscale.api import frames, raw_tables
from ltrscale.api.conventions import (
    AUTO,
    Arguments,
    NotFitted,
    SavedRanker,
    as_value_errors,
    bundle_files,
    explained,
    inner_values,
    new_values,
)
from ltrscale.bundle.explanations import Explanation
from ltrscale.config import validate
from ltrscale.data.dataset.disjoint import check_splits
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream import scored
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.readers import read_direct
from ltrscale.devices import choose_device
from ltrscale.errors import InputError
from ltrscale.experiments.auto.auto import AutoJob
from ltrscale.experiments.methods.base import Method, SeedRun
from ltrscale.experiments.methods.neural import pretrained
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ranking.choices import metric_named
from ltrscale.serving.columns import ROW, uses_in_scoring, uses_of, with_fills
from ltrscale.stages.runs import check_replaceable

_SCORED_AT_ONCE = 1 << 16
Keys = Mapping[str, Any]


class Ranker(BaseEstimator):  # type: ignore[misc]
    """A ranker of documents, in scikit-learn's conventions.

    `X` is a data frame of pandas or polars, an Arrow table, or an array [N, F]. In tables the keys of
    `prepare.source.columns` name the uses of columns, as in `jobs.prepare`: `query`, `label`, `item`, `features`,
    `categorical`, `exclude` and so on. Without `features` and `categorical`, numeric columns without another use are
    numeric features, and text and dictionaries are categorical ones. Categories and missing values are handled
    as in the jobs. Uses that are named once are remembered.

    An `InputError` of an argument, settings or rows is also a ValueError; one of an unfitted ranker is also
    scikit-learn's NotFittedError.

    Args:
        method: trees by their library (`lightgbm`, `xgboost`, `catboost`); a network by the pretext objective of its
            pretraining (`simclr_rank`, `simsiam`, ...); `neural`, a network without pretraining; `semi_gbdt`; or
            `auto`, the best that `jobs.auto` finds in `minutes`.
        settings: settings of the method, as in a pipeline's `methods`: `{"gbdt": {"num_leaves": 63}}` for
            trees, `{"pretrain": {"epochs": 20}, "finetune": {"epochs": 50}}` for networks, `{"preset": "hou24"}`.
        prepare: further keys of `prepare`, such as `{"max_group": 20000}`.
        metric: the metric of `score`, such as ndcg@10, mrr or map.
        validation_fraction: share of the labelled groups that choose the epoch or the number of trees, where `fit`
            gets no validation table.
        seed: replaces the seeds of the stages, and draws the validation groups.
        workers: data-parallel workers; several run under Ray.
        directory: directory of the data set, checkpoints, logs and bundles; give each ranker its own. The same call
            resumes there after an interruption, and skips training that is up to date. By default a scratch directory
            that disappears with the process.
        minutes: the budget of `auto`, including the refit; other methods ignore it.

    Attributes:
        bundle_: URL of the trained bundle, which the jobs can read.
        feature_names_in_: names of the features [F], in the order of the columns of X in `fit`; those made of a date
            are at its column. A bundle of a job has its own order, numeric features first.
        n_features_in_: F.
        columns_: uses of columns.
        splits_: the training and validation groups; a loaded ranker has none.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(200, 3))
        >>> y, group = (X[:, 0] > 0.5).astype(int), [10] * 20
        >>> ranker = Ranker("lightgbm", settings={"gbdt": {"num_trees": 20, "min_data_in_leaf": 5}})
        >>> ranker.fit(X, y, group=group).score(X, y, group=group)
        1.0
        >>> ranker.predict(X[:10], group=[10]).shape
        (10,)
    """

    def __init__(
        self,
        method: str = "lightgbm",
        *,
        settings: Keys | None = None,
        prepare: Keys | None = None,
        metric: str = "ndcg@5",
        validation_fraction: float = 0.2,
        seed: int = 0,
        workers: int = 1,
        directory: str | None = None,
        minutes: float = 5.0,
    ) -> None:
        # scikit-learn clones an estimator by its arguments: they are stored unchanged, and checked on use
        self.method, self.settings, self.prepare, self.metric = method, settings, prepare, metric
        self.validation_fraction, self.seed, self.workers = validation_fraction, seed, workers
        self.directory, self.minutes = directory, minutes

    # scikit-learn's searches pass these without a request, as to its own GroupKFold: ranking needs groups
    __metadata_request__fit = dict.fromkeys(("group", *ColumnMapping.model_fields), True)
    __metadata_request__predict = {"group": True}  # noqa: RUF012 - read once
    # `Pipeline.score` always passes sample_weight; a value is refused
    __metadata_request__score = {"group": True, "sample_weight": None}  # noqa: RUF012

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor arguments by name; `deep` includes the values inside `settings` and `prepare`."""
        params: dict[str, Any] = super().get_params(deep=False)
        return params | inner_values(params) if deep else params

    @as_value_errors
    def set_params(self, **params: Any) -> Self:
        """Change constructor arguments; a trained model stays until the next `fit`.

        Args:
            params: arguments by name, and values inside `settings` and `prepare` with keys joined by two underscores:
                `settings__gbdt__num_trees=50`. Values are checked on use.

        Raises:
            InputError: there is no such argument, or no such key.
        """
        new = new_values(self.get_params(deep=False), params)
        for name, value in new.items():
            setattr(self, name, value)
        return self

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn's own functions ask before they use an estimator."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.categorical = tags.input_tags.string = True
        return tags

    @as_value_errors
    def pretrain(self, X: Any, *, group: Any = None, **columns: Any) -> Self:
        """Pretrain the encoder on query groups without their labels; `fit` then starts from it.

        Without this call `fit` pretrains on its training rows. The arguments are those of `fit`; if the rows have
        labels, name their column, or it becomes a feature.

        Raises:
            InputError: the method does not pretrain, or as `jobs.prepare` and `jobs.pretrain`.
        """
        arguments = self._arguments()
        method = arguments.as_method()
        if method.encoder(self.method, {}) is None:
            raise InputError(f"Ranker({self.method!r}) does not pretrain; choose a pretext objective as method")
        table, columns = frames.rows_as_table(X, None, group, columns)
        out = self._folder("pretrain")
        frames.prepare_tables({"all": table}, columns, self.prepare or {}, storage.join(out, "data"))
        documents = Split(data=(storage.join(out, "data"),))
        # pretraining reads only the training split
        run = _run(arguments, method, Splits(train=documents, validation=documents), out)
        pretrained(run, self.method)
        self._encoders, self._pretrained_on = run, columns
        return self

    @as_value_errors
    def fit(self, X: Any, y: Any = None, *, group: Any = None, validation: Any = None, **columns: Any) -> Self:
        """Train on labelled query groups; groups without labels are used only for pretraining.

        Args:
            X: rows.
            y: labels, unless `label` names a column; NaN in all rows of a group without labels.
            group: a query id for each row, or the lengths of the groups; not for tables that name `query`.
            validation: the groups that choose the epoch or the number of trees: a table with the columns of X, or
                `(X, y, group)`. By default `validation_fraction` of the labelled groups, which are not trained on.
            columns: uses of columns; those of `pretrain` are remembered.

        Raises:
            InputError: as `jobs.prepare` and the jobs that train; `pretrain` was called for another pretext objective.
        """
        arguments, state = self._arguments(), vars(self)
        method = None if arguments.method == AUTO and not arguments.settings else arguments.as_method()
        encoders = None if method is None else self._encoders_for(method)
        table, columns = frames.rows_as_table(
            X, y, group, {**state.get("_pretrained_on", {}), **columns}, labels_needed=True
        )
        if validation is None:
            train, held_out = frames.held_out(table, columns, arguments.validation_fraction, arguments.seed)
        else:
            parts = validation if isinstance(validation, tuple) else (validation,)
            raw_tables.check_width(parts[0], raw_tables.width(X), "validation")
            train, held_out = table, raw_tables.to_raw_table(*parts)
        out = self._folder("fit")
        data = storage.join(out, "data")
        frames.prepare_tables({"train": train, "validation": held_out}, columns, self.prepare or {}, data)
        splits = Splits(
            train=Split(data=(data,), periods=("train",)), validation=Split(data=(data,), periods=("validation",))
        )
        check_splits(splits)
        if method is None:
            of = {"budget": arguments.minutes, "seed": arguments.seed, "workers": arguments.workers}
            # a run resumes with the same rows and seed; other rows or seeds start a new one
            place = storage.join(out, AUTO, f"{open_dataset(data).manifest.hash[:8]}-{arguments.seed}")
            made = AutoJob(out=place, data=data, splits=splits, **of).train()
        else:
            made = _run(arguments, method, splits, out, encoders).model(self.method)
        names = frames.in_order_of(table, columns, bundles.load(made).features)
        self._open(made, columns, raw_tables.width(X), names)
        self.splits_ = splits
        return self

    @as_value_errors
    def predict(self, X: Any, *, group: Any = None, **columns: Any) -> NDArray[np.float64]:
        """Scores [N] of the rows, in their order; within a query the highest ranks first.

        The arguments are those of `fit`. Only features, the query, times and dates are read. Name the uses of columns
        that differ from `fit`.

        Raises:
            InputError: the ranker is not fitted, X lacks features, a row cannot be used, or a named use is not read in
                scoring.
        """
        bundle = self._fitted()
        table, uses = self._as_fitted(X, None, group, columns)
        if not len(table):
            return np.zeros(0)
        table = table.append_column(ROW, pa.array(np.arange(len(table))))
        uses, reading = self._reading(uses, columns)
        scores_N = np.empty(len(table))
        if small := frames.in_memory(table, reading, bundle):
            groups, rows_N = small
            scores_N[rows_N] = scored.finite(self._scorer()(groups), bundle.url).numpy()
            return scores_N
        with self._every_row(table, uses) as split:
            selection = bundles.with_tokens_of(select(split, labelled=False), [bundle])
            scorer = bundle.scorer(features=selection.features, device=choose_device("auto"))
            scores = scored.score_selection(selection, scorer, bundle.url)
            read = pa.concat_tables(read_direct(selection.row_groups, ["gid", "doc_ids"]))
        assert np.array_equal(read["gid"].to_numpy(), scores.ids_Q.numpy())
        rows_N = read["doc_ids"].combine_chunks().flatten().cast(pa.int64()).to_numpy()
        scores_N[rows_N] = scores.scores_N.numpy()
        return scores_N

    @as_value_errors
    def score(self, X: Any, y: Any = None, *, group: Any = None, **columns: Any) -> float:
        """The mean of `metric` over the labelled groups for which it is defined; NaN if there are none.

        The arguments are those of `fit`; name the uses of columns that differ.

        Raises:
            InputError: as `predict`; no group has labels.
        """
        bundle, metric = self._fitted(), metric_named(self._arguments().metric)
        table, columns = self._as_fitted(X, y, group, columns, labels_needed=True)
        with frames.prepared(table, columns, self.prepare or {}) as split:
            selection = bundles.with_tokens_of(select(split, labelled=True), [bundle])
            scorer = bundle.scorer(features=selection.features, device=choose_device("auto"))
            values = []
            for groups in iterate(selection, docs_per_batch=_SCORED_AT_ONCE):
                assert groups.labels_N is not None
                values.append(metric.values(scorer(groups), groups.labels_N, groups.offsets_Q1))
        return float(torch.cat(values).nanmean())

    @as_value_errors
    def explain(
        self, X: Any, rows: tuple[int, int] | None = None, *, group: Any = None, depth: int = 10, **columns: Any
    ) -> list[Explanation]:
        """Explain ranks by what each feature adds to score differences, as `jobs.explain` does.

        Args:
            X: as in `predict`.
            rows: numbers of two rows of a query to compare. By default the first row of each query is compared with
                those of ranks 2 to `depth`; this needs a query with two rows.
            group: as in `predict`.
            depth: see `rows`.
            columns: as in `predict`.

        Raises:
            InputError: as `predict`; `rows` are not two rows of one query.
        """
        bundle = self._fitted()
        table, uses = self._as_fitted(X, None, group, columns)
        if not len(table):
            return []
        named = uses.get("item") in table.column_names
        items = (
            [str(item) for item in table[uses["item"]].to_pylist()]
            if named
            else [f"row {i}" for i in range(len(table))]
        )
        table = table.append_column(ROW, pa.array(np.arange(len(table))))
        uses, _ = self._reading(uses, columns)
        with self._every_row(table, uses) as split:
            return explained(bundle, split, items, rows, depth)

    @property
    def feature_importances_(self) -> NDArray[np.float64]:
        """The importance of each feature to trees [F], in the order of `feature_names_in_`; see `boosters.importances`.

        Raises:
            AttributeError: the ranker is not fitted, is a network, or has trees that see more than the features, such
                as a stack.
        """
        bundle: bundles.Bundle | None = vars(self).get("_bundle")
        trees = None if bundle is None else bundle.forest
        if bundle is None or trees is None or trees.projection or trees.members or trees.sees is not None:
            raise AttributeError("feature_importances_ are those of fitted trees that see the features alone")
        importances = bundle.importances() or {}
        return np.array([importances[name] for name in self.feature_names_in_])

    @as_value_errors
    def save(self, url: str) -> None:
        """Commit a copy of the bundle with the arguments and the uses of columns; `load` and the jobs read it.

        Raises:
            InputError: the ranker is not fitted, or the output of another stage is at the URL.
        """
        check_replaceable(url, self._fitted().made_by["stage"])
        columns, width, names = self._opened_with()
        arguments = self.get_params(deep=False)
        SavedRanker(arguments=arguments, columns=columns, array_width=width, names=names).commit(url, self._own_files())

    @classmethod
    @as_value_errors
    def load(cls, url: str) -> Self:
        """Open a saved ranker, or a bundle of trees or a finetuned network that a job made.

        A job's bundle records how the raw rows of its training data were read; `predict` and `score` read rows the same
        way. Without that record, as for rows that were not a table of items, they find features by name, and take
        `query` and `label`.

        Raises:
            InputError: no bundle is committed there, or it does not score.
        """
        bundle = bundles.load(url)
        if (saved := SavedRanker.read(url)) is not None:
            ranker = cls(**saved.arguments)
            ranker._open(url, saved.columns, saved.array_width, saved.names)
        else:
            columns, settings = uses_of(bundle)
            ranker = cls(bundle.forest.library if bundle.forest else "neural", prepare=settings or None)
            ranker._open(url, columns)
        return ranker

    def __getstate__(self) -> dict[str, Any]:
        """The arguments and, if fitted, the files of the bundle, for copies and other processes."""
        names = {*self.get_params(deep=False), "_metadata_request"}
        state = {name: value for name, value in vars(self).items() if name in names}
        if "_bundle" in vars(self):
            state |= {"_files": bundle_files(self._own_files()), "_opened": self._opened_with()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Put the files of the bundle into a scratch directory of this process."""
        files, opened = state.pop("_files", {}), state.pop("_opened", None)
        self.__dict__.update(state)
        if opened is not None:
            out = self._scratch()
            for name, content in files.items():
                storage.write_bytes(storage.join(out, name), content)
            self._open(out, *opened)

    def _arguments(self) -> Arguments:
        return validate(Arguments, self.get_params(deep=False), "Ranker")

    def _encoders_for(self, method: Method) -> SeedRun | None:
        """The run of `pretrain`; None without one, and for a method that does not pretrain."""
        encoders: SeedRun | None = vars(self).get("_encoders")
        if encoders is None or method.encoder(self.method, {}) is None:
            return None
        if self.method not in encoders.methods:
            before = ", ".join(encoders.methods)
            raise InputError(f"Ranker({self.method!r}): pretrain was called for {before!r}; call it again before fit")
        return encoders

    def _fitted(self) -> bundles.Bundle:
        """The bundle in memory; another ranker in the same directory may replace the files of `bundle_`."""
        if "_bundle" not in vars(self):
            raise NotFitted("this Ranker is not fitted; call fit first, or Ranker.load")
        bundle: bundles.Bundle = self._bundle
        return bundle

    def _as_fitted(
        self, X: Any, y: Any, group: Any, columns: Keys, *, labels_needed: bool = False
    ) -> tuple[pa.Table, dict[str, Any]]:
        """Rows with the columns of `fit` as a table, and the uses of its columns, of which `columns` are new."""
        raw_tables.check_width(X, self._array_width)
        return frames.rows_as_table(X, y, group, {**self.columns_, **columns}, labels_needed=labels_needed)

    def _every_row(self, table: pa.Table, uses: Keys) -> AbstractContextManager[Split]:
        """Rows to score as a data set for the block; every row needs a score, so none may be rejected."""
        return frames.prepared(table, uses, {**(self.prepare or {}), "max_rejected": 0, "expect": {}})

    def _reading(self, uses: dict[str, Any], named: dict[str, Any]) -> tuple[dict[str, Any], PrepareConfig]:
        """The uses of columns in scoring, and how rows are read; cached for the next call."""
        key, cached = repr((uses, named, self.prepare)), self._kept.get("reading")
        if cached is None or cached[0] != key:
            of_scoring = uses_in_scoring(uses, self._fitted(), "Ranker.predict", named=named)
            # key and value in one assignment: another thread may ask with other uses
            cached = self._kept["reading"] = key, (of_scoring, frames.reading_of(of_scoring, self.prepare or {}))
        reading: tuple[dict[str, Any], PrepareConfig] = cached[1]
        return reading

    def _scorer(self) -> bundles.Scorer:
        """The function that scores the bundle's features in their order; cached."""
        if "scorer" not in self._kept:
            self._kept["scorer"] = self._fitted().scorer(device=choose_device("auto"), threads=1)  # more only wait here
        scorer: bundles.Scorer = self._kept["scorer"]
        return scorer

    def _own_files(self) -> str:
        """The directory of the bundle, whose files are still those that were opened."""
        if bundles.content_hash(self.bundle_) != self._content:
            raise InputError(
                f"{self.bundle_}: another fit has replaced this ranker's files; give each its own directory"
            )
        return self.bundle_

    def _opened_with(self) -> tuple[dict[str, Any], int | None, tuple[str, ...]]:
        return self.columns_, self._array_width, tuple(self.feature_names_in_)

    def _open(
        self, url: str, columns: dict[str, Any], array_width: int | None = None, names: Sequence[str] = ()
    ) -> None:
        self._content, self._bundle, self.bundle_ = bundles.content_hash(url), bundles.load(url), url
        self.columns_ = with_fills(columns, self._bundle)
        self._kept: dict[str, Any] = {}  # caches of predict
        self._array_width = array_width
        names = names or [feature.name for feature in self._bundle.features]
        self.feature_names_in_ = np.array(names, dtype=object)
        self.n_features_in_ = len(self._bundle.features)

    def _folder(self, name: str) -> str:
        return self._scratch() if self.directory is None else storage.join(self.directory, name)

    def _scratch(self) -> str:
        """A scratch directory that lives as long as this object."""
        folder = storage.scratch.make()
        weakref.finalize(self, _remove, folder, os.getpid())
        return str(folder)


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a forked process has a copy of the object, not of the directory
        shutil.rmtree(folder, ignore_errors=True)


def _run(arguments: Arguments, method: Method, splits: Splits, out: str, encoders: SeedRun | None = None) -> SeedRun:
    return SeedRun({arguments.method: method}, splits, arguments.seed, arguments.workers, out, encoders)
