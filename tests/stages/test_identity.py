"""The law of identities: a key that is marked as no part of the result changes no identity, and each other key does."""

import contextlib
import importlib
import inspect
import pkgutil
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from config_keys import Key, Values, example, keys_of
from dataset_changes import with_clicks

import ltrscale
from jobs.help import meanings
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import one_view
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.origin import is_made_by, made_by
from ltrscale.scoring.score import ScoreJob
from ltrscale.stages.stage import Stage
from ltrscale.trees.gbdt import GBDTJob
from ltrscale.trees.stacking import StackedJob

_SPLIT = r"(\.(data|periods|scores|leave_out|label.*|relevant_groups|fold.*))?"
_LABELS = r"\.(scores|label.*|relevant_groups|fold.*)"
_RANKED = {"train_gbdt", "train_semi", "stack", "average", "finetune", "combine", "blend", "feature", "in_context"}
PROMISE = re.compile(r"(result|output|figures|scores)\s+(does not depend on it|is the same|are the same)")
UNREAD = {
    **{stage: [rf"splits\.test{_SPLIT}", r"splits\.gap"] for stage in _RANKED},  # test is not read, a gap only refuses
    "history": [r"prepare\.(?!inputs|source).*"],
    "pretrain": [rf"train{_LABELS}"],  # documents alone
    "refit": [r"also\.(labelled_sample|labelled_seed|leave_out)"],  # as the splits of the bundle have them
    "study_test": [r"splits\.gap", rf"splits\.train{_SPLIT}", r"evaluate\.(?!outliers).*"],  # outliers alone
    "measure": [
        r"splits\.gap",
        rf"splits\.(train|validation){_SPLIT}",
        r"evaluate\.(baseline|judged|primary_cutoff|resamples|seed|slice.*|outliers.*)",  # metrics alone
        r"evaluate\.(as_shown|by_period|propensities.*)",
    ],
}
"""Patterns of the keys of a shared config that a stage does not read; they must change nothing there."""

COMPLETE: dict[str, dict[str, Any]] = {
    "SemiConfig": {"pca": 2},
    "Dimension": {"choices": [1, 2]},
    "TuneJob": {"space": {"gbdt.num_trees": {"choices": [1, 2]}}},
    "Match": {"counted": "2026-W01"},
    "Fold": {"number": 0, "of": 2},
    "OuterFold": {"number": 0, "of": 2},
    "Events": {"tables": "ubi", "columns": {"query": "query", "features": ["position"], "label": "grade"}},
}
"""Keys that some configs need beside those without a default."""

NEED_OTHERS = {
    "CatBoostConfig.label_gain",
    "ColumnMapping.encoding",
    "ColumnMapping.labels",
    "ColumnMapping.optional",
    "DLCMConfig.feature",
    "DLCMConfig.initial_rank",
    "Dimension.high",
    "Dimension.integer",
    "Dimension.log",
    "Dimension.low",
    "Dimension.step",
    "Events.merge",
    "ExplainJob.items",
    "InputFiles.group_sizes",
    "InputFiles.since",
    "InputFiles.table",
    "InputFiles.version",
    "InterleaveJob.scores",
    "InterleavingLog.position",
    "NetworkConfig.initial",
    "ProblemsConfig.documents",
    "ProblemsConfig.examples",
    "ProblemsConfig.features",
    "Registry.name",
    "Registry.store",
    "SetRankConfig.feature",
    "VerdictJob.arms",
}
"""Keys that fit only together with another change; the law cannot try them."""


def stages(of: type[Stage] = Stage) -> Iterator[type[Stage]]:
    """All stages of the package."""
    for module in pkgutil.walk_packages(ltrscale.__path__, "ltrscale."):
        importlib.import_module(module.name)
    for stage in of.__subclasses__():
        if stage.__module__.startswith("ltrscale.") and not inspect.isabstract(stage):
            yield stage
        yield from stages(stage)


STAGES = sorted(set(stages()), key=lambda stage: stage.__name__)


