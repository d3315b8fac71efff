"""Laws of every format of exports: it takes a model, its reader agrees with the bundle, its card names its files."""

from pathlib import Path
from typing import Any

import pytest
from exported_models import full, network, saved, trees

from ltrscale.data.dataset.manifest import Feature
from ltrscale.errors import InputError
from ltrscale.serving.export import FORMATS, ExportJob

DESCRIBED = {"README.md", "features.json", "manifest.json", "parity.json"}


@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS)
def test_a_format_takes_a_model_and_explains_its_files(
    to: str, write_dataset: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ltrscale.serving.parity._QUERIES", 50)
    data = write_dataset({f"2026-W0{week}": full(30, week) for week in range(1, 5)}, [Feature(name=n) for n in "abc"])
    models = [trees(tmp_path / kind, data, kind) for kind in ("lightgbm", "xgboost")]
    models.append(saved(tmp_path / "network", data, network(data, encoder={"kind": "mlp", "hidden": [8]})))
    reasons = [refused(ExportJob(out=f"{url}-export", bundle=url, data=data, to=to, rows=200)) for url in models]
    if lacking := next((reason for reason in reasons if reason and "is not installed" in reason), None):
        pytest.skip(lacking)
    assert all(f"{to} takes " in reason for reason in reasons if reason)
    taken = [Path(f"{url}-export") for url, reason in zip(models, reasons, strict=True) if not reason]
    assert taken
    for out in taken:
        card = (out / "README.md").read_text()
        assert card.startswith(f"# {FORMATS[to].title}\n")
        files = {path.name for path in out.iterdir() if path.is_file()} - DESCRIBED
        assert files
        assert not [name for name in files if name not in card]
        measuring = ExportJob(out=str(out), bundle=str(out).removesuffix("-export"), data=data, to=to, rows=200)
        with caplog.at_level("INFO", "ltrscale"):
            reason = refused(measuring.replace(measure=True))
        if FORMATS[to].in_process:
            assert "one query of 100 documents on one core, 50 times: features to scores p50" in caplog.text
        else:
            assert f"{to} scores in a program of its own" in str(reason)


def refused(job: ExportJob) -> str | None:
    """Why a bundle is not exported; None if it is."""
    try:
        job.run()
    except InputError as error:
        return str(error)
    return None
