"""Fixtures that several tests share."""

import gc
import logging
import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from secrets import token_hex

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings
from kept_drawing import kept_drawing
from labelled_groups import Labelled, WriteDataset
from made_once import MadeOnce
from shared_cluster import SharedCluster
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from jobs.s3 import SeaweedFS, environment, free_ports, seaweedfs
from ltrscale import storage
from ltrscale.data.dataset.files import Counts, DataFile
from ltrscale.data.dataset.manifest import Feature, Manifest, open_dataset

# A deadline would fail tests when the machine is busy; `make nightly` has the second profile.
settings.register_profile("day", deadline=None, max_examples=25)
settings.register_profile("night", deadline=None, max_examples=300)
settings.load_profile("day")

TESTS = Path(__file__).resolve().parent


class Doctests:
    """Looks for doctests where there are some, and in no test: helpers would be imported twice, by two names."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        found = yield
        if file_path.suffix != ".py" or (TESTS not in file_path.parents and ">>>" in file_path.read_text()):
            return found
        return [each for each in found if type(each) is pytest.Module]


def pytest_configure(config: pytest.Config) -> None:
    """Also for the files that are not below this one."""
    config.pluginmanager.register(Doctests())
    config.add_cleanup(gc.unfreeze)  # what is left at the end is garbage after all


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Looks for garbage in nothing that is imported before the tests: all of it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


PAGES = "test_pages.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the pages first, then files with slow tests, and last those that start a server or a cluster and keep it.

    Where the shared cluster of Ray has started, no other one starts.
    """

    def files(name: str) -> set[Path]:
        return {item.path for item in items if item.get_closest_marker(name)}

    slow, served, of_ray = files("slow"), files("s3") | files("ray"), files("ray")
    shared = {item.path for item in items if {"ray_cluster", "read"} & {*getattr(item, "fixturenames", ())}} & of_ray
    items.sort(
        key=lambda item: (
            item.path.name != PAGES,
            *(item.path in later for later in (served, of_ray, shared)),
            item.path not in slow,
        )
    )


class FilesAndPages(LoadFileScheduling):
    """Gives the tests of a file to one process, but for the pages, which take minutes each."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if PAGES in nodeid else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Stands for `--dist loadfile`."""
    return FilesAndPages(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def made_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Makes directories that all processes of the tests share."""
    base = tmp_path_factory.getbasetemp()
    return MadeOnce(base.parent if hasattr(request.config, "workerinput") else base)


@pytest.fixture(scope="session", autouse=True)
def importable() -> Iterator[None]:
    """Lets the processes of a Ray cluster import modules of the tests."""
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    with environment(PYTHONPATH=os.pathsep.join(filter(None, paths))):
        yield


@pytest.fixture(scope="session", autouse=True)
def heeding_ctrl_c() -> Iterator[None]:
    """Lets this process and those that it starts heed Ctrl-C, which a shell lets its background processes ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def written_logs() -> Iterator[None]:
    """Lets a log line that cannot be written fail, as a warning does: logging itself prints a traceback and goes on."""

    def fail(_handler: logging.Handler, _record: logging.LogRecord) -> None:
        raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.Handler, "handleError", fail)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_process_draws() -> Iterator[None]:
    """Draws the charts of all tests of this process in one other."""
    with kept_drawing():
        yield


