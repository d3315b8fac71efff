"""Model files of trees: files that could hang or crash a library are refused first; real files pass."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pytest
import torch
import xgboost
from hypothesis import given, settings
from hypothesis import strategies as st

from ltrscale.batch import QueryGroups
from ltrscale.bundle import boosters, views
from ltrscale.data.dataset.manifest import Feature
from ltrscale.errors import InputError

VIEW = views.raw([Feature(name="a"), Feature(name="b"), Feature(name="c", kind="categorical")])
CODES = [list(range(0, 400, 10))]


def matrix() -> np.ndarray[Any, np.dtype[np.float64]]:
    rng = np.random.default_rng(0)
    x_NF = rng.normal(size=(400, 3))
    x_NF[:, 2] = rng.integers(0, 40, 400)
    x_NF[::7, 0] = np.nan
    return x_NF


def targets() -> np.ndarray[Any, np.dtype[np.float64]]:
    x_NF = matrix()
    return np.asarray(3 * (x_NF[:, 2] % 3 == 1) + np.nan_to_num(x_NF[:, 0]))


def in_lightgbm() -> bytes:
    parameters = {"verbosity": -1, "num_threads": 1, "num_leaves": 5, "min_data_in_leaf": 5, "min_data_per_group": 5}
    data = lightgbm.Dataset(matrix(), targets(), categorical_feature=[2])
    booster = lightgbm.train(parameters, data, 3)
    booster.pandas_categorical = CODES
    return str(booster.model_to_string()).encode()


def in_xgboost() -> bytes:
    data = xgboost.DMatrix(matrix(), targets(), feature_types=["q", "q", "c"], enable_categorical=True)
    booster = xgboost.train({"max_depth": 3, "nthread": 1, "tree_method": "hist"}, data, 3)
    booster.set_attr(codes=json.dumps(CODES))
    return bytes(booster.save_raw("json"))


LIGHTGBM, XGBOOST = in_lightgbm(), in_xgboost()


def scores(library: boosters.Library, model: bytes) -> torch.Tensor:
    x_NF = torch.tensor(matrix()[:60], dtype=torch.float32)
    x_NF[:, 2] = 10 * x_NF[:, 2]
    return boosters.scorer(library, {"model": model}, VIEW, threads=1)(QueryGroups(x_NF, torch.tensor([0, 60])))


def replace(key: str, value: str, tree: int = 1) -> bytes:
    """The LightGBM text with a line of a tree replaced and the tree's stated size corrected."""
    head, *trees = re.split(r"^Tree=", LIGHTGBM.decode(), flags=re.MULTILINE)
    found = re.sub(rf"^{key}=.*$", f"{key}={value}", trees[tree], count=1, flags=re.MULTILINE)
    assert found != trees[tree]
    trees[tree] = found
    sizes = " ".join(str(len("Tree=" + text.partition("end of trees")[0])) for text in trees)
    return "Tree=".join([re.sub("tree_sizes=.*", f"tree_sizes={sizes}", head), *trees]).encode()


def line(key: str, tree: int = 1) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", LIGHTGBM.decode(), flags=re.MULTILINE)[tree].split(" ")


def changed(key: str, index: int, value: str) -> str:
    values = line(key)
    values[index] = value
    return " ".join(values)


def test_models_as_they_are_trained_pass_and_have_categories() -> None:
    assert b"cat_threshold" in LIGHTGBM
    assert any(tree["categories"] for tree in trees_of(json.loads(XGBOOST)))
    assert scores("lightgbm", LIGHTGBM).isfinite().all()
    assert scores("xgboost", XGBOOST).isfinite().all()


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("left_child", lambda: changed("left_child", 0, "0"), "a node is reached twice"),
        ("right_child", lambda: changed("right_child", 0, "0"), "a node is reached twice"),
        ("left_child", lambda: changed("left_child", 0, "-9"), "left_child are out of range"),
        ("right_child", lambda: changed("right_child", 0, "4"), "right_child are out of range"),
        ("right_child", lambda: changed("right_child", 0, "-1"), "a node is reached twice"),
        ("num_leaves", lambda: "1000000000", "leaf_value are 5, not 1000000000"),
        ("num_leaves", lambda: "6", "leaf_value are 5, not 6"),
        ("num_leaves", lambda: "0", "num_leaves are out of range"),
        ("split_feature", lambda: changed("split_feature", 1, "3"), "split_feature are out of range"),
        ("threshold", lambda: changed("threshold", 1, "nan"), "threshold are no numbers"),
        ("leaf_value", lambda: changed("leaf_value", 1, "1e999"), "leaf_value are not finite"),
        ("leaf_value", lambda: changed("leaf_value", 1, "inf"), "leaf_value are not finite"),
        ("leaf_value", lambda: " ".join(line("leaf_value")[1:]), "leaf_value are 4, not 5"),
        ("decision_type", lambda: changed("decision_type", 1, "16"), "decision_type are out of range"),
        ("num_cat", lambda: "0", "threshold names no set"),
        ("num_cat", lambda: "100000", "cat_boundaries are"),
        ("cat_boundaries", lambda: changed("cat_boundaries", -1, "1000000"), "cat_threshold are"),
        ("cat_boundaries", lambda: changed("cat_boundaries", 0, "1"), "cat_boundaries do not rise from 0"),
        ("is_linear", lambda: "1", "is_linear are out of range"),
    ],
)
def test_a_damaged_tree_of_lightgbm_is_refused(key: str, value: Callable[[], str], reason: str) -> None:
    with pytest.raises(InputError, match=rf"model: no model of these features \(tree 1: ({reason})"):
        scores("lightgbm", replace(key, value()))


