"""Pretraining finds the features that name a document, masks them, and warns where the contrast is solved."""

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import named_documents
import pytest
from small_trainers import pretrain

from ltrscale import bundle
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.plan import spread
from ltrscale.errors import InputError
from ltrscale.training.pretrain import PretrainConfig


@pytest.fixture
def data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> str:
    caplog.set_level(logging.INFO, "ltrscale")
    return named_documents.make(tmp_path)


def run(config: PretrainConfig, data: str, out: Path) -> list[dict[str, Any]]:
    """The records of the epochs."""
    records: list[dict[str, Any]] = []
    pretrain(config, Split(data=(data,)), str(out), origin={}, report=lambda r: records.append(dict(r)))
    return [record for record in records if "epoch" in record]


@pytest.mark.slow
def test_preparation_and_pretraining_name_what_identifies_a_document(
    data: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [record.getMessage() for record in caplog.get_records("setup")]
    prepared, suspect = [m for m in messages if "unique within its query" in m]
    assert "query: c_id for 100% of the documents; pretraining hides these categories by itself" in prepared
    assert "query: f_place for 100% of the documents; exclude what is an id" in suspect
    manifest = open_dataset(data).manifest
    shares = {f.name: s.unique_in_group for f, s in zip(manifest.features, manifest.summaries, strict=True)}
    assert manifest.grouped == manifest.counts().documents
    assert (shares["f_age"], shares["f_place"], shares["c_id"]) == (None, 1, 1)
    assert 0 < (shares["c_os"] or 0) < 0.3
    run(named_documents.config(epochs=1, columns={}), data, tmp_path / "out")
    (found,) = [m for m in caplog.messages if "pretraining: c_id" in m]
    assert "for 100% of the documents" in found
    assert "the views hide it at a rate of 0.8, so nothing needs doing" in found
    (number,) = [m for m in caplog.messages if "pretraining: f_place is a whole number" in m]
    assert "pretrain.mask.columns={f_place: 1}" in number
    caplog.clear()
    run(named_documents.config(epochs=1, columns={"f_place": 0}), data, tmp_path / "answered")
    assert not [m for m in caplog.messages if "f_place" in m]
    assert bundle.load(str(tmp_path / "out")).config["mask"] == {
        "numbers": 0,
        "categories": 0,
        "columns": {"c_id": 0.8},
        "identifying": 0,
    }


@pytest.mark.nightly
def test_an_unmasked_id_solves_the_contrast_with_one_warning_and_a_masked_one_does_not(
    data: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    solved = run(named_documents.config(epochs=70, identifying=0), data, tmp_path / "solved")
    (warning,) = [m for m in caplog.messages if "the contrast is solved" in m]
    assert "jobs.explain" in warning
    assert "stop a long one" in warning
    assert [m for m in caplog.messages if "c_id is unique" in m and "set pretrain.mask.identifying=0.8 to hide it" in m]
    caplog.clear()
    sound = run(named_documents.config(), data, tmp_path / "sound")
    assert not [m for m in caplog.messages if "the contrast is solved" in m]
    assert solved[-1]["accuracy"] > 0.9
    assert solved[-1]["loss_left"] < 0.25 < sound[-1]["loss_left"]


@pytest.mark.slow
def test_a_solved_contrast_between_subsets_is_warned_of_too(
    data: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subtab = {"kind": "subtab", "within_groups": True, "subsets": 2, "overlap": 0.75, "rate": 0}

    def warnings(**mask: float) -> list[str]:
        caplog.clear()
        config = named_documents.config(epochs=25, columns={"f_*": 1}, **mask).replace(method=subtab)
        assert run(config, data, tmp_path / str(mask))[-1]["loss_left"] is None
        return [message for message in caplog.messages if "the contrast is solved" in message]

    (warning,) = warnings(identifying=0)
    assert "pretrain.method.overlap" in warning
    assert "jobs.explain" not in warning  # which does not examine SubTab
    assert warnings() == []


@pytest.mark.slow
def test_only_the_mask_that_acts_changes_the_weights(data: str, tmp_path: Path) -> None:
    masks: dict[str, dict[str, Any]] = {
        "none": {"identifying": 0},
        "zero": {"identifying": 0, "columns": {"f_place": 1, "c_os": 0.0}},
        "named": {"identifying": 0, "columns": {"f_place": 1, "c_id": 0.8}},
        "found": {},
    }
    for name, mask in masks.items():
        run(named_documents.config(epochs=1, **mask), data, tmp_path / name)
    of = {name: bundle.load(str(tmp_path / name)).content for name in masks}
    assert of["none"] == of["zero"] != of["named"] == of["found"]


def test_an_unknown_feature_is_refused_before_training(data: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"pretrain\.mask\.columns: .*'c_ids'; the nearest is 'c_id'"):
        run(named_documents.config(columns={"c_ids": 0.5}), data, tmp_path / "out")


def test_a_sample_has_whole_row_groups_at_equal_distances(data: str) -> None:
    whole = select(Split(data=(data,)), labelled=False)
    assert len(whole.row_groups) >= 60
    assert spread(whole, documents=10**9).row_groups == whole.row_groups
    half = spread(whole, documents=whole.n_documents // 2)
    places = [whole.row_groups.index(row_group) for row_group in half.row_groups]
    assert {b - a for a, b in pairwise(places)} <= {1, 2}
    assert abs(half.n_documents - whole.n_documents / 2) < 0.1 * whole.n_documents
    assert len(spread(whole, documents=1).row_groups) == 1
