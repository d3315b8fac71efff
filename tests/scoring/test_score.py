"""Scoring: the bundle's own scores, every period once whatever happens, and named errors."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scoring_actors
import torch
from dataset_changes import add_period
from nightly import nightly
from small_trainers import grow_trees
from writer_tokens import without_writer

from ltrscale import bundle, storage
from ltrscale.batch import QueryGroups, standardise_groups, to_offsets
from ltrscale.bundle import networks
from ltrscale.data.dataset.manifest import Feature, Manifest, open_dataset
from ltrscale.data.dataset.scores import period_url, read_period
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.dataset.writer import DatasetWriter
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError, UnavailableError
from ltrscale.models.encoders import ResNetConfig
from ltrscale.models.features import TransformConfig, fit_transform
from ltrscale.models.ranker import Architecture, HeadConfig, Ranker
from ltrscale.scoring import score as scoring
from ltrscale.scoring.score import ScoreJob
from ltrscale.stages.inputs import dataset_hashes
from ltrscale.stages.provenance import scored_by
from ltrscale.trees.configs import LightGBMConfig

FEATURES = tuple(Feature(name=name) for name in "abc")
PERIODS = ("p1", "p2", "p3", "p4")
Sizes = Mapping[str, tuple[int, int]]
"""Of each period its number of groups and the seed of its documents."""
SIZES: Sizes = {period: (20 + 5 * i, i) for i, period in enumerate(PERIODS)}


def write_data(url: str, sizes: Sizes = SIZES) -> str:
    """Write a data set whose periods have several files of several row groups; a third of the groups is unlabelled.

    The writer goes on behind 64 groups, and its row groups have one size: the files of a period depend on it alone.
    """
    gid, lists = 0, pa.list_(pa.float32())
    with storage.Commit(url) as commit:
        writer = DatasetWriter(commit, n_features=3, row_group_bytes=100, file_bytes=2500, before=(64, 0))
        for period, (groups, seed) in sizes.items():
            rng = np.random.default_rng(seed)
            for _ in range(groups):
                x_LF = rng.normal(size=(rng.integers(1, 9), 3)).astype(np.float32)
                labels_L = (x_LF[:, 0] > 0).astype(np.float32) if gid % 3 else None
                columns = {
                    "gid": pa.array([gid], pa.int64()),
                    "query_id": pa.array([f"q{gid}"]),
                    "features": pa.array([x_LF.ravel()], lists),
                    "labels": pa.array([labels_L], lists),
                }
                writer.add(period, pa.table(columns))
                gid += 1
        manifest = Manifest(features=FEATURES, files=writer.close())
        commit.finish(manifest.model_dump(mode="json"))
    return url


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = write_data(str(tmp_path_factory.mktemp("data") / "set"))
    score = open_dataset(url).manifest.files
    assert all(sum(file.period == period for file in score) > 1 for period in PERIODS)
    assert all(len(file.row_groups) > 1 for file in score)
    return url


def save_network(url: str, *, seed: int = 0, weight: float = 1.0, features: tuple[Feature, ...] = FEATURES) -> str:
    """Save a small network; a weight of NaN makes its scores NaN."""
    torch.manual_seed(seed)
    config = TransformConfig(numeric="none")
    transform = fit_transform([torch.randn(50, len(features))], ["numeric"] * len(features), config)
    architecture = Architecture(transform=config, encoder=ResNetConfig(width=8, blocks=1), head=HeadConfig())
    ranker = Ranker(architecture, transform)
    with torch.no_grad():
        next(iter(ranker.head.parameters())).mul_(weight)
    about = bundle.BundleFacts(config={}, features=features, dataset_hash="", metrics={}, made_by={"stage": "test"})
    bundle.save_ranker(url, ranker.eval(), about)
    return url


@pytest.fixture(scope="module")
def bundles(data: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bundles")
    splits = {
        name: {"data": data, "periods": period}
        for name, period in zip(("train", "validation", "test"), PERIODS[:3], strict=True)
    }
    trees = LightGBMConfig(num_trees=5, num_threads=1, min_data_in_leaf=5)
    grow_trees(trees, Splits.model_validate(splits), str(folder / "trees"))
    return {"trees": str(folder / "trees"), "network": save_network(str(folder / "network"))}


Settings = dict[str, Any]


def config(data: str, bundle: str | list[str], **settings: Any) -> Settings:
    return {"data": data, "bundle": bundle, "docs_per_batch": 50, **settings}


def job(settings: Settings, out: Path | str) -> ScoreJob:
    return ScoreJob.model_validate({**settings, "out": str(out)})


def run(settings: Settings, out: Path | str) -> list[str]:
    """Score; returns the committed periods, in order."""
    records: list[Mapping[str, Any]] = []
    job(settings, out).work({}, records.append)
    return [record["period"] for record in records if "period" in record]


def files_of(out: Path) -> dict[str, bytes]:
    """Every score file by its path below the directory."""
    return {without_writer(str(path.relative_to(out))): path.read_bytes() for path in sorted(out.rglob("*.parquet"))}


def expected(data: str, url: str) -> dict[int, list[float]]:
    """Slow: the scores of every group by gid, scored one group at a time."""
    scorer = bundle.load(url).scorer(threads=1)
    found = {}
    for groups in iterate(select(Split(data=(data,)), labelled=False), docs_per_batch=1):
        assert groups.ids_Q is not None
        assert groups.n_groups == 1
        found[int(groups.ids_Q[0])] = scorer(groups).tolist()
    return found


def read(data: str, out: str) -> dict[int, list[float]]:
    """The committed scores by gid; checks each file against the manifests and its rows against the data file."""
    found: dict[int, list[float]] = {}
    manifest = open_dataset(data).manifest
    for period in manifest.periods:
        there = read_period(out, period)
        assert there is not None
        score = manifest.files.by_period[period]
        assert there.is_of(score.sha256)
        counts = np.sum([row_group for file in score for row_group in file.row_groups], axis=0).tolist()
        assert [there.groups, there.documents] == counts[:2]
        for file, of_data in zip(there.files, score, strict=True):
            url = storage.join(period_url(out, period), file.path)
            with storage.open_input(url) as stream, storage.open_input(storage.join(data, of_data.path)) as other:
                ours, theirs = pq.ParquetFile(stream), pq.ParquetFile(other)
                for i, row_group in enumerate(of_data.row_groups):
                    table = ours.read_row_group(i)
                    assert len(table) == row_group.groups
                    assert table["gid"].equals(theirs.read_row_group(i)["gid"])
                    found |= dict(zip(table["gid"].to_pylist(), table["scores"].to_pylist(), strict=True))
                assert ours.num_row_groups == len(of_data.row_groups)
    return found


@pytest.mark.parametrize("period", ["/../../escaped", "../escaped"])
def test_a_period_of_a_manifest_leads_nowhere_else(bundles: dict[str, str], tmp_path: Path, period: str) -> None:
    url = write_data(str(tmp_path / "data"), {"p1": (5, 0)})
    path = Path(url, storage.MANIFEST)
    path.write_text(path.read_text().replace('"period": "p1"', f'"period": "{period}"'))
    there = set(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=r"manifest\.json: files: .* cannot be the name of a period"):
        run(config(url, bundles["network"]), tmp_path / "deep" / "scores")
    assert set(tmp_path.rglob("*")) == there


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trees", "network"])
def test_every_group_gets_the_scores_of_the_bundle(
    data: str, bundles: dict[str, str], tmp_path: Path, kind: str
) -> None:
    assert run(config(data, bundles[kind]), tmp_path) == list(PERIODS)
    found, wanted = read(data, str(tmp_path)), expected(data, bundles[kind])
    assert found.keys() == wanted.keys()
    for gid, scores in wanted.items():
        assert found[gid] == pytest.approx(scores, rel=1e-6, abs=1e-6), gid
        assert kind == "network" or found[gid] == scores


@pytest.mark.slow
def test_several_bundles_score_by_the_mean_of_their_scores(data: str, bundles: dict[str, str], tmp_path: Path) -> None:
    both, out = [bundles["trees"], bundles["network"]], tmp_path / "scores"
    assert run(config(data, both), out) == list(PERIODS)
    found, trees, network = read(data, str(out)), expected(data, both[0]), expected(data, both[1])
    for gid in trees:
        assert found[gid] == pytest.approx(np.add(trees[gid], network[gid]) / 2, rel=1e-6, abs=1e-6), gid
    assert scored_by(Split(data=(data,), scores=str(out))) == sorted(both)
    assert run(config(data, both), out) == []
    other = save_network(str(tmp_path / "other"), seed=1)
    assert run(config(data, [both[0], other]), out) == list(PERIODS)
    assert run(config(data, both[:1]), out) == list(PERIODS)
    assert read(data, str(out)) == trees
    run(config(data, both[0]), tmp_path / "one")
    assert files_of(tmp_path / "one") == files_of(out)


@pytest.mark.slow
def test_the_scores_do_not_depend_on_the_batches(data: str, bundles: dict[str, str], tmp_path: Path) -> None:
    for docs in (1, 37, 100_000):
        run(config(data, bundles["trees"], docs_per_batch=docs), tmp_path / str(docs))
    one, *others = (files_of(tmp_path / str(docs)) for docs in (1, 37, 100_000))
    assert all(other == one for other in others)


@pytest.mark.parametrize(
    ("lengths", "calls"),
    [([2, 3, 1, 4, 2], [2, 1, 1, 1]), ([1, 1, 9], [3]), ([9, 1, 1], [1, 2]), ([3, 3], [1, 1]), ([12], [1])],
)
def test_a_network_sees_whole_lists_though_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], calls: list[int]
) -> None:
    monkeypatch.setattr(networks, "_IN_CACHE", 3)
    n, offsets_Q1 = sum(lengths), to_offsets(torch.tensor(lengths))
    groups = QueryGroups(torch.randn(n, 2), offsets_Q1, ids_Q=torch.arange(len(lengths)), positions_N=torch.rand(n))
    sizes: list[int] = []

    def score(part: QueryGroups) -> torch.Tensor:
        assert part.checked().ids_Q is not None
        assert part.positions_N is not None
        sizes.append(part.n_groups)
        within_N = standardise_groups(part.features_NF, part.offsets_Q1)[:, 0]
        return within_N + part.positions_N + part.ids_Q.repeat_interleave(part.lengths_Q)

    assert torch.equal(networks._in_cache(score)(groups), score(groups))
    assert sizes[:-1] == calls


def test_they_serve_as_labels(data: str, bundles: dict[str, str], tmp_path: Path) -> None:
    run(config(data, bundles["trees"]), tmp_path)
    wanted = expected(data, bundles["trees"])
    served = 0
    for groups in iterate(select(Split(data=(data,), scores=str(tmp_path)), labelled=True)):
        assert groups.ids_Q is not None
        assert groups.labels_N is not None
        joined = np.concatenate([wanted[gid] for gid in groups.ids_Q.tolist()])
        assert np.array_equal(groups.labels_N.numpy(), joined.astype(np.float32))
        served += groups.n_groups
    assert served == len(wanted)


def test_what_is_up_to_date_is_left_alone_and_said_so(
    data: str, bundles: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    two = job(config(data, bundles["trees"], periods=("p1..p2",)), out)
    two.run()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    with caplog.at_level(logging.INFO, "ltrscale"):
        two.run()
    assert f"{out} is up to date (2 periods)" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before
    caplog.clear()
    with caplog.at_level(logging.INFO, "ltrscale"):
        two.replace(periods=None).run()
    assert "2 periods scored with 65 groups" in caplog.text
    assert "2 periods were up to date" in caplog.text
    lines = (out / "_run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line).get("period") for line in lines] == ["p1", "p2", None, "p3", "p4", None]


class Killed(BaseException):
    """Stands for a kill: a BaseException, which the code does not catch."""


def stop_after(n: int) -> Callable[..., Any]:
    """A function that raises at its n-th call, counted from 0."""
    calls = iter(range(n))

    def call(*_: object, **__: object) -> None:
        if next(calls, None) is None:
            raise Killed

    return call


@pytest.mark.slow
@pytest.mark.parametrize("n", [0, nightly(1), 2, nightly(3)])
@pytest.mark.parametrize("point", ["before a commit", "after a commit", "in a period"])
def test_stopped_anywhere_it_goes_on_with_the_rest(
    data: str, bundles: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, n: int
) -> None:
    settings, stop, records = config(data, bundles["trees"]), stop_after(n), []
    finish = storage.Commit.finish

    def report(record: Mapping[str, Any]) -> None:
        records.append(record.get("period"))
        if point == "after a commit":
            stop()

    def before_finish(commit: storage.Commit, manifest: Mapping[str, Any]) -> None:
        stop()
        finish(commit, manifest)

    with monkeypatch.context() as patch:
        if point == "before a commit":
            patch.setattr(storage.Commit, "finish", before_finish)
        if point == "in a period":
            patch.setattr(scoring, "write_file", _stopping(scoring.write_file, stop_after(3 * n)))
        with pytest.raises(Killed):
            job(settings, tmp_path).work({}, report)
    done = [period for period in PERIODS if read_period(str(tmp_path), period)]
    assert done == [period for period in records if period]
    assert len(done) == {"before a commit": n, "after a commit": n + 1}.get(point, len(done))
    assert {Path(name).parent.name for name in files_of(tmp_path)} <= {f"period={period}" for period in done}
    before = files_of(tmp_path)
    assert run(settings, tmp_path) == [period for period in PERIODS if period not in done]
    assert before.items() <= files_of(tmp_path).items()
    assert read(data, str(tmp_path)) == expected(data, bundles["trees"])


def _stopping(function: Callable[..., Any], stop: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **settings: Any) -> Any:
        stop()
        return function(*arguments, **settings)

    return call


_VICTIM = """
import os, signal, sys
from ltrscale.scoring.score import ScoreJob
def report(record):
    os.kill(os.getpid(), signal.SIGKILL)
