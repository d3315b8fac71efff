"""The comparison of list pretraining: a hidden vector is restored from the list, and cells are made once."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import WriteDataset

from jobs.bench.restored_lists import Network, RestoredListsJob, compare, pretrain, restore
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.features import TransformConfig
from ltrscale.training.fitting import fit

FEATURES = [Feature(name=name) for name in ("score", "q_0", "q_1", "d_0", "d_1")]
QUERY, OTHERS = slice(1, 3), [0, 3, 4]


def lists(n: int, seed: int) -> list[tuple[np.ndarray, list[float]]]:
    """Lists of six that the score orders; the documents of a list have the same `q_*`, and `d_*` of their own."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(n):
        x_LF = rng.normal(size=(6, 5))
        x_LF[:, QUERY] = x_LF[0, QUERY]
        made.append((x_LF, (x_LF[:, 0] > 0.5).astype(float).tolist()))
    return made


@pytest.mark.nightly
def test_a_hidden_vector_is_restored_from_the_list_and_not_without_it(write_dataset: WriteDataset) -> None:
    everything = select(Split(data=write_dataset({"train": lists(400, 0)}, FEATURES)), labelled=False)
    transform = fit(everything, NetworkConfig(transform=TransformConfig(numeric="standard")))
    errors: dict[bool, torch.Tensor] = {}
    for with_list in (True, False):
        torch.manual_seed(0)
        net = Network(transform, lists=with_list)
        decoder, loss = restore(net, torch.tensor([0, 1, 1, 2, 2]), 0)
        pretrain(net, decoder, loss, everything, epochs=40)
        groups = next(iterate(everything))
        x_NF = transform(groups.features_NF)
        first_Q = groups.offsets_Q1[:-1]
        hidden_NF = x_NF.clone()
        hidden_NF[first_Q] = 0  # the first document of each list loses all
        with torch.no_grad():
            restored_NF = decoder(net.eval().embed(hidden_NF, groups))
        errors[with_list] = (restored_NF - x_NF)[first_Q].square().mean(0)
    assert errors[True][QUERY].max() < 0.3
    assert errors[True][OTHERS].min() > 0.7, "what only the document had cannot be known"
    assert errors[False].min() > 0.7


@pytest.mark.nightly
def test_cells_are_made_once_and_differences_stand_beside_what_they_are_of(
    tmp_path: Path, write_dataset: WriteDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_dataset({"train": lists(40, 0), "dev": lists(15, 1), "test": lists(20, 2)}, FEATURES)
    job = RestoredListsJob(out=str(tmp_path / "out"), data=data, labelled=(10, 20), draws=2, epochs=1)
    compare(job)
    first = capsys.readouterr().out
    files = {path.relative_to(job.out): path for path in Path(job.out).rglob("*.json")}
    assert len(files) == 2 * 2 * 5
    for path in files.values():
        values = np.array(json.loads(path.read_text())["ndcg"])
        assert len(values) <= 20
        assert values.mean() > 0.6
    rows = {line.split("|")[1].strip(): line for line in first.splitlines() if line.startswith("| ")}
    assert all(("[" in rows[name]) == (name in ("contrasted_values", "contrasted", "restored")) for name in rows)
    lost = Path(job.out) / "20" / "1" / "restored.json"
    before = json.loads(lost.read_text())
    lost.unlink()
    times = {path: path.stat().st_mtime_ns for path in files.values() if path != lost}
    compare(job)
    assert json.loads(lost.read_text()) == before, "a cell depends on its draw and labels alone"
    assert capsys.readouterr().out == first
    assert {path: path.stat().st_mtime_ns for path in times} == times
    with pytest.raises(InputError, match="made with other data, vectors, epochs"):
        compare(job.replace(epochs=2))
