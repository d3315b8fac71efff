"""Self-training: what teaches the student and what it starts from, that no other label is read, and what runs again."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nightly import nightly
from numpy.typing import NDArray
from written_directories import written_directories

from ltrscale import bundle
from ltrscale import config as configs
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.scores import scored_periods
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.agreement import kendall_tau
from ltrscale.experiments.methods.base import SeedRun
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.runtime.workers import ONE
from ltrscale.stages.provenance import check_unseen

Groups = list[tuple[NDArray[np.float32], NDArray[np.float32] | None]]
WriteDataset = Callable[[Mapping[str, Groups], list[Feature]], str]
FEATURES = [Feature(name="code", kind="categorical"), *(Feature(name=f"x{i}") for i in range(4))]
NETWORK = {"encoder": {"kind": "resnet", "width": 16, "blocks": 1}}
IN_ORDER = {"docs_per_batch": 200, "shuffle": False}
"""A shuffle depends on the hashes of the files, and so on labels that nothing reads."""
FINETUNE = {
    "network": NETWORK, "head": {"layers": 2}, "head_epochs": 1, "epochs": 2, "stream": IN_ORDER,
    "optimizer": {"learning_rate": 1e-2},
}  # fmt: skip
LEARN = {"kind": "network", "epochs": 4, "stream": IN_ORDER, "optimizer": {"learning_rate": 1e-2}}
TREES = {"num_trees": 8, "num_leaves": 6, "min_data_in_leaf": 5, "feature_fraction": 0.6, "num_threads": 1}
REGRESSION = {"kind": "regression", "trees": {"num_trees": 30, "num_leaves": 8, "num_threads": 1}}
METHODS: dict[str, dict[str, Any]] = {
    "trees": {"kind": "gbdt", "gbdt": TREES},
    "semi": {"kind": "semi_gbdt", "semi": {"pca": 2, "gbdt": TREES}},
    "scratch": {"kind": "neural", "finetune": FINETUNE},
    "tuned": {
        "kind": "neural",
        "pretrain": {"network": NETWORK, "epochs": 1, "stream": {"docs_per_batch": 500, "shuffle": False}},
        "finetune": FINETUNE,
    },
    "both": {"kind": "combined", "parts": ["scratch", "tuned"], "combine": {"how": "concat", "epochs": 1}},
}
STUDENTS: dict[str, dict[str, Any]] = {
    "scratch": {"of": "scratch", "runs": 2, "student": LEARN},
    "tuned": {"of": "tuned", "runs": 2, "student": LEARN},
    "trees": {"of": "trees", "runs": 3, "student": REGRESSION},
    "semi": {"of": "semi", "runs": 2, "student_as": "trees", "student": REGRESSION},
    "both": {"of": "both", "runs": 2, "student_as": "tuned", "student": {**LEARN, "loss": {"kind": "list_net"}}},
}


FOLD = {"number": 0, "of": 2}


def made(count: int, seed: int) -> Groups:
    """Labels follow two of the features."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        x_LF = np.column_stack([rng.integers(0, 3, n := int(rng.integers(3, 9))), rng.normal(size=(n, 4))])
        found.append((x_LF.astype(np.float32), np.clip(np.round(x_LF[:, 1] + x_LF[:, 2] + 1), 0, 4).astype(np.float32)))
    return found


def data() -> dict[str, Groups]:
    sizes = {"p1": 60, "p2": 60, "p3": 40, "p4": 40}
    return {period: made(size, seed) for seed, (period, size) in enumerate(sizes.items())}


def splits_of(url: str, **train: Any) -> Splits:
    train = {"data": url, "periods": "p1..p2", "labelled_fraction": 0.25, "labelled_seed": 3, **train}
    others = {name: {"data": url, "periods": period} for name, period in (("validation", "p3"), ("test", "p4"))}
    return Splits.model_validate({"train": train, **others})


def method(name: str, **changes: Any) -> dict[str, Any]:
    return {"kind": "self_trained", **STUDENTS[name], **changes}


def methods_of(**methods: dict[str, Any]) -> PipelineJob:
    values = {
        "out": "x",
        "data": "x",
        "splits": {name: {} for name in ("train", "validation", "test")},
        "methods": {**METHODS, **methods},
        "evaluate": {"baseline": None},
    }
    return configs.validate(PipelineJob, values, "test")


