"""Scores as labels, and folds: the groups that a split serves, against slow joins by gid."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_changes import with_renamed_files
from writer_tokens import without_writer

from ltrscale import config, storage
from ltrscale.data.dataset import scores
from ltrscale.data.dataset.files import Counts
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.preflight import PreflightConfig, preflight
from ltrscale.data.dataset.row_groups import Fold, OuterFold
from ltrscale.data.dataset.scores import PeriodScores, ScoredGroups, ScoreFile
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import GroupStream, StreamConfig, iterate
from ltrscale.data.stream.readers import RowGroupReader, read_direct
from ltrscale.errors import InputError

Make = Callable[..., Any]
LENGTHS = {"a": [[3, 1], [4, 2, 2], [1]], "b": [[5], [1, 3]], "c": [[2, 2, 2, 6]]}


def score_of(gid: int, document: int) -> float:
    """A score that float32 cannot represent."""
    return gid + document / 7 - 3


def write_scores(
    url: str, data: str, *, periods: str = "abc", score: Callable[[int, int], float] = score_of, batch: int = 2
) -> str:
    """Write the score files of a data set, `batch` groups at a time; returns their directory."""
    dataset = open_dataset(data)
    for period in periods:
        with storage.Commit(scores.period_url(url, period), manifest=storage.HIDDEN_MANIFEST) as commit:
            files, total = [], Counts(0, 0, 0)
            for file in [file for file in dataset.manifest.files if file.period == period]:
                table = pq.read_table(storage.join(data, file.path), columns=["gid", "features"], partitioning=None)
                lengths = [len(values) // 3 for values in table["features"].to_pylist()]
                batches = scored_groups(table["gid"].to_pylist(), lengths, score, batch)
                with commit.file(scores.file_name(file)) as path:
                    counts = scores.write_file(path, file.row_groups, batches)
                total = Counts(*map(sum, zip(total, counts, strict=True)))
                made = vars(commit.files[-1])
                files.append(ScoreFile(**made, data=file.path, data_sha256=file.sha256))
            manifest = PeriodScores(
                period=period,
                files=tuple(files),
                groups=total.groups,
                documents=total.documents,
                bundle_hash="x",
                made_by={},
                layout="scores",
                meta=(),
            )
            commit.finish(manifest.model_dump(mode="json"))
    return url


def scored_groups(
    gids: list[int], lengths: list[int], score: Callable[[int, int], float], size: int
) -> Iterator[ScoredGroups]:
    for at in range(0, len(gids), size):
        some, of_some = gids[at : at + size], lengths[at : at + size]
        values = [score(gid, i) for gid, n in zip(some, of_some, strict=True) for i in range(n)]
        yield ScoredGroups(np.array(some), np.cumsum([0, *of_some]), np.array(values))


@pytest.fixture(scope="module")
def made(make_dataset: Make) -> Any:
    return make_dataset(LENGTHS, is_labelled=lambda gid: gid % 3 == 0, has_weights=lambda gid: gid % 2 == 0)


@pytest.fixture(scope="module")
def scored(made: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_scores(str(tmp_path_factory.mktemp("scores")), made.url)


def labels_served(selection: Selection, made: Any, *, reader: RowGroupReader = read_direct) -> dict[int, list[float]]:
    """The labels by gid that a shuffled stream serves; checks the features against the data set."""
    served = {}
    for step in GroupStream(selection, StreamConfig(docs_per_batch=7, window=2), reader=reader).epoch(0):
        groups = step.micro_batches[0]
        assert groups is not None
        assert groups.ids_Q is not None
        assert groups.labels_N is not None
        bounds = groups.offsets_Q1.tolist()
        for gid, first, last in zip(groups.ids_Q.tolist(), bounds[:-1], bounds[1:], strict=True):
            assert gid not in served
            served[gid] = groups.labels_N[first:last].tolist()
            assert np.array_equal(groups.features_NF[first:last].numpy(), made.groups[gid].features)
    return served


def joined(made: Any, periods: str = "abc", score: Callable[[int, int], float] = score_of) -> dict[int, list[float]]:
    """Slow: the scores of every group by gid, as float32."""
    return {
        gid: [float(np.float32(score(gid, i))) for i in range(len(group.features))]
        for gid, group in made.groups.items()
        if group.period in periods
    }


def test_every_group_has_its_scores_as_labels(made: Any, scored: str, read: RowGroupReader) -> None:
    split = Split(data=(made.url,), scores=scored)
    selection = select(split, labelled=True)
    assert selection.n_groups == len(made.groups)
    assert labels_served(selection, made, reader=read) == joined(made)
    some = select(split.replace(periods=("b..c",)), labelled=True)
    assert labels_served(some, made, reader=read) == joined(made, "bc")


@pytest.mark.s3
def test_data_and_scores_may_lie_in_different_places(make_dataset: Make, made: Any, scored: str, s3: str) -> None:
    remote = make_dataset(
        LENGTHS,
        is_labelled=lambda gid: gid % 3 == 0,
        has_weights=lambda gid: gid % 2 == 0,
        url=f"{s3}/scores/data",
    )
    there = write_scores(f"{s3}/scores/out", made.url)
    for data, place in ((remote.url, there), (remote.url, scored), (made.url, there)):
        selection = select(Split(data=(data,), scores=place), labelled=True)
        assert labels_served(selection, made) == joined(made)


def test_without_labels_scores_are_not_read(made: Any, tmp_path: Path) -> None:
    split = Split(data=(made.url,))
    nowhere = split.replace(scores=str(tmp_path), fold={"number": 0, "of": 40})
    assert select(nowhere, labelled=False).hash == select(split, labelled=False).hash
    assert all(groups.labels_N is None for groups in iterate(select(nowhere, labelled=False)))


def test_a_fraction_is_of_all_scored_groups(made: Any, scored: str) -> None:
    split = Split(data=(made.url,), scores=scored, labelled_fraction=0.5)
    selection = select(split, labelled=True)
    assert selection.n_groups == round(len(made.groups) / 2)
    served = labels_served(selection, made)
    assert served == {gid: labels for gid, labels in joined(made).items() if gid in served}
    first = select(split.replace(labelled_sample="first"), labelled=True)
    assert sorted(labels_served(first, made)) == list(range(round(len(made.groups) / 2)))


def test_the_scores_are_in_the_hash_and_where_they_lie_is_not(made: Any, scored: str, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.symlink_to(scored)
    other = write_scores(str(tmp_path / "other"), made.url, score=lambda gid, i: score_of(gid, i) * 2)
    split = Split(data=(made.url,), scores=scored)

    def hash_of(**changes: Any) -> str:
        return select(split.replace(**changes), labelled=True).hash

    assert hash_of(scores=str(moved)) == hash_of()
    assert len({hash_of(), hash_of(scores=other), hash_of(scores=None), hash_of(labelled_fraction=0.5)}) == 4


def test_scores_are_of_data_whose_files_have_other_names(made: Any, scored: str, tmp_path: Path) -> None:
    data = with_renamed_files(made.url, tmp_path / "data")
    one, other = (Split(data=(url,), scores=scored) for url in (made.url, data))
    selection = select(other, labelled=True)
    assert selection.hash == select(one, labelled=True).hash
    assert labels_served(selection, made) == joined(made)


def test_periods_that_are_not_scored_or_have_changed_are_named(
    made: Any, make_dataset: Make, scored: str, tmp_path: Path
) -> None:
    part = write_scores(str(tmp_path / "part"), made.url, periods="ac")
    assert select(Split(data=(made.url,), periods=("a", "c"), scores=part), labelled=True).n_groups == 10
    with pytest.raises(InputError, match=r"part: period 'b' is not scored there; score .* with jobs\.score"):
        select(Split(data=(made.url,), scores=part), labelled=True)
    changed = make_dataset(LENGTHS, seed=5)
    with pytest.raises(InputError, match=r"period 'a' was scored from other files than .* jobs\.score"):
        select(Split(data=(changed.url,), scores=scored), labelled=True)
    with pytest.raises(InputError, match="scores are of one data set"):
        select(Split(data=(made.url, changed.url), scores=scored), labelled=True)
    with pytest.raises(InputError, match="leave one out"):
        config.validate(Split, {"data": "set", "scores": "there", "labels": "relevance"}, "test")
    data_set = tmp_path / "wrong" / "period=a"
    storage.write_bytes(str(data_set / storage.HIDDEN_MANIFEST), b'{"format": "ltrscale-dataset"}')
    with pytest.raises(InputError, match="not scores but 'ltrscale-dataset'"):
        select(Split(data=(made.url,), scores=str(data_set.parent)), labelled=True)


@pytest.mark.parametrize("damage", ["other gids", "uneven", "null", "float32", "a row less", "cut short", "missing"])
def test_score_files_that_do_not_fit_are_named(made: Any, tmp_path: Path, damage: str) -> None:
    url = write_scores(str(tmp_path), made.url)
    path = next(Path(url).glob("period=b/*.parquet"))
    with pq.ParquetFile(path) as file:
        tables = [file.read_row_group(i) for i in range(file.num_row_groups)]
    gids, values = ([table[name].to_pylist() for table in tables] for name in ("gid", "scores"))
    match damage:
        case "other gids":
            gids[1] = gids[1][::-1]
        case "uneven":
            values[1][0] = [1.0, 2.0]
        case "null":
            values[0][0] = None
        case "a row less":
            gids[1], values[1] = gids[1][:1], values[1][:1]
    kind = pa.list_(pa.float32() if damage == "float32" else pa.float64())
    with pq.ParquetWriter(path, pa.schema([("gid", pa.int64()), ("scores", kind)])) as writer:
        for ids, lists in zip(gids, values, strict=True):
            writer.write_table(pa.table([pa.array(ids), pa.array(lists, kind)], schema=writer.schema))
    if damage == "cut short":
        path.write_bytes(path.read_bytes()[:-20])
    if damage == "missing":
        path.unlink()
    with pytest.raises(InputError, match=r"jobs\.score|no such file|'scores' is not as in") as error:
        labels_served(select(Split(data=(made.url,), scores=url), labelled=True), made)
    assert "\n" not in str(error.value)
    assert "period=b" in str(error.value)


def test_what_is_written_does_not_depend_on_the_batches(made: Any, tmp_path: Path) -> None:
    files = []
    for batch in (1, 2, 100):
        url = write_scores(str(tmp_path / str(batch)), made.url, batch=batch)
        files.append({path.relative_to(url): path.read_bytes() for path in Path(url).rglob("*.parquet")})
    one, *others = ({without_writer(str(name)): content for name, content in of.items()} for of in files)
    assert all(other == one for other in others)
    data = {path.name: path for path in Path(made.url).glob("period=a/*.parquet")}
    (name,) = [name for name in files[0] if name.parts[0] == "period=a"]
    (of_data,) = data.values()
    assert name.name.startswith(of_data.stem)
    ours, theirs = pq.ParquetFile(tmp_path / "1" / name), pq.ParquetFile(of_data)
    with ours, theirs:
        rows = [[f.metadata.row_group(i).num_rows for i in range(f.num_row_groups)] for f in (ours, theirs)]
        assert rows[0] == rows[1] == [2, 3, 1]
        assert ours.schema_arrow.names == ["gid", "scores"]


def test_files_left_out_take_their_scores_with_them(made: Any, scored: str) -> None:
    split = Split(data=(made.url,), scores=scored)
    whole = select(split, labelled=True)
    without = {row_group.file.url for row_group in whole.row_groups if row_group.file.period == "b"}
    left = select(split, labelled=True, without=without)
    assert labels_served(left, made) == joined(made, "ac")
    assert left.hash != whole.hash
    assert not preflight({"train": split}, PreflightConfig(check="content")).bad


def served(split: Split) -> set[int]:
    selection = select(split, labelled=True)
    ids = [groups.ids_Q.tolist() for groups in iterate(selection) if groups.ids_Q is not None]
    assert sum(map(len, ids)) == selection.n_groups
    return {gid for some in ids for gid in some}


@pytest.mark.slow
@pytest.mark.parametrize(("fraction", "scores_too"), [(1.0, False), (1.0, True), (0.5, True)])
@pytest.mark.parametrize("of", [2, 3, 4])
def test_folds_partition_the_labelled_groups_that_are_kept(
    made: Any, scored: str, of: int, fraction: float, scores_too: bool
) -> None:
    split = Split(data=(made.url,), labelled_fraction=fraction, scores=scored if scores_too else None)
    kept = served(split)
    folds = [Fold(number=k, of=of, seed=1) for k in range(of)]
    held_out = [served(split.replace(fold=fold.replace(held_out=True))) for fold in folds]
    assert sum(map(len, held_out)) == len(kept)
    assert set().union(*held_out) == kept
    assert max(map(len, held_out)) - min(map(len, held_out)) <= 1
    assert [served(split.replace(fold=fold)) for fold in folds] == [kept - fold for fold in held_out]


def test_folds_within_a_fold_partition_what_it_serves(made: Any, scored: str) -> None:
    split = Split(data=(made.url,), scores=scored)
    outer = OuterFold(number=1, of=3, seed=2)
    inner = [Fold(number=k, of=4, held_out=True, within=outer) for k in range(4)]
    parts = [served(split.replace(fold=fold)) for fold in inner]
    assert sorted(gid for part in parts for gid in part) == sorted(served(split.replace(fold=outer.model_dump())))
    for fold in inner:
        others = split.replace(fold=fold.replace(held_out=False))
        assert split.replace(fold=fold).completes(others)
        assert split.replace(fold=outer.replace(held_out=True).model_dump()).completes(others)
        assert not split.replace(fold=outer.model_dump()).completes(others)


def test_folds_depend_on_their_seed_alone(made: Any, scored: str) -> None:
    split = Split(data=(made.url,), scores=scored, fold=Fold(number=0, of=3))
    other = split.replace(scores=write_scores(f"{scored}-2", made.url, score=lambda gid, _: gid))
    assert served(split) == served(other) == served(split.replace(labelled_seed=9))
    seeds = {tuple(sorted(served(split.replace(fold=Fold(number=0, of=3, seed=seed))))) for seed in range(5)}
    assert len(seeds) > 1
    hashes = {
        select(split.replace(fold=fold), labelled=True).hash
        for fold in (
            None,
            Fold(number=0, of=3),
            Fold(number=1, of=3),
            Fold(number=0, of=4),
            Fold(number=0, of=3, held_out=True),
            Fold(number=0, of=3, seed=1),
        )
    }
    assert len(hashes) == 6


def test_folds_that_cannot_be_are_refused(made: Any) -> None:
    with pytest.raises(InputError, match="there is no fold 3 of 3; number them from 0 to 2"):
        config.validate(Split, {"data": "set", "fold": {"number": 3, "of": 3}}, "test")
    few = Split(data=(made.url,), labelled_fraction=0.4, fold=Fold(number=0, of=5))
    with pytest.raises(InputError, match=r"2 labelled groups cannot fill 5 folds; lower fold\.of"):
        select(few, labelled=True)
