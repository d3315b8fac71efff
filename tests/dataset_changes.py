"""Changes to data sets: an added period, other names of the same files, clicks as labels."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.data.dataset.files import DataFile
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.derive.relabel import RelabelConfig, RelabelJob


def add_period(url: str, period: str, *, like: str) -> None:
    """Add a period to a data set; it has the groups of the period `like` under new gids."""
    before = open_dataset(url).manifest
    gid = 10 * before.counts().groups + len(before.periods)
    added = []
    with storage.Commit(url) as commit:
        commit.adopt(storage.Placed(file.path, file.bytes, file.sha256) for file in before.files)
        commit.keep(file.path for file in before.files)
        for number, file in enumerate(file for file in before.files if file.period == like):
            source = pq.ParquetFile(Path(url) / file.path)
            with (
                commit.file(f"period={period}/part-{number:05}-{{hash}}.parquet") as path,
                pq.ParquetWriter(path, source.schema_arrow) as writer,
            ):
                for i in range(source.num_row_groups):
                    table = source.read_row_group(i)
                    gids = pa.array(range(gid, gid + len(table)), pa.int64())
                    writer.write_table(table.set_column(table.schema.get_field_index("gid"), "gid", gids))
                    gid += len(table)
            placed = commit.files[-1]
            added.append(DataFile(**vars(placed), period=period, longest=file.longest, row_groups=file.row_groups))
        files = sorted([*before.files, *added], key=lambda file: (file.period, file.path))
        commit.finish(before.replace(files=files).model_dump(mode="json"))


def with_renamed_files(url: str, folder: Path) -> str:
    """A copy of a data set whose files have other names, in the same order; returns its URL."""
    before = open_dataset(url).manifest
    files = []
    for file in before.files:
        path = Path(file.path).with_stem(f"{Path(file.path).stem}-again")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes((Path(url) / file.path).read_bytes())
        files.append(file._replace(path=str(path)))
    storage.write_bytes(f"{folder}/{storage.MANIFEST}", before.replace(files=files).model_dump_json().encode())
    return str(folder)


def with_clicks(url: str, out: str) -> str:
    """A data set with clicks on the order of its first feature as labels, the positions of the clicks, and weights."""
    feature = open_dataset(url).manifest.features[0].name
    steps = [
        {"kind": "clicks", "ranking": "feature", "feature": feature, "depth": 5, "user": {"kind": "pbm", "eta": 1}},
        {"kind": "click_ratio_weights", "depth": 5},
    ]
    RelabelJob(relabel=RelabelConfig.model_validate({"steps": steps}), data=url, out=out).work({}, lambda _: None)
    return out