def seed_run(url: str, out: Path, method: dict[str, Any], **train: Any) -> SeedRun:
    return SeedRun(methods_of(new=method).methods, splits_of(url, **train), 5, ONE, str(out))


@pytest.fixture(scope="module")
def url(write_dataset: WriteDataset) -> str:
    return write_dataset(data(), FEATURES)


def groups_of(split: Split, *, labelled: bool) -> QueryGroups:
    return QueryGroups.concat(list(iterate(select(split, labelled=labelled))))


def scores_of(url: str | Path, groups: QueryGroups) -> torch.Tensor:
    return bundle.load(str(url)).scorer(threads=1)(groups).double()


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDENTS)
def test_the_student_learns_the_mean_of_the_runs_on_all_training_groups(url: str, tmp_path: Path, name: str) -> None:
    made = seed_run(url, tmp_path, method(name))
    out = made.model("new")
    assert out == str(tmp_path / "new" / "model")
    train = Split(data=(url,), periods=("p1..p2",), scores=str(tmp_path / "new" / "scores"))
    taught = groups_of(train, labelled=True)
    assert taught.labels_N is not None
    of, runs = STUDENTS[name]["of"], STUDENTS[name]["runs"]
    folders = [tmp_path, *(tmp_path / "runs" / str(run) for run in range(1, runs))]
    of_runs = [scores_of(folder / of / "model", taught) for folder in folders]
    assert len({tuple(scores_N.tolist()) for scores_N in of_runs}) == runs, "the runs differ"
    mean_N = torch.stack(of_runs).mean(0)
    torch.testing.assert_close(taught.labels_N.double(), mean_N, rtol=1e-5, atol=1e-5)
    student = bundle.load(str(tmp_path / "new" / "student"))
    assert student.metrics["labelled_groups"] == taught.n_groups == 120
    tau_Q = kendall_tau(student.scorer(threads=1)(taught).double(), mean_N, taught.offsets_Q1)
    assert float(tau_Q.nanmean()) > 0.6
    assert bundle.load(out).metrics["labelled_groups"] == 30
    assert sorted(path.name for path in (tmp_path / "new" / "scores").glob("period=*")) == ["period=p1", "period=p2"]
    for period in ("p2", "p3"):
        with pytest.raises(InputError, match=f"period '{period}'"):
            check_unseen(out, Split(data=(url,), periods=(period,)))


@pytest.mark.slow
def test_where_labels_teach_nothing_the_ranker_is_its_student(url: str, tmp_path: Path) -> None:
    """At a rate near 0 the labels change nothing, so all that the ranker knows comes from the scores."""
    no_statistics = {
        "encoder": {"kind": "mlp", "hidden": [16], "dropout": 0}
    }  # labels would move those of a batch norm
    still = {**FINETUNE, "network": no_statistics, "optimizer": {"learning_rate": 1e-12}}
    new = method("scratch", student_as="still")
    methods = methods_of(still={"kind": "neural", "finetune": still}, new=new).methods
    out = SeedRun(methods, splits_of(url), 5, ONE, str(tmp_path)).model("new")
    test = groups_of(splits_of(url).test, labelled=False)
    torch.testing.assert_close(scores_of(out, test), scores_of(tmp_path / "new" / "student", test), rtol=0, atol=1e-5)


def divergence(taught: QueryGroups, scores_N: torch.Tensor, temperature: float) -> float:
    """Mean KL divergence of the softmax of scores from that of the teacher's scores over the temperature."""
    assert taught.labels_N is not None
    lengths = taught.offsets_Q1.diff().tolist()
    of_lists = zip(taught.labels_N.double().split(lengths), scores_N.split(lengths), strict=True)
    logs = [((labels_L / temperature).log_softmax(0), scores_L.log_softmax(0)) for labels_L, scores_L in of_lists]
    return sum(float((t_L.exp() * (t_L - s_L)).sum()) for t_L, s_L in logs) / len(logs)


