"""A position is no feature: refused by name, and found under other names by a look at every pair of every list."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltrscale.data.dataset.manifest import Feature
from ltrscale.ingest.assembly import LikePlaces
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.mapping import ColumnMapping, ListColumns
from ltrscale.ingest.prepare import prepare

FEATURES = [Feature(name=name) for name in ("row", "score", "price", "all_but_one")]


def log(lists: int = 30) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    parts = []
    for q in range(lists):
        place = rng.permutation(6) + 1
        parts.append(
            pd.DataFrame(
                {
                    "q": f"q{q}",
                    "place": place,
                    "row": place - 1,
                    "score": 3 / place + 0.01 * rng.random(),
                    "price": rng.random(6),
                    "all_but_one": np.where((q == 7) & (place == 3), 0, place),
                    "y": rng.integers(0, 2, 6),
                }
            )
        )
    return pd.concat(parts)


def prepared(frame: pd.DataFrame, folder: Path, **settings: Any) -> None:
    folder.mkdir()
    frame.to_parquet(folder / "log.parquet")
    columns = {"query": "q", "label": "y", "positions": "place", "features": [f.name for f in FEATURES]}
    source = {"kind": "items", "columns": columns}
    values = {"inputs": str(folder / "log.parquet"), "source": source, **settings}
    prepare(PrepareConfig.model_validate(values), str(folder / "data"))


def test_prepare_warns_of_places_under_other_names_and_of_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="ltrscale"):
        prepared(log(), tmp_path / "whole")
        prepared(log(), tmp_path / "pieces", unit_mb=1e-4)
        prepared(log().assign(place=None), tmp_path / "none")
        prepared(log(1), tmp_path / "few")  # 5 pairs may agree by chance
    lines = [record.message for record in caplog.records if "positions" in record.message]
    assert len(lines) == 2
    for line in lines:
        assert "features row, score order every list as its positions do" in line
        assert "leave it out" in line


rows = st.tuples(st.integers(1, 9), st.integers(0, 30), st.booleans())
places = st.lists(st.lists(rows, min_size=3, max_size=9, unique_by=lambda row: row[0]), min_size=8, max_size=12)


@given(places, st.booleans(), st.booleans())
def test_a_feature_is_found_where_every_pair_of_every_list_agrees(
    drawn: list[list[tuple[int, int, bool]]], ordered: bool, falls: bool
) -> None:
    """Against all pairs; parts that are merged find the same."""
    step = -7 if falls else 7
    lists = [[(p, step * p if ordered else x, there) for p, x, there in own] for own in drawn]
    shown = [[row for row in own if row[2]] for own in lists]
    pairs = [pair for own in shown for pair in combinations(own, 2)]
    signs = {np.sign((other[0] - one[0]) * (other[1] - one[1])) for one, other in pairs}
    parts = LikePlaces(1)
    for own in lists:
        parts.merge(look([own]))
    found = look(lists).among(FEATURES[:1])
    assert parts.among(FEATURES[:1]) == found
    enough = sum(max(len(own) - 1, 0) for own in shown) >= 20
    assert bool(found) == (enough and signs in ({1}, {-1}))


def look(lists: list[list[tuple[int, int, bool]]]) -> LikePlaces:
    flat = [row for own in lists for row in own]
    found = LikePlaces(1)
    found.add(
        np.array([row[1] for row in flat], np.float32).reshape(-1, 1),
        pa.array([row[0] if row[2] else None for row in flat], pa.float32()),
        np.concatenate([[0], np.cumsum([len(own) for own in lists])]).astype(np.int64),
    )
    return found


@pytest.mark.parametrize("use", ["positions", "clicks", "gain"])
def test_what_is_known_only_later_is_refused_as_a_feature(use: str) -> None:
    for features in ({"features": ["f", "later"]}, {"features": ["f"], "categorical": ["later"]}):
        with pytest.raises(ValueError, match=rf"'later' is the .* of a document \({use}\) and cannot be a feature too"):
            ColumnMapping.model_validate({"query": "q", use: "later", **features})
        with pytest.raises(ValueError, match=rf"'later' is the .* of a document \({use}\) and cannot be a feature too"):
            ListColumns.model_validate({use: "later", **features})
    ColumnMapping.model_validate({"query": "q", use: "later", "features": ["*"]})