@pytest.fixture(scope="module")
def world(synthetic_dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Values:
    """Two different directories of each kind that stages read, by the names of the keys that read them."""
    folder = tmp_path_factory.mktemp("world")

    def made(stage: type[Stage], name: str, **values: Any) -> str:
        validate(stage, {"out": str(folder / name), **values}, name).run()
        return str(folder / name)

    data = (synthetic_dataset, with_clicks(synthetic_dataset, str(folder / "other")))
    names = ("train", "validation", "test")
    where = {name: {"data": data[0], "periods": f"2026-W0{i}"} for i, name in enumerate(names, 1)}
    learn = {name: where[name] for name in ("train", "validation")}
    trees = [
        made(GBDTJob, f"trees-{n}", splits=learn, gbdt={"num_trees": 2, "num_leaves": n, "num_threads": 1})
        for n in (2, 9)
    ]
    scores = [made(ScoreJob, f"scores-{i}", bundle=url, data=data[0]) for i, url in enumerate(trees)]
    measured = {"splits": where, "baseline": None, "slice_by": ["period"], "resamples": 100}
    found = [
        made(EvaluateJob, f"found-{i}", evaluate={"models": {"a": url}, **measured}) for i, url in enumerate(trees)
    ]
    files = [str(path) for path in sorted(Path(synthetic_dataset).parent.glob("log/**/*.parquet"))[:2]]
    bundles = dict.fromkeys(("bundle", "bundles", "folds", "models", "pretrained", "start", "embeddings"), trees)
    texts = {
        **bundles,
        "initial": trees,
        **dict.fromkeys(("data", "statistics", "judged"), data),
        **dict.fromkeys(("evaluation", "evaluations", "agreement", "test", "url"), found),
        **dict.fromkeys(("periods", "period"), ("2026-W01", "2026-W02")),
        "clicks": found,
        "scores": scores,
        **dict.fromkeys(("path", "raw"), files),
        "device": ("cpu", "auto"),
        "metric": ("ndcg@5", "mrr"),
        "metrics": ("rbp(persistence=0.9)", "rbp(persistence=0.8)"),
        "validation_metric": ("ndcg@5", "mrr"),
        "time_zone": ("UTC", "Europe/Berlin"),
        **dict.fromkeys(("sort_memory", "memory"), ("1GB", "2GB")),
        "inputs": files,
        "first_week": ("2026-W01", "2026-W02"),
        "where": ("n_documents > 2", "n_documents > 3"),
    }
    complete = {
        "Split": {"data": data[0], "periods": "2026-W01"},
        "ExportJob": {"data": data[0]},
        "EvaluateConfig": {"models": {"a": trees[0]}, "baseline": None},
        "AgreementJob": {"models": {"a": trees[0]}},
        "PrepareConfig": {"inputs": files[0]},
        "PretrainJob": {"train": {"data": data[0], "periods": "2026-W01"}},
        "RefitJob": {"bundle": trees[0], "also": {"data": data[0], "periods": "2026-W04"}},
        "InterleaveJob": {"models": {"a": trees[0], "b": trees[1]}},
        **{log: {"inputs": files[0], "time": "time"} for log in ("AbLog", "InterleavingLog")},
        "VerdictJob": {
            "arms": {"a": 1, "b": 1},
            "control": "a",
            "goals": {"clicks": {}},
            "start": "2026-03-01",
            "until": "2026-03-14",
        },
    }
    return Values(texts, COMPLETE | complete)


def changes(key: Key) -> Iterator[bool]:
    """For each other value of a key, whether it makes another origin; none where the stage refuses the value."""

    def origin(stage: Any) -> dict[str, Any]:
        return made_by(stage.stage, stage.identity(), stage.inputs())

    with contextlib.suppress(InputError):
        before = {"made_by": origin(key.base)}
        for other in key.others:
            with contextlib.suppress(InputError):
                yield not is_made_by(before, origin(other))


def until_true(found: Iterator[bool]) -> Iterator[bool]:
    """The values up to the first that is true: one value that changes the identity is enough."""
    for each in found:
        yield each
        if each:
            return


@pytest.mark.slow
def test_a_key_changes_the_identity_unless_it_is_marked_as_no_part_of_the_result(world: Values) -> None:
    wrong, tried, leaves, promised = set(), set(), set(), set()
    for stage in STAGES:
        changed: dict[tuple[str, str], list[bool]] = defaultdict(list)
        apart = set()
        with one_view():
            for key in keys_of(validate(stage, example(stage, world), stage.__name__), world):
                name = f"{key.owner.__name__}.{key.path[-1]}", f"{stage.__name__}.{key.name}"
                if key.leaf:
                    leaves.add(name[0])
                if PROMISE.search(meanings(key.owner).get(str(key.path[-1]), "")) and not key.operational:
                    promised.add(name)
                if key.operational or any(re.fullmatch(unread, key.name) for unread in UNREAD.get(stage.stage, ())):
                    apart.add(name)
                    changed[name] += changes(key)
                elif key.leaf and not any(changed[name]):  # the keys below another come by themselves
                    changed[name] += until_true(changes(key))
        wrong |= {name for name, found in changed.items() if found and any(found) == (name in apart)}
        tried |= {name[0] for name, found in changed.items() if found}
    assert wrong == set()
    assert promised == set(), "its text says that it does not change the result, and it is not marked"
    assert leaves - tried == NEED_OTHERS


@pytest.mark.slow
def test_evaluating_in_other_batches_changes_nothing(world: Values, tmp_path: Path) -> None:
    weeks = {"train": "2026-W01", "validation": "2026-W02", "test": "2026-W03"}
    splits = {name: {"data": world.texts["data"][0], "periods": week} for name, week in weeks.items()}
    settings = {"models": {"a": world.texts["bundle"][0]}, "baseline": None, "resamples": 100, "splits": splits}

    def job(**changes: Any) -> EvaluateJob:
        return validate(EvaluateJob, {"out": str(tmp_path / "out"), "evaluate": settings | changes}, "test")

    assert job().run()
    assert not job(docs_per_batch=100).run()
    assert job(seed=1).run()


@pytest.mark.slow
def test_moved_inputs_are_the_same_and_exchanged_ones_are_not(world: Values, tmp_path: Path) -> None:
    splits = {name: {"data": world.texts["data"][0], "periods": name} for name in ("2026-W01", "2026-W02")}
    splits = dict(zip(("train", "validation"), splits.values(), strict=True))

    def origin(first: str, second: str) -> dict[str, Any]:
        members = {"a": {"bundle": first}, "b": {"bundle": second}}
        values = {"out": "x", "splits": splits, "stack": {}, "members": members}
        job = validate(StackedJob, values, "test")
        return made_by(job.stage, job.identity(), job.inputs())

    one, two = world.texts["bundle"]
    for number, url in enumerate((one, two)):
        shutil.copytree(url, tmp_path / str(number))
    there = {"made_by": origin(one, two)}
    assert is_made_by(there, origin(str(tmp_path / "0"), str(tmp_path / "1")))
    assert not is_made_by(there, origin(two, one)), "each has the other's bundle"
    assert not is_made_by(there, origin(one, one))
