"""Find periods with the same lists, such as a file shipped under two names as validation and as test.

Content hashes do not find them within a data set, whose group numbers continue from period to period.
"""

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.data.dataset.files import DataFiles
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.errors import InputError

Place = tuple[str, str]
"""URL of a data set, and a period."""
_FIRST, _FEWEST = 50, 10
"""Lists compared per period, and the fewest that a period must have: fewer may agree by chance."""
_KNOWN = 4096


def equal_periods(periods_of: Iterable[tuple[Dataset, Collection[str]]]) -> Iterator[tuple[Place, Place]]:
    """Pairs of periods that have the same lists: the first of each set of equal periods with each of the others.

    Only the first lists of periods with equal counts are read.

    Raises:
        InputError: a file cannot be read.
    """
    by_counts = defaultdict[object, list[tuple[Place, DataFiles]]](list)
    for dataset, periods in periods_of:
        for period, files in dataset.manifest.files.by_period.items():
            if period in periods and (counts := files.counts()).groups >= _FEWEST:
                by_counts[*counts, files.longest, dataset.manifest.features].append(((dataset.url, period), files))
    for alike in by_counts.values():
        found = dict[str, Place]()
        for place, files in alike if len(alike) > 1 else ():
            first = found.setdefault(_first_lists(place[0], files), place)
            if first != place:
                yield first, place


def _first_lists(url: str, files: DataFiles) -> str:
    """Hash the features and labels of the first lists of some files."""
    digest, left = hashlib.sha256(), _FIRST
    for file in files:
        of_lists = _hashes(storage.join(url, file.path), file.sha256)[:left]
        digest.update(b"".join(of_lists))
        left -= len(of_lists)
        if not left:
            break
    return digest.hexdigest()


@lru_cache(_KNOWN)
def _hashes(url: str, sha256: str) -> tuple[bytes, ...]:  # noqa: ARG001 - other content, another answer
    filesystem, path = storage.arrow_filesystem(url)

    def read() -> tuple[bytes, ...]:
        found = list[bytes]()
        with filesystem.open_input_file(path) as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            for number in range(file.num_row_groups):
                if len(found) < _FIRST:
                    table = file.read_row_group(number, columns=["features", "labels"], use_threads=False)
                    found += map(_hash, *(table[name].slice(0, _FIRST) for name in ("features", "labels")))
        return tuple(found[:_FIRST])

    try:
        with storage.named_errors(url):
            return storage.patiently(read)
    except (pa.ArrowException, KeyError) as error:
        raise InputError(f"{url}: its lists cannot be read ({error}); prepare the data set again") from error


def _hash(features: pa.ListScalar, labels: pa.ListScalar) -> bytes:
    """Hash the values of a list, and its labels if it has any."""
    values = [None if part.values is None else np.asarray(part.values, np.float32) for part in (features, labels)]
    return hashlib.sha256(b"|".join(b"none" if each is None else each.tobytes() for each in values)).digest()
