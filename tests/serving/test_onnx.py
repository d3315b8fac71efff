"""ONNX graphs give the scores of the network in onnxruntime, for one list at a time where the list matters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported_models import last_rows, network, other_weight, saved, score_alone
from nightly import nightly

from ltrscale.batch import QueryGroups
from ltrscale.bundle import load
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.models.ranker import combine_rankers
from ltrscale.serving import onnx, parity
from ltrscale.serving.export import FORMATS, ExportJob
from ltrscale.serving.format import Observed
from ltrscale.serving.parity import check_parity

pytest.importorskip("onnxruntime", reason="the extra `serve` is not installed")
pytest.importorskip("onnxscript", reason="the extra `serve` is not installed")
SMALL = {"kind": "mlp", "hidden": [8]}
FEATURE = {"initial_rank": "feature", "feature": 0}
NETWORKS: dict[str, dict[str, Any]] = {
    "quantiles": {"encoder": {"kind": "deepfm", "hidden": [8]}, "transform": {"numeric": "quantile_normal"}},
    "discrete": {"encoder": {"kind": "resnet", "width": 8}, "transform": {"discrete_up_to": 40}},
    "hashed": {"encoder": SMALL, "transform": {"max_vocabulary": 3, "hash_rows": 7}},
    "dcnv2": {"encoder": {"kind": "dcnv2"}},
    "tabm": {"encoder": {"kind": "tabm", "hidden": [64], "members": 2}, "numbers": {"kind": "ple", "bins": 5}},
    "lists": {"encoder": SMALL, "numbers": {"kind": "plr", "frequencies": 3, "within_lists": True}},
    "rankformer": {"encoder": SMALL, "context": {"kind": "rankformer", "layers": 1, "feedforward": 8}},
    "dasalc": {"encoder": SMALL, "context": {"kind": "dasalc", "width": 8, "layers": 1}},
    "setrank": {
        "encoder": SMALL,
        "transform": {"per_query": True},
        "context": {"kind": "setrank", "width": 8, "heads": 2, "blocks": 1, **FEATURE},
    },
    "dlcm": {"encoder": SMALL, "context": {"kind": "dlcm", "state": 8, **FEATURE}},
    "several": {
        "encoder": {"kind": "tabm", "hidden": [64], "members": 2},
        "numbers": {"kind": "ple", "bins": 5, "within_lists": True},
        "transform": {"discrete_up_to": 40, "max_vocabulary": 3, "hash_rows": 7},
    },
}


def last(data: str) -> Split:
    return Split(data=(data,), periods=("2026-W04",))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n == "several" else nightly(n) for n in NETWORKS])
def test_the_graph_gives_the_networks_scores(name: str, synthetic_dataset: str, tmp_path: Path) -> None:
    bundle = load(saved(tmp_path / "net", synthetic_dataset, network(synthetic_dataset, **NETWORKS[name])))
    files, found = check_parity(FORMATS["onnx"], bundle, last(synthetic_dataset), rows=600)
    assert found.missing > 100 < 10 * found.unseen
    assert found.largest_score > 0.1
    assert found.largest_difference < 1e-5 * max(1, found.largest_score)
    assert b"/site-packages/" not in files["model.onnx"]  # the exporter would name its own sources
    (tmp_path / "model.onnx").write_bytes(files["model.onnx"])
    alone_NF = np.float32([[0.5] * len(bundle.features)])  # a list of one document, which graphs like to fix
    groups = QueryGroups(torch.from_numpy(alone_NF), torch.tensor([0, 1]))
    theirs = FORMATS["onnx"].readers(tmp_path)[0](alone_NF)
    assert theirs == pytest.approx(bundle.scorer()(groups).numpy(), rel=1e-5, abs=1e-5)


@pytest.mark.nightly
def test_the_graph_of_several_networks_gives_their_mean(synthetic_dataset: str, tmp_path: Path) -> None:
    parts = [network(synthetic_dataset, seed, encoder={**SMALL, "batch_norm": True}) for seed in range(2)]
    model = combine_rankers(parts, how="mean", dropout=0.0).eval()
    bundle = load(saved(tmp_path / "net", synthetic_dataset, model))
    _, found = check_parity(FORMATS["onnx"], bundle, last(synthetic_dataset), rows=600)
    assert found.largest_difference < 1e-5 * max(1, found.largest_score)


@pytest.mark.nightly
def test_a_graph_with_another_weight_is_not_published_and_a_good_one_is_scored_alone(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = load(saved(tmp_path / "net", synthetic_dataset, network(synthetic_dataset, encoder=SMALL)))
    observed = Observed(open_dataset(synthetic_dataset).manifest.categories)
    files = parity.write_export(FORMATS["onnx"], bundle, observed)
    monkeypatch.setattr(parity, "write_export", lambda *_: files)  # an export takes seconds
    job = ExportJob(out=str(tmp_path / "out"), bundle=bundle.url, data=synthetic_dataset, to="onnx", rows=500)
    assert job.run()
    last_rows(synthetic_dataset, tmp_path / "rows.csv")
    ours_N = torch.cat([bundle.scorer()(b) for b in iterate(select(last(synthetic_dataset), labelled=False))])
    theirs_n = score_alone(tmp_path / "out", tmp_path / "rows.csv")
    np.testing.assert_allclose(theirs_n, ours_N[: len(theirs_n)], rtol=0, atol=1e-5)

    broken = {**files, "model.onnx": other_weight(files["model.onnx"])}
    monkeypatch.setattr(parity, "write_export", lambda *_: broken)
    with pytest.raises(InputError, match=r"onnx gives scores up to .* nothing is published"):
        job.replace(out=str(tmp_path / "other")).run()


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        ({"kind": "gsf"}, "its list context gsf chooses windows"),
        ({"kind": "dlcm"}, "ranks documents by the positions at which they were shown"),
    ],
)
def test_networks_without_a_graph_are_refused_in_one_line(
    context: dict[str, Any], reason: str, synthetic_dataset: str, tmp_path: Path
) -> None:
    model = network(synthetic_dataset, encoder=SMALL, context=context)
    bundle = load(saved(tmp_path / "net", synthetic_dataset, model))
    with pytest.raises(InputError, match=f"{reason}.*export a student that jobs.distill trains") as error:
        FORMATS["onnx"].write(bundle, Observed({}))
    assert "\n" not in str(error.value)


def translated(name: Any, values: torch.Tensor, *before: Any, **more: Any) -> np.ndarray:
    """An operation that the exporter does not know, computed by onnxruntime."""
    import onnxruntime

    class Call(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return name(*before, x, **more)

    program = torch.onnx.export(
        Call(), (values,), custom_translation_table=onnx._translations(), opset_version=18, verbose=False
    )
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    return session.run(None, {session.get_inputs()[0].name: values.numpy()})[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("call", "given"),
    [
        (torch.erfinv, lambda x: (x / 8).clamp(-1 + 2e-7, 1 - 2e-7)),
        (lambda x: torch.searchsorted(torch.tensor([-2.0, 0.0, 0.0, 1.5, 7.0]), x), lambda x: x),
        (lambda x: torch.searchsorted(torch.tensor([-2.0, 0.0, 0.0, 1.5, 7.0]), x, right=True), lambda x: x),
        (lambda x: x.argsort(stable=True), lambda x: x.round().masked_fill(x > 6, torch.nan)),
        (lambda x: x.abs().log1p().copysign(x), lambda x: x),
    ],
    ids=["erfinv", "searchsorted", "searchsorted right", "argsort", "copysign"],
)
def test_operations_that_the_exporter_lacks_are_those_of_torch(
    call: Callable[[torch.Tensor], torch.Tensor], given: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    special = torch.tensor([0.0, -2.0, 1.5, 7.0, -8.0, 8.0])
    x_N = given(torch.cat([special, torch.linspace(-7.99, 7.99, 1001)]))
    np.testing.assert_allclose(translated(call, x_N), call(x_N).numpy(), rtol=2e-6, atol=1e-6)