@pytest.mark.parametrize(
    ("text", "other", "reason"),
    [
        (rb"tree_sizes=\d+", b"tree_sizes=99999999", "tree_sizes are not"),
        (rb"tree_sizes=\d+", b"tree_sizes=1", "tree_sizes are not"),
        (rb"max_feature_idx=2", b"max_feature_idx=3", "max_feature_idx is 3, not 2"),
        (rb"num_class=1", b"num_class=1000000000", "num_class is 1000000000, not 1"),
        (rb"end of trees", b"", "does not begin and end"),
        (rb"end of parameters", b"", "does not begin and end"),
        (rb"\[max_bin: 255\]", b"[max_bin: 25\x005]", "control character"),
        (rb"Column_0 ", b"", "feature_names are not 3"),
        (rb"pandas_categorical:.*", b"pandas_categorical:[[3, 1]]", "no rising integers"),
        (rb"pandas_categorical:.*", b"pandas_categorical:[[1e99]]", "no rising integers"),
        (rb"pandas_categorical:.*", b"pandas_categorical:null", "zip"),
        (rb"pandas_categorical:.*", b"pandas_categorical:" + b"[" * 100_000, "recursion"),
    ],
)
def test_a_damaged_model_of_lightgbm_is_refused(text: bytes, other: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=rf"model: no model of these features \(.*{reason}"):
        scores("lightgbm", re.sub(text, other, LIGHTGBM, count=1))


def trees_of(model: Any) -> Any:
    return model["learner"]["gradient_booster"]["model"]["trees"]


def put(*where: Any, value: Any) -> Callable[[Any], None]:
    """Sets an entry of the second tree."""

    def change(model: Any) -> None:
        here = trees_of(model)[1]
        for key in where[:-1]:
            here = here[key]
        here[where[-1]] = value

    return change


def put_above(*where: Any, value: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        here = model["learner"]
        for key in where[:-1]:
            here = here[key]
        here[where[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put("left_children", 1, value=0), "tree 1: a node is reached twice"),
        (put("left_children", 0, value=2), "tree 1: a node is reached twice"),
        (put("left_children", 1, value=-1), "tree 1: a node has one child"),
        (put("right_children", 0, value=15), "tree 1: right_children are out of range"),
        (put("right_children", 0, value=-2), "tree 1: right_children are out of range"),
        (put("parents", 1, value=5), "tree 1: parents are not"),
        (put("split_indices", 0, value=3), "tree 1: split_indices are out of range"),
        (put("split_indices", 0, value=True), "tree 1: split_indices are no numbers"),
        (put("split_conditions", -1, value=float("nan")), "tree 1: split_conditions are not finite"),
        (put("split_conditions", -1, value=float("inf")), "tree 1: split_conditions are not finite"),
        (put("sum_hessian", value=[]), "tree 1: sum_hessian are 0, not 15"),
        (put("tree_param", "num_nodes", value="1000000000"), "tree 1: left_children are 15, not 1000000000"),
        (put("tree_param", "num_deleted", value="2"), "tree 1: nodes are not reached"),
        (put("id", value=7), "tree 1: it is not in its place"),
        (put("categories", 0, value=-1), "tree 1: categories are out of range"),
        (put("categories", 0, value=1 << 31), "tree 1: categories are out of range"),
        (put("categories_segments", 0, value=1), "tree 1: categories are not those"),
        (put("categories_nodes", 0, value=1), "tree 1: categories are not those"),
        (put_above("learner_model_param", "num_feature", value="4"), "num_feature is 4, not 3"),
        (put_above("learner_model_param", "base_score", value="[nan]"), "base_score is no number"),
        (put_above("gradient_booster", "name", value="gblinear"), "its booster is not gbtree"),
        (put_above("gradient_booster", "model", "gbtree_model_param", "num_trees", value="9"), "num_trees is not"),
        (put_above("gradient_booster", "model", "iteration_indptr", 1, value=9), "iteration_indptr are out of range"),
        (put_above("gradient_booster", "model", "tree_info", 1, value=9), "tree_info are out of range"),
        (put_above("attributes", "codes", value="[[3, 1]]"), "no rising integers"),
        (put_above("attributes", value={}), "JSON object must be str"),
    ],
)
def test_a_damaged_model_of_xgboost_is_refused(change: Callable[[Any], None], reason: str) -> None:
    model = json.loads(XGBOOST)
    change(model)
    with pytest.raises(InputError, match=rf"model: no model of these features \(.*{reason}"):
        scores("xgboost", json.dumps(model).encode())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (b"{L", "Expecting property name"),
        (b'{"learner":' * 100_000, "its JSON is too deep"),
        (b'{"learner": {}, "learner": {}}', "a key stands there twice"),
        (b"[]", "learner is missing"),
        (b"", "Expecting value"),
    ],
)
def test_what_is_no_json_of_xgboost_is_refused(model: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=rf"model: no model of these features \(.*{reason}"):
        scores("xgboost", model)


