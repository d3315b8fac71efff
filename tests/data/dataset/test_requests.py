"""Requests to S3: how many a look-up, a listing and an addition take, whatever the size of the data set."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from nightly import nightly

from jobs.bench.growth import write_manifests
from jobs.s3 import environment
from ltrscale import storage
from ltrscale.data.dataset.files import Counts, DataFile, DataFiles
from ltrscale.data.dataset.manifest import Manifest, open_dataset
from ltrscale.data.dataset.scores import find_scores
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.dataset.writer import commit_dataset
from ltrscale.ingest.additions import with_addition
from tests.chaos.faulty_proxy import FaultyProxy

pytestmark = [pytest.mark.s3, pytest.mark.slow]
SMALL, LARGE = 4_000, 40_000
"""Row groups, of which a tenth as many files and a hundredth as many periods."""


@pytest.fixture(scope="module")
def counter(s3: str) -> Iterator[FaultyProxy]:
    with FaultyProxy(os.environ["AWS_ENDPOINT_URL"], 0.0) as proxy, environment(AWS_ENDPOINT_URL=proxy.url):
        for size in (SMALL, LARGE):
            write_manifests(f"{s3}/requests-{size}", size)
        yield proxy


def requests(counter: FaultyProxy, work: object) -> int:
    before = counter.requests
    assert callable(work)
    work()
    return counter.requests - before


@pytest.mark.parametrize("size", [SMALL, nightly(LARGE)])
def test_a_selection_reads_the_manifest_and_its_parts(s3: str, counter: FaultyProxy, size: int) -> None:
    url = f"{s3}/requests-{size}"
    parts = len((storage.read_manifest(url) or {})["parts"])
    assert requests(counter, lambda: select(Split(data=(url,)), labelled=True)) == 1 + parts
    assert parts <= 1


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_scores_are_looked_up_with_one_request_a_period(s3: str, counter: FaultyProxy, size: int) -> None:
    url = f"{s3}/requests-{size}"
    dataset = open_dataset(url)
    periods = dataset.manifest.periods
    assert requests(counter, lambda: find_scores(f"{url}-scores", dataset, periods)) == len(periods) == size // 100


def test_a_listing_has_a_thousand_files_a_request(s3: str, counter: FaultyProxy) -> None:
    for size in (SMALL, LARGE):
        scores = f"{s3}/requests-{size}-scores"
        assert len(storage.sizes_below(scores)) == size // 100
        assert requests(counter, lambda scores=scores: storage.sizes_below(scores)) <= 2


def test_an_addition_takes_as_many_requests_whatever_is_there(s3: str, counter: FaultyProxy) -> None:
    def add(url: str) -> None:
        before = open_dataset(url).manifest
        with storage.Commit(url) as commit:
            with commit.file("period=new/part-9-{hash}.parquet") as path:
                Path(path).write_text("new")
            row_groups = (Counts(1, 2, 0),)
            file = DataFile(**vars(commit.files[-1]), period="new", longest=2, row_groups=row_groups)
            new = Manifest(features=before.features, files=DataFiles.from_iterable([file]))
            commit_dataset(commit, with_addition(before, new))

    counts = [requests(counter, lambda url=f"{s3}/requests-{size}": add(url)) for size in (LARGE, LARGE, SMALL)]
    assert max(counts) - min(counts) <= 2
    assert max(counts) < 30
