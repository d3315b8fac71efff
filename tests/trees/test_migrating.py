"""The page for those who come from LightGBM or XGBoost lists every parameter that the installed library has."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightgbm as lgb
import numpy as np
import pytest
import xgboost as xgb

from ltrscale.trees.configs import LightGBMConfig, XGBoostConfig
from ltrscale.trees.library import TreesConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migrating.md").read_text()
STATE = {"name", "specified_updater", "updater_seq", "num_trees", "num_feature", "num_target", "boost_from_average"}
"""What XGBoost writes of a model beside its parameters."""


def rows(section: str) -> list[tuple[list[str], str]]:
    """The parameters of each row of a section's first table, and what stands beside them."""
    (text,) = re.findall(rf"^## {section}$(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", names), ours.strip()) for names, ours in lines]


def leaves(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, name)
    else:
        yield name


def lightgbm_keys() -> set[str]:
    return set(lgb.basic._ConfigAliases._get_all_param_aliases())


def xgboost_keys() -> set[str]:
    data = xgb.DMatrix(np.arange(8.0).reshape(4, 2), label=[0, 1, 0, 1])
    data.set_group([2, 2])
    booster = xgb.train({"objective": "rank:ndcg", "tree_method": "hist"}, data, 1)
    values = {**json.loads(booster.save_config()), "global": xgb.get_config()}
    del values["version"]
    return set(leaves(values)) - STATE


@pytest.mark.parametrize(
    ("section", "there", "config"),
    [("LightGBM", lightgbm_keys, LightGBMConfig), ("XGBoost", xgboost_keys, XGBoostConfig)],
)
def test_every_parameter_of_a_library_has_its_key_or_the_reason_why_not(
    section: str, there: Any, config: type[TreesConfig]
) -> None:
    listed = [name for names, _ in rows(section) for name in names]
    assert sorted(listed) == sorted(there())
    keys = set(config.model_fields)
    for names, ours in rows(section):
        if ours.startswith("the same names"):
            assert set(names) <= keys
        elif ours.startswith("`"):
            assert re.findall(r"`(\w+)`", ours)[0] in keys
        else:
            assert ours.startswith(("none: ", "the job's `start`", "columns of `prepare.source`"))
            assert keys.isdisjoint(names)