ScoreJob(data=sys.argv[1], bundle=sys.argv[2], out=sys.argv[3]).work({}, report)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_loses_no_period(data: str, bundles: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", _VICTIM, data, bundles["trees"], str(tmp_path)]
    assert (
        subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == -signal.SIGKILL
    )
    assert run(config(data, bundles["trees"]), tmp_path) == list(PERIODS[1:])
    assert read(data, str(tmp_path)) == expected(data, bundles["trees"])


@pytest.mark.slow
def test_another_bundle_scores_all_again_and_changed_data_their_period(bundles: dict[str, str], tmp_path: Path) -> None:
    data, out = write_data(str(tmp_path / "data")), tmp_path / "out"
    run(config(data, bundles["trees"]), out)
    assert run(config(data, bundles["trees"], docs_per_batch=9), out) == []
    assert run(config(data, bundles["network"]), out) == list(PERIODS)
    # in file order the gids of the periods behind a changed one stay, as long as its number of groups does
    write_data(data, {**SIZES, "p2": (25, 99), "p5": (9, 5)})
    with pytest.raises(InputError, match=r"period 'p2' was scored from other files"):
        select(Split(data=(data,), periods=("p1..p2",), scores=str(out)), labelled=True)
    assert run(config(data, bundles["network"]), out) == ["p2", "p5"]
    assert read(data, str(out)).keys() == expected(data, bundles["network"]).keys()
    listed = {without_writer(f"period={p}/{f.path}") for p in (*PERIODS, "p5") for f in read_period(str(out), p).files}  # type: ignore[union-attr]
    assert files_of(out).keys() == listed
    assert run(config(data, bundles["trees"], periods="p1"), out) == ["p1"]
    with pytest.raises(InputError, match=r"'p1' and 'p2' were scored by different bundles.*jobs\.score"):
        select(Split(data=(data,), scores=str(out)), labelled=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trees", "network"])
def test_features_in_another_order_get_the_same_scores(
    data: str, bundles: dict[str, str], reorder: Any, tmp_path: Path, kind: str
) -> None:
    moved = reorder(data, [FEATURES[2], Feature(name="more"), FEATURES[0], FEATURES[1]])
    run(config(moved, bundles[kind]), tmp_path / "moved")
    run(config(data, bundles[kind]), tmp_path / "there")
    assert read(moved, str(tmp_path / "moved")) == read(data, str(tmp_path / "there"))


def test_data_that_change_while_they_are_scored(bundles: dict[str, str], tmp_path: Path) -> None:
    """The run does not score an added period; it names files that are gone, and keeps committed scores."""
    data, out = write_data(str(tmp_path / "data")), tmp_path / "out"
    settings = config(data, bundles["trees"])
    lost = next(file for file in open_dataset(data).manifest.files if file.period == "p3")
    done: list[object] = []

    def report(record: Mapping[str, Any]) -> None:
        done.append(record.get("period"))
        if len(done) == 1:
            add_period(data, "p0", like="p1")
        elif len(done) == 2:
            write_data(data, {**SIZES, "p4": (9, 5)})
            assert not (Path(data) / lost.path).exists()

    message = rf"^{data}: the data set was replaced since the run began, and no longer lists {data}/{lost.path};"
    with pytest.raises(InputError, match=message):
        job(settings, out).work({}, report)
    assert done == ["p1", "p2"]
    assert run(settings, out) == ["p3", "p4"]
    assert read(data, str(out)) == expected(data, bundles["trees"])


@pytest.mark.slow
def test_what_is_recorded_of_a_period_s_scores_is_of_that_period(bundles: dict[str, str], tmp_path: Path) -> None:
    data, out = write_data(str(tmp_path / "data")), str(tmp_path / "out")
    run(config(data, bundles["trees"]), out)
    of_each = {period: read_period(out, period).made_by["inputs"][data] for period in PERIODS}  # type: ignore[union-attr]
    assert len(set(of_each.values())) == len(PERIODS)
    add_period(data, "p0", like="p1")
    run(config(data, bundles["network"]), out)
    assert {period: read_period(out, period).made_by["inputs"][data] for period in PERIODS} == of_each  # type: ignore[union-attr]


def test_the_scores_are_an_input_of_what_reads_them(data: str, bundles: dict[str, str], tmp_path: Path) -> None:
    splits = [Split(data=(data,), periods=period, scores=str(tmp_path)) for period in ("p1", "p2")]
    found = set()
    for name in ("trees", "network"):
        run(config(data, bundles[name], periods="p1..p2"), tmp_path)
        found.add(json.dumps(dataset_hashes(splits), sort_keys=True))
    assert len(found) == 2
    assert dataset_hashes(splits[:1]) != dataset_hashes(splits)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_ray_gives_the_bytes_of_one_process(data: str, bundles: dict[str, str], tmp_path: Path) -> None:
    one = config(data, bundles["network"])
    by_ray = {**one, "ray": True, "workers": {"number": 2}}
    run(one, tmp_path / "one")
    with pytest.raises(Killed):
        job(by_ray, tmp_path / "ray").work({}, _stopping(lambda _: None, stop_after(1)))
    done = [period for period in PERIODS if read_period(str(tmp_path / "ray"), period)]
    assert len(done) == 2
    assert sorted(run(by_ray, tmp_path / "ray")) == sorted(set(PERIODS) - set(done))
    committed = {name: content for name, content in files_of(tmp_path / "ray").items() if "staging" not in name}
    assert committed == files_of(tmp_path / "one")
    assert read(data, str(tmp_path / "ray")) == read(data, str(tmp_path / "one"))


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_errors_of_actors_are_one_line(data: str, tmp_path: Path) -> None:
    broken = save_network(str(tmp_path / "broken"), weight=float("nan"))
    with pytest.raises(InputError, match=r"broken: the score of a document of query group \d+ of .* nan") as error:
        run(config(data, broken, ray=True), tmp_path / "out")
    assert "UDF" not in str(error.value)


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_an_outage_of_an_actor_is_one_here(
    data: str, bundles: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_Actor", scoring_actors.WithoutStorage)
    with pytest.raises(UnavailableError, match=r"^bucket: no answer$"):
        run(config(data, bundles["trees"], ray=True, periods="p1"), tmp_path / "out")


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_an_actor_that_dies_is_replaced_a_few_times(
    data: str, bundles: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(data, bundles["trees"], ray=True, periods="p1", workers={"number": 1})
    monkeypatch.setattr(scoring, "_ACTOR_RETRIES", 1)
    monkeypatch.setattr(scoring, "_Actor", scoring_actors.KilledOnce)
    assert run(settings, tmp_path / "out") == ["p1"]
    assert (tmp_path / "out-killed").exists()
    monkeypatch.setattr(scoring, "_Actor", scoring_actors.AlwaysKilled)
    with pytest.raises(InputError, match=r"trees: the process that scored a file with it ended several times"):
        run(settings, tmp_path / "never")
    assert not files_of(tmp_path / "never")


@pytest.mark.s3
def test_data_bundle_and_scores_may_lie_on_s3(s3: str, bundles: dict[str, str], data: str, tmp_path: Path) -> None:
    there = write_data(f"{s3}/scoring/data")
    model = save_network(f"{s3}/scoring/network")
    out = f"{s3}/scoring/out"
    with pytest.raises(Killed):
        job(config(there, model), out).work({}, _stopping(lambda _: None, stop_after(1)))
    assert run(config(there, model), out) == list(PERIODS[2:])
    run(config(data, bundles["network"]), tmp_path)
    assert read(there, out) == read(data, str(tmp_path))


def test_what_cannot_score_is_reported_before_anything_is_written(
    data: str, bundles: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    others = save_network(str(tmp_path / "others"), features=(*FEATURES[:2], Feature(name="z")))
    for settings, message in (
        (config(data, others), r"1 of its 3 features are not in the data: 'z' \(numeric, there missing\)"),
        (config(data, str(tmp_path / "nothing")), "no bundle is committed there"),
        (config(data, data), "not a bundle"),
        (config(str(tmp_path), bundles["trees"]), "no data set is committed"),
        (config(data, bundles["trees"], periods="p9"), "no period 'p9'; it has p"),
        (config(data, bundles["network"], device="cuda:7"), "device: cuda:7 is asked for"),
    ):
        with pytest.raises(InputError, match=message):
            run(settings, out)
        assert not out.exists()
    with pytest.raises(InputError, match="the output of something else is there"):
        job(config(data, bundles["trees"]), data).run()


def test_scores_that_are_no_numbers_are_named(data: str, tmp_path: Path) -> None:
    broken = save_network(str(tmp_path / "broken"), weight=float("inf"))
    with pytest.raises(
        InputError, match=r"broken: the score of a document of query group 0 of .*p1.*no finite float32"
    ):
        run(config(data, broken), tmp_path / "out")
    assert not files_of(tmp_path / "out")