def chain(nodes: int) -> list[Sequence[int]]:
    return [[*range(1, nodes + 1), *[-1] * (nodes + 1)], [*range(nodes + 1, 2 * nodes + 1), *[-1] * (nodes + 1)]]


def test_a_tree_may_be_deep_but_not_so_deep_that_libraries_run_out_of_stack() -> None:
    def model(depth: int) -> bytes:
        left, right = chain(depth)
        n = len(left)
        parents = [2147483647] * n
        for i in range(depth):
            parents[left[i]] = parents[right[i]] = i
        document = json.loads(XGBOOST)
        flat = {key: [0] * n for key in ("split_indices", "split_type", "default_left")}
        floats = {key: [0.5] * n for key in ("base_weights", "loss_changes", "sum_hessian", "split_conditions")}
        none: dict[str, list[int]] = {
            key: [] for key in ("categories", "categories_nodes", "categories_segments", "categories_sizes")
        }
        counts = trees_of(document)[0]["tree_param"] | {"num_nodes": str(n)}
        trees_of(document)[0] |= {
            **flat, **floats, **none, "left_children": left, "right_children": right, "parents": parents,
            "tree_param": counts,
        }  # fmt: skip
        return json.dumps(document).encode()

    assert scores("xgboost", model(2000)).isfinite().all()
    with pytest.raises(InputError, match="tree 0: it is deeper than 10000 nodes"):
        scores("xgboost", model(10_001))


NUMBER = re.compile(rb"-?[0-9][-+.0-9eE]*")
VALUES = [b"0", b"1", b"-1", b"3", b"-5", b"2147483647", b"-2147483648", b"4294967296", b"1e308", b"nan", b"inf", b""]


@st.composite
def mutated(draw: st.DrawFn, model: bytes) -> bytes:
    """The model after one or more mutations: a number replaced, a byte changed, a piece cut out or doubled."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(model) - 1)))
        size = draw(st.integers(1, 40))
        number = NUMBER.search(model, at)
        match draw(st.integers(0, 5)):
            case 0:
                model = model[:at] + bytes([draw(st.integers(0, 255))]) + model[at + 1 :]
            case 1:
                model = model[:at] + model[at + size :]
            case 2:
                model = model[:at] + model[at : at + size] + model[at:]
            case _ if number:
                model = model[: number.start()] + draw(st.sampled_from(VALUES)) + model[number.end() :]
    return model


@pytest.mark.slow
@settings(derandomize=True)
@given(mutated(LIGHTGBM))
def test_a_mutated_text_of_lightgbm_scores_or_is_refused(model: bytes) -> None:
    _scores_or_is_refused("lightgbm", model)


@settings(derandomize=True)
@given(mutated(XGBOOST))
def test_a_mutated_json_of_xgboost_scores_or_is_refused(model: bytes) -> None:
    _scores_or_is_refused("xgboost", model)


def _scores_or_is_refused(library: boosters.Library, model: bytes) -> None:
    try:
        found_N = scores(library, model)
    except InputError:
        return
    assert found_N.shape == (60,)


SLOW = """
import sys, time, torch
import test_treefiles as t
from ltrscale.bundle import boosters
from ltrscale.batch import QueryGroups
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
x_NF = torch.zeros(10_000_000, 3)
view = t.views.raw([t.Feature(name=name) for name in "abc"])
scorer = boosters.scorer("lightgbm", {"m": t.many_trees(3000)}, view, threads=1)
print("scoring", flush=True)
scorer(QueryGroups(x_NF, torch.tensor([0, len(x_NF)])))
print("done", flush=True)
"""


def many_trees(n: int) -> bytes:
    """A LightGBM text with many copies of one tree."""
    head, tree, *_ = re.split(r"^Tree=", LIGHTGBM.decode(), flags=re.MULTILINE)
    body = tree.partition("\n")[2]
    trees = [f"Tree={i}\n{body}" for i in range(n)]
    sizes = " ".join(str(len(tree)) for tree in trees)
    rest = (
        LIGHTGBM.decode().partition("end of trees")[2].partition("pandas_categorical")[0] + "pandas_categorical:null\n"
    )
    return (re.sub("tree_sizes=.*", f"tree_sizes={sizes}", head) + "".join(trees) + "end of trees" + rest).encode()


def used(pid: int) -> int:
    """The processor time of a process, in clock ticks."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


@pytest.mark.slow
def test_sigterm_ends_a_process_that_is_inside_a_long_prediction() -> None:
    command = [sys.executable, "-c", SLOW]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"scoring\n"
        ticks = used(process.pid)
        while used(process.pid) < ticks + 0.5 * os.sysconf("SC_CLK_TCK"):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(60) == 143, "minutes before the prediction ends"
        finally:
            process.kill()
