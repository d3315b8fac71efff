"""Prediction: raw rows in, ranked items out. It reads rows in the same way as the training data, then scores them.

    OUT-data/   the rows as a data set, with quarantine and accounting (`ltrscale.ingest.prepare`)
    OUT/        the ranked items, committed period by period (`ltrscale.data.dataset.scores`, layout `items`)
    OUT-explained/  why the first item of each query is first, if the job asks for it (`ExplainItems`)

The stages skip what is up to date, so a repeated command continues where it stopped. Between the first two the periods
to rank are compared with training (`find_skew`), and refused if the job asks for it.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import pyarrow.parquet as pq
from pydantic import Field

from ltrscale import storage
from ltrscale.bundle import Bundle, load, with_tokens_of
from ltrscale.bundle.explanations import Reasoner, as_table
from ltrscale.config import Operational, validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.origin import fills_of, prepare_settings_of
from ltrscale.data.dataset.scores import period_url, read_period, scored_periods
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Texts
from ltrscale.data.stream.scored import read_named
from ltrscale.devices import Device, choose_device
from ltrscale.errors import InputError, Refused
from ltrscale.ingest.inputs import Inputs, PrepareConfig, SourceConfig, list_inputs
from ltrscale.ingest.prepare import RowsJob
from ltrscale.ingest.rows import QUARANTINE
from ltrscale.ingest.source import Needs
from ltrscale.progress import Report, log, progress
from ltrscale.scoring.score import ScoreJob, ScorerConfig
from ltrscale.scoring.skew import Skew, SkewKind, skew_of
from ltrscale.stages.inputs import BundleUrls, DataUrl
from ltrscale.stages.runs import check_replaceable, holding
from ltrscale.stages.stage import Origin, Stage

_SAID = 10
"""Most features of a period to log one by one."""
_DEPTH = 10
"""The first item of a query is compared with those up to this rank."""


class PredictJob(ScorerConfig):
    """Rank the items of raw rows with a bundle."""

    out: str
    """Directory of the ranked items. The rows lie beside it as a data set, in the directory `OUT-data`."""
    inputs: Inputs = Field(min_length=1)
    """Files, directories or patterns, in the format of the training data; they need no labels."""
    source: SourceConfig | None = None
    """The format and the columns, for rows in another form than the training data, or for a bundle that does not record
    how to read these. By default the same as for the first bundle's training data."""
    sort: bool | None = None
    """Bring the rows of a query together first. By default as for the training data."""
    meta: Texts = ()
    """Columns of whole queries to copy to the output, as `meta_NAME`."""
    max_rejected: float = Field(0.001, ge=0, le=1)
    """Share of rejected rows above which nothing is ranked."""
    refuse: bool | tuple[SkewKind, ...] = False
    """Rank nothing, and end with status 3, if a feature differs from training: true for any reported kind, or some of
    them: `missing`, `category`, `range`, `scale`."""
    add: bool = False
    """Keep the items of earlier inputs, and add those of new periods. Otherwise `out` has only those of `inputs`."""
    explain: bool = False
    """Also explain why the first item of each query ranks above those of ranks 2 to 10: a table in `OUT-explained`."""
    ray: bool = False
    """Read and score files in parallel on a Ray cluster; the output is the same."""

    @property
    def data(self) -> str:
        """The directory of the rows."""
        return f"{self.out.rstrip('/')}-data"

    def run(self) -> None:
        """Read the rows, then rank their items.

        Raises:
            InputError: a bundle is missing or cannot score; it is not known how to read the rows, or they lack columns;
                `prepare` or `score` raised it; `out` holds other output.
            Refused: a feature differs from training in a way that `refuse` names.
        """
        self._check_out()
        opened = [load(url) for url in self.bundles]
        reading = self._reading(opened)
        self._check_columns(reading)
        RowsJob(out=self.data, prepare=reading, ray=self.ray).run()
        settings = {name: getattr(self, name) for name in ScorerConfig.model_fields}
        job = ScoreJob(**settings, out=self.out, data=self.data, layout="items", meta=self.meta)
        self._compare([*job.plan().files], opened)
        job.run()
        manifest = open_dataset(self.data).manifest
        if not self.add:
            self._withdraw_others(manifest.periods)
        if self.explain:
            beside = f"{self.out.rstrip('/')}-explained"
            ExplainItems(out=beside, bundles=self.bundles, data=self.data, device=self.device).run()
        if rejected := manifest.accounting.rows_rejected:
            quarantine = storage.join(self.data, QUARANTINE)
            log.warning(
                "%s of %s rows are not ranked: see %s", f"{rejected:,}", f"{manifest.accounting.rows_in:,}", quarantine
            )

    def _reading(self, opened: Sequence[Bundle]) -> PrepareConfig:
        """The settings of `prepare` that find the features of all bundles in the rows."""
        for each in opened:
            each.scorer()  # raises for a bundle that cannot score, before any row is read
            _check_read_alike(opened[0], each)
        as_trained, where = prepare_settings_of(opened[0].read_as), f"{opened[0].url}: read_as of its config.json"
        if self.source is None and not as_trained:
            raise InputError(
                f"{opened[0].url}: does not record how its training data were read; "
                "set source, as in the config of jobs.prepare"
            )
        overrides = {"sort": self.sort, "source": self.source}
        overrides = {name: value for name, value in overrides.items() if value is not None}
        own_settings = {"inputs": self.inputs, "max_rejected": self.max_rejected, "add": self.add}
        config = validate(PrepareConfig, {**as_trained, **overrides, **own_settings}, where)
        features = dict.fromkeys(feature for each in opened for feature in each.features)
        positions = any(each.reads_positions for each in opened)
        tokens = any(each.reads_tokens for each in opened)
        if not features and not tokens:
            raise InputError(f"{opened[0].url}: its config.json names no feature to rank by; train it again")
        dated = any(entry.period is None for entry in self.inputs)
        needs = Needs(
            [*features], self.meta, positions=positions, dated=dated, tokens=tokens, fills=fills_of(opened[0].read_as)
        )
        return config.replace(source=config.source.for_scoring(needs))

    def _compare(self, periods: Sequence[str], opened: Sequence[Bundle]) -> None:
        """Log how the rows of some periods differ from training, or refuse them."""
        by_period = {period: skew_of(self.data, period, opened) for period in periods}
        kinds = () if isinstance(self.refuse, bool) else self.refuse
        refused = [
            line
            for period, findings in by_period.items()
            for line in _skew_lines(period, [each for each in findings if self.refuse is True or each.kind in kinds])
        ]
        if refused:
            raise Refused(*refused, "nothing is ranked; mend the rows, or set refuse=false to rank them as they are")
        for period, findings in by_period.items():
            for line in _skew_lines(period, findings):
                log.warning("predict: %s", line)

    def _check_columns(self, reading: PrepareConfig) -> None:
        """Refuse the rows if their first file lacks columns; the error names them all."""
        first = list_inputs(reading.inputs)[0]
        if missing := reading.source.missing_columns(first):
            raise InputError(
                f"{first.url}: no column {', '.join(missing)}, which {self.name} needs; name columns that have other "
                "names there under source.columns; features must have the names of the training data"
            )

    def _check_out(self) -> None:
        """Refuse to replace anything but ranked items."""
        check_replaceable(self.out, "score")
        for period in scored_periods(self.out):
            committed = read_period(self.out, period)
            if committed is not None and committed.layout != "items":
                raise InputError(f"{self.out}: scores with a row per query are there; choose another directory")

    def _withdraw_others(self, periods: Iterable[str]) -> None:
        """Delete the items of earlier inputs for periods that the current inputs lack."""
        stale = sorted({*scored_periods(self.out)} - {*periods})
        if stale := [period for period in stale if read_period(self.out, period) is not None]:
            with holding(self.out):
                for period in stale:
                    storage.withdraw(period_url(self.out, period), name=storage.HIDDEN_MANIFEST)
            log.info("predict: %s: removed %d periods of earlier inputs: %s", self.out, len(stale), ", ".join(stale))


