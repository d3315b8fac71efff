"""Tuned rankers of other libraries against jobs.auto: the same lists, the same minutes, the same judge.

  OMP_NUM_THREADS=1 python -m jobs.bench.baselines --config jobs/configs/results/baselines.yaml

On Linux, start it with `taskset -c 0` to hold all to one core. A repeated command continues where it stopped. FLAML is
no dependency: pip install flaml.

Shapes: N documents, F features, Q groups, T draws.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from pydantic import Field

from jobs.bench.cells import Cell, difference, publish
from jobs.cli import Command, main
from ltrscale import storage
from ltrscale.arrays import Doubles, Floats, Ints
from ltrscale.batch import QueryGroups, group_index
from ltrscale.bundle import load
from ltrscale.config import Config
from ltrscale.data.dataset.selection import only_relevant, select
from ltrscale.data.dataset.split import Splits, SplitsWithTest
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.settings import EvaluateSettings
from ltrscale.evaluation.statistics.crossed import FEWEST_DRAWS
from ltrscale.experiments.auto.auto import AutoJob
from ltrscale.progress import log
from ltrscale.ranking.metrics import ndcg
from ltrscale.reports.document import Document, Section, Table, TableRow, Text

Name = Literal["auto", "lightgbm", "xgboost", "catboost", "flaml"]
_BATCH, _MOST_TREES, _PATIENCE = 1 << 18, 3000, 100


class BaselineSet(Config):
    """Lists to compare on: splits of data sets, once for each fold or each draw of labels."""

    splits: SplitsWithTest
    """Training, validation and test; `{fold}` in the names of data sets stands for each of `folds`."""
    folds: tuple[str, ...] = ()
    """Names of the folds of a collection."""
    minutes: float = Field(default=2.0, gt=0)
    """For each search: with reading for `auto`, without it for the others, and without scoring the test."""
    draws: int = Field(default=1, ge=1)
    """Samples of the training labels, with the seeds 0, 1, ...; below five judge nothing."""

    def cells(self) -> Iterator[tuple[str, SplitsWithTest]]:
        """The name and the splits of each fold and draw."""
        for fold in self.folds or ("",):
            for draw in range(self.draws):
                named = {
                    name: split.replace(data=tuple(url.replace("{fold}", fold) for url in split.data))
                    for name, split in self.splits.by_name.items()
                }
                named["train"] = named["train"].replace(labelled_seed=draw)
                yield "-".join(filter(None, [fold, str(draw)])), self.splits.replace(**named)


class BaselinesJob(Config):
    """Compare jobs.auto with tuned rankers of other libraries."""

    out: str
    """Directory of the results, a file for each model, and `report.md`."""
    methods: tuple[Name, ...] = get_args(Name)
    """Which to compare."""
    cutoff: int = Field(default=5, ge=1)
    """NDCG at this cut-off chooses trees and settings on validation, and judges on test."""
    sets: dict[str, BaselineSet]
    """What to compare on, by name."""


def judged(lists: QueryGroups, scores_N: Any, k: int) -> Doubles:
    """NDCG@k of each list; NaN without a relevant document."""
    assert lists.labels_N is not None
    return ndcg(torch.as_tensor(np.asarray(scores_N, np.float64)), lists.labels_N, lists.offsets_Q1, k=k).numpy()


class Search(NamedTuple):
    """What a search may use."""

    train: QueryGroups
    validation: QueryGroups
    k: int
    ends: float
    """When it has to end, on the clock of `time.monotonic`."""
    seed: int

    def value(self, scores_N: Any) -> float:
        """Mean NDCG on validation."""
        return float(np.nanmean(judged(self.validation, scores_N, self.k)))

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self.ends

    @property
    def left_s(self) -> float:
        """Seconds that it has left."""
        return max(self.ends - time.monotonic(), 0.0)


Scores = Callable[[Floats], Any]
"""A ranker: the scores [N] of features [N, F]."""


def _arrays(lists: QueryGroups) -> tuple[Floats, Floats, Ints, Ints]:
    """Features, labels, the length of each list, and the number of each document's list."""
    assert lists.labels_N is not None
    numbers_N = group_index(lists.offsets_Q1).numpy()
    return lists.features_NF.numpy(), lists.labels_N.numpy(), lists.lengths_Q.numpy(), numbers_N