@pytest.mark.nightly
def test_list_net_teaches_the_softmax_of_each_list_and_standardised_squares_do_not(url: str, tmp_path: Path) -> None:
    """Squared error against standardised scores, the default, drops how far apart the teacher's scores are."""
    finetune = {**FINETUNE, "epochs": 15, "optimizer": {"learning_rate": 3e-2}}

    def by(**loss: Any) -> dict[str, Any]:
        student = {**LEARN, "epochs": 10, "patience": 10, "loss": loss}
        return {"kind": "self_trained", "of": "teacher", "runs": 1, "student": student}

    students = {
        "at_1": by(kind="list_net"),
        "at_4": by(kind="list_net", temperature=4),
        "squares": by(kind="squared_error", standardise=True),
    }
    methods = methods_of(teacher={"kind": "neural", "finetune": finetune}, **students).methods
    made = SeedRun(methods, splits_of(url), 5, ONE, str(tmp_path))
    for name in students:
        made.model(name)
    train = Split(data=(url,), periods=("p1..p2",), scores=str(tmp_path / "at_1" / "scores"))
    taught = groups_of(train, labelled=True)

    def left(name: str, temperature: float) -> float:
        """The student's divergence as a share of that of a student that knows nothing."""
        scores_N = scores_of(tmp_path / name / "student", taught)
        return divergence(taught, scores_N, temperature) / divergence(taught, 0 * scores_N, temperature)

    assert left("at_1", 1) < 0.05
    assert left("at_4", 4) < 0.05
    assert min(left("at_4", 1), left("at_1", 4), left("squares", 1), left("squares", 4)) > 0.1


@pytest.mark.slow
def test_trees_go_on_from_their_student(url: str, tmp_path: Path) -> None:
    out = bundle.load(seed_run(url, tmp_path, method("trees")).model("new"))
    assert out.contents["start.txt"] == bundle.load(str(tmp_path / "new" / "student")).content
    assert out.contents["model.txt"] != out.contents["start.txt"]


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "learnt"), [(17, 17), (120, 120), (500, 120)])
def test_a_student_may_learn_some_groups_only(url: str, tmp_path: Path, groups: int, learnt: int) -> None:
    seed_run(url, tmp_path, method("trees", groups=groups)).model("new")
    assert bundle.load(str(tmp_path / "new" / "student")).metrics["labelled_groups"] == learnt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fold"), [nightly("tuned", FOLD), nightly("tuned", None), ("trees", FOLD), nightly("trees", None)], ids=str
)
def test_labels_that_are_not_in_use_are_not_read(
    write_dataset: WriteDataset, url: str, tmp_path: Path, name: str, fold: dict[str, int] | None
) -> None:
    """Changing the labels that the sample, or the fold of a stack, does not use gives the same bytes."""
    used = groups_of(splits_of(url, fold=fold).train, labelled=True).ids_Q
    assert used is not None
    assert len(used) == (30 if fold is None else 15)
    changed, gid = data(), 0
    for period in ("p1", "p2"):
        for i, (x_LF, labels_L) in enumerate(changed[period]):
            assert labels_L is not None
            changed[period][i] = (x_LF, labels_L if gid in used.tolist() else 4 - labels_L)
            gid += 1
    other = write_dataset(changed, FEATURES)
    found = []
    for i, data_url in enumerate((url, other)):
        seed_run(data_url, tmp_path / str(i), method(name), fold=fold).model("new")
        found.append(
            {part: bundle.load(str(tmp_path / str(i) / "new" / part)).contents for part in ("student", "model")}
        )
    assert found[0] == found[1]


