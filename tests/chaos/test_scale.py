"""The chain of any size: a killed command is given again, and what is done is not done twice."""

import json
from pathlib import Path

import pytest
from preparing import prepare

from ltrscale.config import load
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.simulate.portal import PortalLog, PortalLogConfig
from tests.chaos.scale import CONFIGS, STAGES, Places, ScaleJob, account_of, run


@pytest.mark.nightly
@pytest.mark.ray
def test_a_stage_is_killed_once_and_its_account_adds_up(tmp_path: Path) -> None:
    root, out = tmp_path / "root", tmp_path / "out"
    job = ScaleJob(out=str(out), root=str(root), lists=7000, stages=("day",))
    run(job)
    outcome = json.loads((out / "day.json").read_text())
    assert len(outcome["kills"]) == 1
    assert (out / "day.log").read_text().count("$ ") == 1 + outcome["kills"][0].startswith("driver")
    assert account_of(str(root / "day"))["lists"] == 100
    assert outcome["account"].startswith("100 lists, ")
    assert outcome["memory"]["resident"]["driver"] > 50
    assert "| day |" in (out / "scale.md").read_text()
    before = (out / "day.json").stat().st_mtime_ns
    run(job)
    assert (out / "day.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_rows_that_are_lost_on_the_way_do_not_add_up(tmp_path: Path) -> None:
    PortalLog(out=f"{tmp_path}/log", log=PortalLogConfig(days=1, lists=2000)).run()
    account = next(stage for stage in STAGES if stage.name == "prepare").account
    columns = load(PrepareJob, str(CONFIGS / "prepare-scale.yaml")).prepare

    def prepared(hours: str) -> Places:
        prepare(columns.replace(inputs=[{"path": f"{tmp_path}/log/*/{hours}/*.parquet"}]), f"{tmp_path}/data")
        return Places(str(tmp_path), 2000)

    assert account(prepared("hour=*")).startswith("2,000 lists in = ")
    with pytest.raises(AssertionError):
        account(prepared("hour=*[!7]"))