def _best_of(search: Search, trial: Callable[[Any], tuple[float, Scores]]) -> Scores:
    """The ranker of the best trial of a Bayesian search (Optuna's TPE) that ends in time."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    best: list[tuple[float, Scores]] = []

    def value(asked: "optuna.Trial") -> float:
        found = trial(asked)
        if not best or found[0] > best[0][0]:
            best[:] = [found]
        return found[0]

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=search.seed))
    study.optimize(value, n_trials=1)  # however late
    study.optimize(value, timeout=search.left_s)
    log.info("%d trials, the best with %.4f on validation", len(study.trials), best[0][0])
    return best[0][1]


def search_lightgbm(search: Search) -> Scores:
    """LightGBM's LambdaRank, eight settings searched, stopped early on validation."""
    import lightgbm as lgb

    x_NF, labels_N, lengths_Q, _ = _arrays(search.train)
    params = {"feature_pre_filter": False, "verbose": -1}
    data = lgb.Dataset(x_NF, labels_N, group=lengths_Q, params=params, free_raw_data=False)
    judged_NF, labels_N, lengths_Q, _ = _arrays(search.validation)
    valid = data.create_valid(judged_NF, labels_N, group=lengths_Q, params=params)
    data.construct()
    valid.construct()  # before a trial's settings reach the training data alone, of which LightGBM would warn

    def in_time(env: lgb.callback.CallbackEnv) -> None:
        if search.late and env.iteration:
            raise lgb.callback.EarlyStopException(env.iteration, env.evaluation_result_list or [])

    def trial(asked: Any) -> tuple[float, Scores]:
        settings = {
            "objective": "lambdarank",
            "metric": "ndcg",
            "eval_at": [search.k],
            "learning_rate": asked.suggest_float("learning_rate", 0.01, 0.3, log=True),
            "num_leaves": asked.suggest_int("num_leaves", 4, 128, log=True),
            "min_data_in_leaf": asked.suggest_int("min_data_in_leaf", 1, 200, log=True),
            "feature_fraction": asked.suggest_float("feature_fraction", 0.3, 1.0),
            "bagging_fraction": asked.suggest_float("bagging_fraction", 0.4, 1.0),
            "bagging_freq": 1,
            "lambda_l1": asked.suggest_float("lambda_l1", 1e-8, 10.0, log=True),
            "lambda_l2": asked.suggest_float("lambda_l2", 1e-8, 10.0, log=True),
            "lambdarank_truncation_level": asked.suggest_int(
                "lambdarank_truncation_level", search.k, max(search.k, 30)
            ),
            "num_threads": 1,
            "verbose": -1,
            "seed": search.seed,
        }
        seen: dict[str, dict[str, list[float]]] = {}
        stops = [lgb.record_evaluation(seen), lgb.early_stopping(_PATIENCE, verbose=False), in_time]
        booster = lgb.train(settings, data, _MOST_TREES, valid_sets=[valid], callbacks=stops)
        # where time ends it, LightGBM names its last number of trees, not its best
        trees = int(np.argmax(seen["valid_0"][f"ndcg@{search.k}"])) + 1
        scores_N = booster.predict(judged_NF, num_iteration=trees)
        return search.value(scores_N), lambda features_NF: booster.predict(features_NF, num_iteration=trees)

    return _best_of(search, trial)


def search_xgboost(search: Search) -> Scores:
    """XGBoost's rank:ndcg, eight settings searched, stopped early on validation."""
    import xgboost as xgb

    class InTime(xgb.callback.TrainingCallback):  # type: ignore[misc]
        def after_iteration(self, *_: object) -> bool:
            return search.late

    arrays = map(_arrays, (search.train, search.validation))
    data, valid = (xgb.DMatrix(x_NF, labels_N, qid=numbers_N) for x_NF, labels_N, _, numbers_N in arrays)
    metric = f"ndcg@{search.k}"

    def trial(asked: Any) -> tuple[float, Scores]:
        settings = {
            "objective": "rank:ndcg",
            "eval_metric": metric,
            "tree_method": "hist",
            "eta": asked.suggest_float("eta", 0.01, 0.3, log=True),
            "max_depth": asked.suggest_int("max_depth", 2, 10),
            "min_child_weight": asked.suggest_float("min_child_weight", 0.01, 100.0, log=True),
            "subsample": asked.suggest_float("subsample", 0.4, 1.0),
            "colsample_bytree": asked.suggest_float("colsample_bytree", 0.3, 1.0),
            "alpha": asked.suggest_float("alpha", 1e-8, 10.0, log=True),
            "lambda": asked.suggest_float("lambda", 1e-8, 10.0, log=True),
            "lambdarank_num_pair_per_sample": asked.suggest_int("pairs", search.k, max(search.k, 30)),
            "lambdarank_pair_method": "topk",
            "nthread": 1,
            "seed": search.seed,
        }
        stops = [
            xgb.callback.EarlyStopping(rounds=_PATIENCE, metric_name=metric, maximize=True, save_best=True),
            InTime(),
        ]
        booster = xgb.train(
            settings, data, _MOST_TREES, evals=[(valid, "validation")], callbacks=stops, verbose_eval=False
        )
        return search.value(booster.predict(valid)), lambda features_NF: booster.predict(xgb.DMatrix(features_NF))

    return _best_of(search, trial)