def _check_read_alike(first: Bundle, other: Bundle) -> None:
    """Refuse a bundle that would get other feature values when rows are read as for the first one."""
    if not first.read_as or not other.read_as:
        return
    infinite_1, infinite_2 = (each.read_as.get("infinite", "reject") for each in (first, other))
    apart = [] if infinite_1 == infinite_2 else ["infinite"]
    fills_1, fills_2 = fills_of(first.read_as), fills_of(other.read_as)
    if fills_1 is not None and fills_2 is not None:
        names = [feature.name for feature in other.features]
        apart += [f"fill of {name}" for name in names if fills_1.get(name) != fills_2.get(name)]
    if apart:
        raise InputError(
            f"{other.url}: its training data were read otherwise than those of {first.url} ({', '.join(apart)}), and "
            "all rows are read as for the latter; rank with each alone, or train both on data that are prepared alike"
        )


def _skew_lines(period: str, findings: Sequence[Skew]) -> list[str]:
    """A line for each of the first findings, and one with the number of others."""
    ending = [f"{period}: {len(findings) - _SAID} more"] if len(findings) > _SAID else []
    return [f"{period}: {each}" for each in findings[:_SAID]] + ending


class ExplainItems(Stage):
    """Explain the first item of every query of a data set."""

    stage: ClassVar = "explain_items"
    bundles: BundleUrls
    """Bundles that rank by the mean of their scores."""
    data: DataUrl
    """Data set directory."""
    device: Operational[Device] = "auto"
    """Where a network runs."""
    out: Operational[str]
    """Directory of the explanations."""

    def work(self, origin: Origin, report: Report) -> None:
        """Explain, and commit a table for each period."""
        opened = {url: load(url) for url in self.bundles}
        selection = with_tokens_of(select(Split(data=(self.data,)), labelled=False), opened.values())
        names = open_dataset(self.data).manifest.names_of_categories
        reasoner = Reasoner.from_bundles(opened, selection.features, names, device=choose_device(self.device))
        with storage.Commit(self.out) as commit, progress("explain", selection.n_documents) as advance:
            for period, row_groups in selection.row_groups.by_period().items():
                with (
                    commit.file(f"period={period}/explanations.parquet") as path,
                    pq.ParquetWriter(path, as_table([]).schema) as writer,
                ):
                    for part in read_named(selection.only(row_groups)):
                        writer.write_table(as_table(reasoner.explain_firsts(part.groups, part.ids, _DEPTH)))
                        advance(part.groups.n_documents)
            commit.finish({"made_by": origin})
        report({"stage": self.stage, "queries": selection.n_groups})
