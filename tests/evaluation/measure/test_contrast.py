"""What solves the contrast of a pretrained bundle: the feature that names the document comes first."""

from pathlib import Path
from typing import Any

import named_documents
import pytest
import torch
from small_trainers import pretrain

from ltrscale.batch import group_index
from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.explain import Contrast, ExplainJob, _shuffled

NAMES = {"f_age", "f_pop", "f_place", "c_id", "c_os"}


def bundle_of(folder: Path, data: str, method: str, *, epochs: int = 25) -> str:
    out = str(folder / f"pretrained-{method}")
    config = named_documents.config(method, epochs, identifying=0)
    pretrain(config, Split(data=(data,)), out, origin={}, report=lambda _: None)
    return out


def examine(data: str, bundle: str, out: Path, **settings: Any) -> Contrast:
    job = ExplainJob(out=str(out), data=data, bundle=bundle, queries=40, **settings)
    assert job.run()
    assert not job.run()  # up to date
    return Contrast.read(str(out))


@pytest.mark.slow
def test_the_feature_that_names_the_document_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = named_documents.make(tmp_path)
    found = examine(data, bundle_of(tmp_path, data, "simclr_rank"), tmp_path / "out")
    first, *others = found.features
    assert first.name == "c_id"
    assert found.accuracy is not None
    assert first.accuracy is not None
    assert first.accuracy < 0.5 < 0.9 < found.accuracy
    assert first.loss - found.loss > max(other.loss - found.loss for other in others)
    assert found.loss < 0.25 * found.uninformed
    assert {feature.name for feature in found.features} == NAMES
    masked = {feature.name: (feature.masked, feature.loss) for feature in found.features}["f_place"]
    assert masked == (1, pytest.approx(found.loss))  # both views hide it, so to permute it changes nothing
    assert 40 <= found.groups < 60
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"report.md", "metrics.json"}
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| c_id " in page
    assert "| c_id " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("method", ["simclr_sample", "simclr", "scarf", "dacl", "simsiam"])
def test_every_method_of_two_views_can_be_examined(method: str, tmp_path: Path) -> None:
    data = named_documents.make(tmp_path)
    found = examine(data, bundle_of(tmp_path, data, method, epochs=1), tmp_path / "out")
    assert {feature.name for feature in found.features} == NAMES
    assert found.loss > 0 < found.uninformed
    assert any(feature.loss != found.loss for feature in found.features)


@pytest.mark.slow
def test_what_cannot_be_examined_is_refused(tmp_path: Path) -> None:
    data = named_documents.make(tmp_path)
    url = bundle_of(tmp_path, data, "vime", epochs=1)
    with pytest.raises(InputError, match="pretrained with vime, which does not compare two views"):
        examine(data, url, tmp_path / "out")
    with pytest.raises(InputError, match="an encoder, which ranks nothing; leave out query, items and where"):
        examine(data, url, tmp_path / "out", where="n_documents > 2")


def test_a_shuffle_stays_inside_the_groups_and_is_random() -> None:
    offsets_Q1 = torch.tensor([0, 3, 3, 4, 104])
    order_N = _shuffled(offsets_Q1, torch.Generator().manual_seed(0))
    group_N = group_index(offsets_Q1)
    assert torch.equal(order_N.sort().values, torch.arange(104))
    assert torch.equal(group_N[order_N], group_N)
    assert (order_N == torch.arange(104)).sum() < 15