def search_catboost(search: Search) -> Scores:
    """CatBoost's YetiRank, four settings searched, stopped early on validation."""
    from catboost import CatBoost, Pool

    class InTime:
        def after_iteration(self, _: object) -> bool:
            return not search.late

    arrays = map(_arrays, (search.train, search.validation))
    data, valid = (Pool(x_NF, labels_N, group_id=numbers_N) for x_NF, labels_N, _, numbers_N in arrays)

    def trial(asked: Any) -> tuple[float, Scores]:
        model = CatBoost(
            {
                "loss_function": "YetiRank",
                "eval_metric": f"NDCG:top={search.k};type=Exp",
                "iterations": _MOST_TREES,
                "od_type": "Iter",
                "od_wait": _PATIENCE,
                "use_best_model": True,
                "learning_rate": asked.suggest_float("learning_rate", 0.01, 0.3, log=True),
                "depth": asked.suggest_int("depth", 2, 8),
                "l2_leaf_reg": asked.suggest_float("l2_leaf_reg", 0.1, 30.0, log=True),
                "random_strength": asked.suggest_float("random_strength", 0.01, 10.0, log=True),
                "thread_count": 1,
                "random_seed": search.seed,
                "allow_writing_files": False,
                "logging_level": "Silent",
            }
        )
        model.fit(data, eval_set=valid, callbacks=[InTime()])
        return search.value(model.predict(valid)), model.predict

    return _best_of(search, trial)


def search_flaml(search: Search) -> Scores:
    """FLAML's AutoML for ranking: LightGBM and XGBoost, settings and sizes by its own search."""
    from flaml import AutoML

    longer_Q = (search.validation.lengths_Q > 1).nonzero()[:, 0]  # its metric refuses a list of one document
    x_NF, labels_N, lengths_Q, _ = _arrays(search.train)
    judged_NF, judged_N, judged_Q, _ = _arrays(search.validation.select(longer_Q))
    found = AutoML()
    found.fit(
        X_train=x_NF,
        y_train=labels_N,
        groups=lengths_Q,
        X_val=judged_NF,
        y_val=judged_N,
        groups_val=judged_Q,
        task="rank",
        metric=f"ndcg@{search.k}",
        eval_method="holdout",
        retrain_full=False,
        time_budget=search.left_s,
        n_jobs=1,
        seed=search.seed,
        verbose=0,
    )
    log.info("its best is %s", found.best_estimator)
    return found.predict  # type: ignore[no-any-return]


_OTHERS: Mapping[Name, Callable[[Search], Scores]] = {
    "lightgbm": search_lightgbm,
    "xgboost": search_xgboost,
    "catboost": search_catboost,
    "flaml": search_flaml,
}


def _auto(splits: SplitsWithTest, minutes: float, k: int, seed: int, out: str) -> tuple[float, Doubles]:
    """The minutes of `jobs.auto`, without its test, and NDCG of its ranker on each test list."""
    start = time.monotonic()
    settings = EvaluateSettings(ndcg_at=(k,), primary_cutoff=k)
    auto = AutoJob(
        out=out,
        data=splits.train.data[0],
        splits=Splits(train=splits.train, validation=splits.validation),
        budget=minutes,
        evaluate=settings,
        refit=False,
        seed=seed,
    )
    bundle = load(auto.train())
    took = (time.monotonic() - start) / 60
    test = only_relevant(select(splits.test, labelled=True))
    score = bundle.scorer(features=test.features, threads=1)
    parts = iterate(test, docs_per_batch=_BATCH)
    return took, np.concatenate([judged(groups, score(groups), k) for groups in parts])