@pytest.mark.nightly
def test_a_pipeline_trains_each_run_once_and_then_only_what_changed(url: str, tmp_path: Path) -> None:
    def pipeline(**changes: Any) -> PipelineJob:
        values = {
            "out": str(tmp_path),
            "data": url,
            "splits": {
                "train": {"periods": "p1..p2", "labelled_fraction": 0.5},
                "validation": {"periods": "p3"},
                "test": {"periods": "p4"},
            },
            "methods": {
                **{name: METHODS[name] for name in ("trees", "tuned")},
                "ensemble": {"kind": "ensemble", "of": "tuned", "runs": 2},
                "student": method("tuned", **changes),
                "students-trees": method("tuned", student_as="trees", student=REGRESSION),
                "stack": {"kind": "stack", "members": ["student"], "stack": {"folds": 2, "gbdt": TREES}},
            },
            "evaluate": {"resamples": 100, "baseline": None},
        }  # fmt: skip
        return configs.validate(PipelineJob, values, "pipeline")

    def parts(folder: str, *names: str) -> list[str]:
        return [f"{folder}/{name}" for name in names]

    written = written_directories(pipeline())
    of_folds = [
        part
        for k in (0, 1)
        for part in parts(
            f"seed-0/folds/{k}-of-2",
            *("tuned/model", "runs/1/tuned/model", "student/scores", "student/student", "student/model"),
        )
    ]
    assert written == [
        *parts("seed-0", "trees/model", "tuned/pretrained", "tuned/model", "runs/1/tuned/model", "ensemble/model"),
        *parts("seed-0/student", "scores", "student", "model"),
        *parts("seed-0/students-trees", "scores", "student", "model"),
        *of_folds,
        "seed-0/stack/model",
        "evaluation",
    ]
    assert written_directories(pipeline()) == []
    student = {**LEARN, "optimizer": {"learning_rate": 2e-2}}
    changed = written_directories(pipeline(student=student))
    learnt = [part for part in (*written[5:8], *of_folds) if part.endswith(("student/student", "student/model"))]
    assert changed == [*learnt, "seed-0/stack/model", "evaluation"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"of": "nobody"}, r"methods.new.of: 'nobody' is unknown; name another method"),
        ({"of": "new"}, r"methods.new.of: 'new' is of kind self_trained; name another method"),
        ({"of": "same"}, r"methods.new.runs: these trees draw nothing at random, .*; lower feature_fraction or"),
        ({"of": "both"}, r"student of kind network is trained as 'both', which is not a neural method; name one as"),
        ({"student_as": "trees"}, r"student of kind network is trained as 'trees', which is not a neural method"),
        ({"student": REGRESSION}, r"of kind regression is trained as 'scratch', which is not a method of LightGBM's"),
        ({"student_as": "mean", "student": REGRESSION}, r"is not a method of LightGBM's trees without an ensemble"),
        ({"student_as": "xgboost", "student": REGRESSION}, r"is trained as 'xgboost', which is not a method of LightG"),
    ],
)
def test_methods_that_cannot_teach_or_learn_are_named(changes: dict[str, Any], message: str) -> None:
    others = {
        "same": {"kind": "gbdt"},
        "mean": {**METHODS["trees"], "ensemble": {}},
        "xgboost": {"kind": "gbdt", "gbdt": {"kind": "xgboost"}},
    }
    with pytest.raises(InputError, match=message):
        methods_of(**others, new=method("scratch", **changes))


@pytest.mark.slow
def test_a_method_that_learns_elsewhere_teaches_there(url: str, tmp_path: Path) -> None:
    """The groups that are scored, and the labels that come last, are those of its entry in learn_from."""
    values = methods_of(new={**method("trees"), "runs": 1}).model_dump()
    new, trees = values["methods"]["new"], {**METHODS["trees"], "learns_from": "earlier"}
    train = {"data": url, "periods": "p1", "labelled_groups": 20}
    values |= {
        "out": str(tmp_path),
        "data": url,
        "splits": {name: {"periods": period} for name, period in {"train": "p2", "validation": "p3"}.items()},
        "learn_from": {"earlier": {"splits": {"train": train, "validation": {"data": url, "periods": "p3"}}}},
        "methods": {"trees": trees, "new": new},
    }
    configs.validate(PipelineJob, values, "test").run()
    folder = tmp_path / "seed-0" / "new"
    assert scored_periods(str(folder / "scores")) == ["p1"]
    assert bundle.load(str(folder / "student")).metrics["labelled_groups"] == 60
    assert bundle.load(str(folder / "model")).metrics["labelled_groups"] == 20


def test_scores_are_of_one_data_set(write_dataset: WriteDataset, url: str, tmp_path: Path) -> None:
    second = write_dataset({"p5": made(10, 9)}, FEATURES)
    both = seed_run(url, tmp_path, method("trees"), data=[url, second], periods=["p1", "p5"])
    with pytest.raises(InputError, match=r"new learns scores of one data set, train has .*; name one"):
        both.model("new")
    assert not (tmp_path / "trees").exists()
