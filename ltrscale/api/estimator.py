"""`Ranker`: the jobs as a scikit-learn estimator, on tables in memory.

A table becomes a data set directory, the stages of a pipeline train on it, and the bundle that they commit scores rows.
So a `Ranker` gives the same results as the jobs with the same settings.

Shapes: N rows (documents), F features.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator

from ltrscale import bundle as bundles
from ltrscale import storage
from ltrscale.api import frames
from ltrscale.api.conventions import AUTO, Arguments, NotFitted, as_value_errors, inner_values, new_values
from ltrscale.api.fitted import FittedModel, Folder, SavedRanker, explained
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
from ltrscale.experiments.methods.single import pretrained
from ltrscale.ingest.mapping import ColumnMapping
from ltrscale.ranking.choices import metric_named
from ltrscale.serving.columns import ROW, uses_of
from ltrscale.stages.runs import check_replaceable

_SCORED_AT_ONCE = 1 << 16
Keys = Mapping[str, Any]


class _Pretrained(NamedTuple):
    """What `pretrain` leaves to `fit`."""

    run: SeedRun
    columns: dict[str, Any]
    array_width: int | None
    folder: Folder
    """Of the run; it lasts as long as this."""


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
        bundle_: URL of the trained bundle, which the jobs can read; a scratch directory lasts until the next `fit`.
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

    # of the class, because scikit-learn allows no other attribute than the arguments before `fit`
    _model: FittedModel | None = None
    _pretrained: _Pretrained | None = None

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

        Without this call, and in a copy, `fit` pretrains on its training rows. The arguments are those of `fit`; if the
        rows have labels, name their column, or it becomes a feature.

        Raises:
            InputError: the method does not pretrain, or as `jobs.prepare` and `jobs.pretrain`.
        """
        arguments = self._arguments()
        method = arguments.as_method()
        if method.encoder(self.method, {}) is None:
            raise InputError(f"Ranker({self.method!r}) does not pretrain; choose a pretext objective as method")
        table, columns = frames.rows_as_table(X, None, group, columns)
        folder = self._folder("pretrain")
        data = storage.join(folder.url, "data")
        frames.prepare_tables({"all": table}, columns, self.prepare or {}, data)
        # pretraining reads only the training split
        splits = Splits(train=Split(data=(data,)), validation=Split(data=(data,)))
        run = _run(arguments, method, splits, folder)
        pretrained(run, self.method)
        self._pretrained = _Pretrained(run, columns, frames.width(X), folder)
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
        arguments, width = self._arguments(), frames.width(X)
        method = None if arguments.method == AUTO and not arguments.settings else arguments.as_method()
        encoders = None if method is None else self._encoders_for(method)
        if self._pretrained is not None:
            frames.check_width(X, self._pretrained.array_width)
            columns = {**self._pretrained.columns, **columns}
        table, columns = frames.rows_as_table(X, y, group, columns, labels_needed=True)
        if validation is None:
            train, held_out = frames.held_out(table, columns, arguments.validation_fraction, arguments.seed)
        else:
            train, held_out = table, frames.validation_table(validation, columns, width)
        folder = self._folder("fit")
        data = storage.join(folder.url, "data")
        frames.prepare_tables({"train": train, "validation": held_out}, columns, self.prepare or {}, data)
        splits = Splits(
            train=Split(data=(data,), periods=("train",)), validation=Split(data=(data,), periods=("validation",))
        )
        check_splits(splits)
        if method is None:
            made = _found_by_auto(arguments, splits, folder)
        else:
            made = _run(arguments, method, splits, folder, encoders).model(self.method)
        names = frames.in_order_of(table, columns, bundles.load(made).features)
        self._open(FittedModel(made, columns, width, names, folder=folder))
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
        model = self._fitted()
        bundle = model.bundle
        table, uses = self._as_fitted(X, None, group, columns)
        uses, reading = model.reading(uses, columns, self.prepare or {})
        if not len(table):
            return np.zeros(0)
        scores_N = np.empty(len(table))
        if small := frames.in_memory(table, reading, bundle):
            groups, rows_N = small
            scores_N[rows_N] = scored.finite(model.scorer(groups), bundle.url).numpy()
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
        bundle, metric = self._fitted().bundle, metric_named(self._arguments().metric)
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
            X: as in `predict`; if it has the `item` column, its values name the rows.
            rows: numbers of two rows of a query to compare. By default the first row of each query is compared with
                those of ranks 2 to `depth`; this needs a query with two rows.
            group: as in `predict`.
            depth: see `rows`.
            columns: as in `predict`.

        Raises:
            InputError: as `predict`; `rows` are not two rows of one query.
        """
        if depth < 2:
            raise InputError(f"depth is {depth}; give 2 or more, the last rank that is compared with the first")
        model = self._fitted()
        table, uses = self._as_fitted(X, None, group, columns)
        item = uses.get("item")
        items = [str(i) for i in table[item].to_pylist()] if item in table.column_names else None
        columns.pop("item", None)  # scores do not depend on it
        uses, _ = model.reading(uses, columns, self.prepare or {})
        if not len(table):
            return []
        with self._every_row(table, uses) as split:
            return explained(model.bundle, split, items or [f"row {i}" for i in range(len(table))], rows, depth)

    @property
    def bundle_(self) -> str:
        """URL of the trained bundle."""
        return self._fitted().url

    @property
    def feature_importances_(self) -> NDArray[np.float64]:
        """The importance of each feature to trees [F], in the order of `feature_names_in_`; see `boosters.importances`.

        Raises:
            AttributeError: the ranker is not fitted, is a network, or has trees that see more than the features, such
                as a stack.
        """
        bundle = self._fitted().bundle
        trees = bundle.forest
        if trees is None or trees.projection or trees.members or trees.sees is not None:
            raise AttributeError("feature_importances_ are those of fitted trees that see the features alone")
        importances = bundle.importances() or {}
        return np.array([importances[name] for name in self.feature_names_in_])

    @as_value_errors
    def save(self, url: str) -> None:
        """Commit a copy of the bundle with the arguments and the uses of columns; `load` and the jobs read it.

        Raises:
            InputError: the ranker is not fitted, or the output of another stage is at the URL.
        """
        model, arguments = self._fitted(), self.get_params(deep=False)
        check_replaceable(url, model.bundle.made_by["stage"])
        saved = SavedRanker(
            arguments=arguments, columns=model.columns, array_width=model.array_width, names=model.names
        )
        saved.commit(url, model.own_files())

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
            return ranker._open(FittedModel(url, saved.columns, saved.array_width, saved.names))
        columns, settings = uses_of(bundle)
        ranker = cls(bundle.forest.library if bundle.forest else "neural", prepare=settings or None)
        return ranker._open(FittedModel(url, columns))

    def __getstate__(self) -> dict[str, Any]:
        """For copies and other processes: all but what lies in the data directories of this ranker."""
        return {name: value for name, value in vars(self).items() if name not in ("splits_", "_pretrained")}

    def _arguments(self) -> Arguments:
        return validate(Arguments, self.get_params(deep=False), "Ranker")

    def _encoders_for(self, method: Method) -> SeedRun | None:
        """The run of `pretrain`; None without one, and for a method that does not pretrain."""
        if self._pretrained is None or method.encoder(self.method, {}) is None:
            return None
        run = self._pretrained.run
        if self.method not in run.methods:
            before = ", ".join(run.methods)
            raise InputError(f"Ranker({self.method!r}): pretrain was called for {before!r}; call it again before fit")
        return run

    def _fitted(self) -> FittedModel:
        if self._model is None:
            raise NotFitted("this Ranker is not fitted; call fit first, or Ranker.load")
        return self._model

    def _as_fitted(
        self, X: Any, y: Any, group: Any, columns: Keys, *, labels_needed: bool = False
    ) -> tuple[pa.Table, dict[str, Any]]:
        """Rows with the columns of `fit` as a table with row numbers, and its uses, of which `columns` are new."""
        model = self._fitted()
        frames.check_width(X, model.array_width)
        table, uses = frames.rows_as_table(X, y, group, {**model.columns, **columns}, labels_needed=labels_needed)
        return table.append_column(ROW, pa.array(np.arange(len(table)))), uses

    def _every_row(self, table: pa.Table, uses: Keys) -> AbstractContextManager[Split]:
        """Rows to score as a data set for the block; every row needs a score, so none may be rejected."""
        return frames.prepared(table, uses, {**(self.prepare or {}), "max_rejected": 0})

    def _open(self, model: FittedModel) -> Self:
        self._model, self.columns_ = model, model.columns
        self.feature_names_in_ = np.array(model.names, dtype=object)
        self.n_features_in_ = len(model.names)
        return self

    def _folder(self, name: str) -> Folder:
        return Folder(None if self.directory is None else storage.join(self.directory, name))


def _found_by_auto(arguments: Arguments, splits: Splits, folder: Folder) -> str:
    """The bundle that `jobs.auto` finds; a run resumes with the same rows and seed, and others start a new one."""
    (data,) = splits.train.data
    place = storage.join(folder.url, AUTO, f"{open_dataset(data).manifest.hash[:8]}-{arguments.seed}")
    of = {"budget": arguments.minutes, "seed": arguments.seed, "workers": arguments.workers}
    return AutoJob(out=place, data=data, splits=splits, **of).train()


def _run(
    arguments: Arguments, method: Method, splits: Splits, folder: Folder, encoders: SeedRun | None = None
) -> SeedRun:
    return SeedRun({arguments.method: method}, splits, arguments.seed, arguments.workers, folder.url, encoders)