def _lists(splits: SplitsWithTest) -> Iterator[QueryGroups]:
    """Lists to learn from, to choose by and to judge on, with the features that training reads.

    Those without a relevant document teach no order and have no NDCG: all methods leave them out.
    """
    for split in splits.by_name.values():
        selection = only_relevant(select(split.replace(leave_out=splits.train.leave_out), labelled=True))
        yield QueryGroups.concat([*iterate(selection, docs_per_batch=_BATCH)])


def compare(job: BaselinesJob) -> None:
    """Train what is missing, all methods on a draw before the next, and report.

    Raises:
        InputError: a record is of other settings, or a library that is asked for is not installed.
    """
    for method in job.methods:
        if method != "auto" and find_spec(method) is None:
            raise InputError(f"methods: {method} is not installed; pip install {method}")
    for name, chosen in job.sets.items():
        for seed, (cell, splits) in enumerate(chosen.cells()):
            cells = _cells(job, name, cell, splits)
            missing = [method for method, of_method in cells.items() if not of_method.is_made]
            lists = [*_lists(splits)] if {*missing} - {"auto"} else []
            for method in missing:
                log.info("%s: %s by %s", name, cell, method)
                if method == "auto":
                    out = storage.join(job.out, name, cell, "auto")
                    took, ndcg_Q = _auto(splits, chosen.minutes, job.cutoff, seed, out)
                else:
                    train, validation, test = lists
                    start = time.monotonic()
                    ranker = _OTHERS[method](Search(train, validation, job.cutoff, start + 60 * chosen.minutes, seed))
                    took = (time.monotonic() - start) / 60
                    ndcg_Q = judged(test, ranker(test.features_NF.numpy()), job.cutoff)
                cells[method].write(ndcg_Q, minutes=took)
    publish(document(job), job.out)


def _cells(job: BaselinesJob, name: str, cell: str, splits: SplitsWithTest) -> dict[Name, Cell]:
    """Those of each method on a fold and draw of a set."""
    minutes = job.sets[name].minutes
    asked = {"minutes": minutes, "cutoff": job.cutoff, "splits": splits.model_dump(mode="json")}
    return {method: Cell(storage.join(job.out, name, cell, f"{method}.json"), asked) for method in job.methods}


def document(job: BaselinesJob) -> Document:
    """A table for each set: NDCG of each method, what auto has more, and in how many draws."""
    sections = []
    for name, chosen in job.sets.items():
        folds = f", {len(chosen.folds)} folds" if chosen.folds else ""
        few = "" if chosen.folds or chosen.draws >= FEWEST_DRAWS else ", too few to judge"
        text = f"{chosen.minutes:g} minutes for each search; draws of labels: {chosen.draws}{few}{folds}"
        sections.append(Section(name, [Text(text), Table.from_rows([*_rows(job, name)])]))
    opening = [Text("What auto has more, with its 95% interval, and in how many folds and draws it is ahead.")]
    return Document("jobs.auto and tuned rankers of other libraries", opening, sections)


def _rows(job: BaselinesJob, name: str) -> Iterator[TableRow]:
    chosen = job.sets[name]
    cells = [_cells(job, name, cell, splits) for cell, splits in chosen.cells()]
    found = {method: [of_draw[method].read() for of_draw in cells] for method in job.methods}
    for method, records in found.items():
        row: TableRow = {
            "method": method,
            f"NDCG@{job.cutoff}": float(np.mean([np.nanmean(each["ndcg"]) for each in records])),
            "minutes": round(float(np.mean([each["minutes"] for each in records])), 2),
        }
        if method != "auto" and "auto" in found:
            leads = [ours["ndcg"] - theirs["ndcg"] for ours, theirs in zip(found["auto"], records, strict=True)]
            row["auto more by"] = difference(leads, chosen.draws)
            row["auto ahead in"] = f"{sum(np.nanmean(each_Q) > 0 for each_Q in leads)} of {len(leads)}"
        yield row


COMMAND = Command("baselines", lambda: (BaselinesJob, compare), __doc__, package="jobs.bench")

if __name__ == "__main__":
    main(COMMAND)
