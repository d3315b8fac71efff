"""The work of a scoring job: the periods whose scores are missing or out of date, with the files of each."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ltrscale import bundle as bundles
from ltrscale import storage
from ltrscale.config import digest
from ltrscale.data.dataset.manifest import DataFile, Dataset, one_view
from ltrscale.data.dataset.scores import Layout, period_url, read_period
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split, Texts, chosen_files
from ltrscale.scoring.scorer import ScorerConfig


@dataclass(frozen=True, eq=False)
class Plan:
    """The work to do: the periods of a data set whose scores are not up to date, with their files in order."""

    scorer: ScorerConfig
    layout: Layout
    meta: Texts
    out: str
    """Absolute URL of the directory of the scores."""
    bundle_hashes: Mapping[str, str]
    """Of each bundle; see `ltrscale.bundle.content_hash`."""
    bundle_hash: str
    """The hash of the one bundle, or of all together."""
    dataset: Dataset
    selection: Selection
    files: Mapping[str, Sequence[DataFile]]
    """The files of each period that must be scored."""
    n_current: int
    """Number of periods that are up to date."""

    @property
    def all_files(self) -> list[DataFile]:
        """The files of all periods."""
        return [file for files in self.files.values() for file in files]


@one_view()
def make_plan(scorer: ScorerConfig, split: Split, out: str, *, layout: Layout, meta: Texts) -> Plan:
    """Find the periods of a split whose scores below a directory are missing or out of date.

    Raises:
        InputError: the bundle, the data set or a period is missing, or the place of a period's scores holds
            something else that is committed.
    """
    ((dataset, files),) = chosen_files(split)
    hashes = {url: bundles.content_hash(url) for url in scorer.bundles}
    one, *others = [hashes[url] for url in scorer.bundles]
    bundle_hash = digest([one, *others]) if others else one
    by_period: dict[str, list[DataFile]] = defaultdict(list)
    for file in files:
        by_period[file.period].append(file)
    pending = {
        period: of_period
        for period, of_period in sorted(by_period.items())
        if not _is_current(out, period, of_period, bundle_hash=bundle_hash, columns=(layout, meta))
    }
    return Plan(
        scorer=scorer,
        layout=layout,
        meta=meta,
        out=storage.absolute(out),
        bundle_hashes=hashes,
        bundle_hash=bundle_hash,
        dataset=dataset,
        selection=select(split, labelled=False),
        files=pending,
        n_current=len(by_period) - len(pending),
    )


def _is_current(
    out: str, period: str, files: Sequence[DataFile], *, bundle_hash: str, columns: tuple[Layout, Texts]
) -> bool:
    """Whether the scores of these files by this bundle are committed and complete, with these columns."""
    committed = read_period(out, period)
    if committed is None or committed.bundle_hash != bundle_hash or not committed.is_of(files):
        return False
    same_columns = (committed.layout, committed.meta) == columns
    return same_columns and storage.is_whole(period_url(out, period), committed.model_dump())