@pytest.fixture(autouse=True)
def no_chart_is_left_out(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A chart that cannot be drawn costs a user one line; here it is a fault of ours."""
    yield
    said = [record.getMessage() for phase in ("setup", "call") for record in caplog.get_records(phase)]
    assert [text for text in said if text.startswith("report: left out: the chart")] == []


@pytest.fixture(autouse=True)
def no_variable_is_left() -> Iterator[None]:
    """No test leaves one of our variables in the environment, where it would hold for all tests after it."""

    def variables() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("LTRSCALE_")}

    before = variables()
    yield
    assert variables() == before


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data sets next to the checkout; without them, tests that need them are skipped."""
    folder = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real data sets (../shared/data) are not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def write_dataset(tmp_path_factory: pytest.TempPathFactory) -> WriteDataset:
    """Writes groups by period as a data set directory, one row group per period; returns its URL."""

    def write(groups: Mapping[str, Sequence[Labelled]], features: Sequence[Feature]) -> str:
        url = str(tmp_path_factory.mktemp("data") / "set")
        lists, files, gid = pa.list_(pa.float32()), [], 0
        with storage.Commit(url) as commit:
            for period, of_period in groups.items():
                columns = {
                    "gid": pa.array(range(gid, gid + len(of_period)), pa.int64()),
                    "query_id": pa.array([f"q{i}" for i in range(gid, gid + len(of_period))]),
                    "features": pa.array([np.asarray(x_LF, np.float32).ravel() for x_LF, _ in of_period], lists),
                    "labels": pa.array([labels_L for _, labels_L in of_period], lists),
                }
                gid += len(of_period)
                with commit.file(f"period={period}/part-00000-{{hash}}.parquet") as path:
                    pq.write_table(pa.table(columns), path)
                placed = commit.files[-1]
                labelled = sum(labels_L is not None for _, labels_L in of_period)
                counts = Counts(len(of_period), sum(len(x_LF) for x_LF, _ in of_period), labelled)
                longest = max(len(x_LF) for x_LF, _ in of_period)
                files.append(DataFile(**vars(placed), period=period, longest=longest, row_groups=(counts,)))
            manifest = Manifest(features=tuple(features), files=tuple(files))
            commit.finish(manifest.model_dump(mode="json"))
        return url

    return write


Reorder = Callable[[str, Sequence[Feature]], str]


@pytest.fixture(scope="session")
def reorder(tmp_path_factory: pytest.TempPathFactory) -> Reorder:
    """Writes a copy of a data set with its features in another order, fewer or more; returns its URL."""

    def write(url: str, features: Sequence[Feature]) -> str:
        before = open_dataset(url).manifest
        names = [feature.name for feature in before.features]
        out, files = str(tmp_path_factory.mktemp("reordered") / "set"), []
        with storage.Commit(out) as commit:
            for file in before.files:
                table = pq.ParquetFile(storage.join(url, file.path)).read()
                x_NF = table["features"].combine_chunks().flatten().to_numpy().reshape(-1, len(names))
                columns = [x_NF[:, names.index(f.name)] if f.name in names else 7.0 * x_NF[:, 0] for f in features]
                lengths_Q = [len(values) // len(names) * len(features) for values in table["features"].to_pylist()]
                values = pa.array(np.stack(columns, axis=1).astype(np.float32).ravel())
                lists = pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths_Q]), pa.int32()), values)
                place = table.schema.get_field_index("features")
                table = table.set_column(place, "features", lists)
                sink = commit.file(file.path.rpartition("-")[0] + "-{hash}.parquet")
                with sink as path, pq.ParquetWriter(path, table.schema) as writer:
                    first = 0
                    for cell in file.row_groups:
                        writer.write_table(table.slice(first, cell.groups))
                        first += cell.groups
                files.append(file._replace(**vars(commit.files[-1])))
            manifest = Manifest(features=tuple(features), files=tuple(files))
            commit.finish(manifest.model_dump(mode="json"))
        return out

    return write


@pytest.fixture(scope="session")
def synthetic_dataset(made_once: MadeOnce) -> str:
    """A small data set, made like a user makes one: a synthetic log of four weeks, prepared."""
    from preparing import prepare
    from synthetic_columns import COLUMN_MAPPING, write_synthetic

    from ltrscale.ingest.inputs import PrepareConfig
    from ltrscale.simulate.synthetic import SyntheticLogConfig

    def make(folder: Path) -> None:
        config = SyntheticLogConfig(weeks=4, groups_per_week=120, mean_documents=12, n_features=12, labelled=0.7)
        files = write_synthetic(config, folder / "log")
        source = {"kind": "items", "columns": COLUMN_MAPPING}
        prepare(PrepareConfig.model_validate({"inputs": files, "source": source}), str(folder / "data"))

    return str(made_once("synthetic", make) / "data")


@pytest.fixture(scope="session")
def texts(synthetic_dataset: str, made_once: MadeOnce) -> str:
    """The synthetic data set with texts, whose titles name the relevant documents."""
    from text_log import add_text

    def make(folder: Path) -> None:
        shutil.copytree(synthetic_dataset, folder / "data")
        add_text(str(folder / "data"))

    return str(made_once("texts", make) / "data")


@pytest.fixture(scope="session")
def clicked_texts(texts: str, made_once: MadeOnce) -> str:
    """These texts with clicks as labels, at positions."""
    from dataset_changes import with_clicks

    return str(made_once("clicked", lambda folder: with_clicks(texts, str(folder / "data"))) / "data")


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[SharedCluster]:
    """The Ray cluster that the tests of this process share; one that starts another in this process stops it first."""
    cluster = SharedCluster()
    yield cluster
    cluster.stop()


@pytest.fixture
def ray_cluster(shared_cluster: SharedCluster, request: pytest.FixtureRequest) -> None:
    """Connects the test to the shared Ray cluster; a test of S3 asks for `s3` first, whose keys are in its workers."""
    shared_cluster.start(request.path)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A directory URL on a real S3 server (SeaweedFS) on this machine; the environment names endpoint and keys."""
    keys = (f"key-{token_hex(8)}", f"secret-{token_hex(20)}")  # unique, so that tests can find leaks
    server = SeaweedFS(str(seaweedfs()), tmp_path_factory.mktemp("s3"), free_ports(4), keys)
    server.start()
    try:
        with environment(**server.environment):
            server.make_bucket("tests")
            yield "s3://tests/runs"
    finally:
        server.kill()
