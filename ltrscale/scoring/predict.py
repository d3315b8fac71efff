"""Prediction: raw rows in, ranked items out. It reads rows in the same way as the training data, then scores them.

    OUT-data/   the rows as a data set, with quarantine and accounting (`ltrscale.ingest.prepare`)
    OUT/        the ranked items, committed period by period (`ltrscale.data.dataset.scores`, layout `items`)
    OUT-explained/  why the first item of each query is first, if the job asks for it (`ExplainItems`)

The stages skip what is up to date, so a repeated command continues where it stopped. Between the first two the
periods to rank are compared with training, and refused if the job asks for it.

A bundle records what the rows of its training periods look like (its `Reference`). `find_skew` compares
other rows with it by shares: of missing values, of categories that training lacks, of values outside training's range.
A share is reported if it is at least 1%, at least twice training's in odds, and not due to chance. Ranges widen as logs
grow, so values outside them are reported from 10%, or from 5% if they are off by more than the range's width.

The documents of a list often share a value, so a list counts as one observation, whatever its length. A share is not
due to chance if it and training's, each seen in its number of lists, are a million times likelier than any one share
for both (likelihood ratio; Wilks 1938).

So a few lists show only large differences. Against 10,000 lists of training it takes 2 lists to see that a feature is
missing in all rows, 17 to see that half of its values are above 95% of training's, and 168 for a new category in 2% of
the rows.

Shapes: N rows (documents), Q groups, Q1 = Q + 1 offsets, F features, V codes of a vocabulary.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import pyarrow.parquet as pq
from pydantic import Field
from torch import Tensor

from ltrscale import bundle as bundles
from ltrscale import storage
from ltrscale.arrays import Floats
from ltrscale.bundle import Bundle
from ltrscale.bundle.explanations import Reasoner, as_table
from ltrscale.bundle.reference import QUANTILES, FeatureReference, Reference, has_value, sample_of
from ltrscale.config import Operational, Strict, validate
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
from ltrscale.stages.runs import check_replaceable, holding
from ltrscale.stages.stage import BundleUrls, DataUrl, Origin, Stage

SkewKind = Literal["missing", "category", "range", "scale"]
_FEW = 20
"""Fewer lists show almost nothing."""
_SHARE, _ODDS, _EVIDENCE = 0.01, 2.0, math.log(1e6)
_NEAR, _FAR = 0.1, 0.05
_TAIL = QUANTILES[1]


class Skew(Strict):
    """A feature that differs from training; as text it is one line with the figures."""

    feature: str
    kind: SkewKind
    """`missing`: its values are missing more often; `category`: categories that training lacks; `range`: values below
    or above all of training's; `scale`: at least half of its values are below or above 95% of training's."""
    now: float
    """The share of the rows, or of those with a value for `range`; for `scale` the median."""
    training: float
    """The same of training."""
    said: str

    def __str__(self) -> str:
        """One line with the figures."""
        return f"{self.feature}: {self.said}"


def skew_of(data: str, period: str, opened: Sequence[Bundle]) -> list[Skew]:
    """How the features of a period differ from the bundles' training data, each difference once."""
    selection = select(Split(data=(data,), periods=(period,)), labelled=False)
    names, skews = open_dataset(data).manifest.categories, dict[tuple[str, SkewKind], Skew]()
    for bundle in opened:
        groups = sample_of(selection.serving(bundle.features, whose=bundle.url))
        if groups is None or bundle.reference is None:
            continue
        if groups.n_groups < _FEW:
            log.info("predict: %s: %d lists are too few to compare with training", period, groups.n_groups)
        for each in find_skew(bundle.reference, groups.features_NF, lists=groups.n_groups, names=names):
            skews.setdefault((each.feature, each.kind), each)
    return [*skews.values()]


def find_skew(
    reference: Reference,
    features_NF: Floats | Tensor,
    *,
    lists: int,
    names: Mapping[str, Mapping[str, int]] | None = None,
) -> list[Skew]:
    """The features of some rows that differ from training, those that differ most first.

    Args:
        reference: the reference of a bundle.
        features_NF: raw features in the reference's order, NaN or filled as in training where missing; categories as
            codes.
        lists: number of lists that the rows come from. A few show only large differences, one shows none; see above.
        names: the codes of categories by their texts, by feature, to name a new one.

    Raises:
        InputError: the rows have another number of features.

    Example:
        >>> import torch
        >>> from ltrscale.batch import QueryGroups
        >>> from ltrscale.data.dataset.manifest import Feature
        >>> groups = QueryGroups(torch.arange(400.0)[:, None] % 50, torch.arange(0, 401, 4))
        >>> reference = Reference.from_groups(groups, [Feature(name="price")])
        >>> for finding in find_skew(reference, groups.features_NF * 100, lists=100):
        ...     print(finding)
        price: 98% of its values are outside training's range of 0 to 49; the median is 2450, in training 25
    """
    rows_NF = np.asarray(features_NF, dtype=np.float32)
    if rows_NF.ndim != 2 or rows_NF.shape[1] != len(reference.features):
        raise InputError(
            f"features_NF has the shape {rows_NF.shape}, and the reference has {len(reference.features)} features; "
            "give one column for each, in its order"
        )
    findings: list[tuple[float, Skew]] = []
    for feature, values_N in zip(reference.features, rows_NF.T, strict=True):
        code_names = (names or {}).get(feature.name, {})
        for distance, kind, now, training, message in _compared(
            feature, values_N, (reference.lists, lists), code_names
        ):
            skew = Skew(feature=feature.name, kind=kind, now=now, training=training, said=message)
            findings.append((distance, skew))
    return [skew for _, skew in sorted(findings, key=lambda pair: -pair[0])]


_Findings = Iterator[tuple[float, SkewKind, float, float, str]]
"""Distance of a feature from training, and the fields of its `Skew`."""


def _compared(
    feature: FeatureReference, values_N: Floats, lists: tuple[int, int], names: Mapping[str, int]
) -> _Findings:
    if not len(values_N):
        return
    present_N = values_N[has_value(values_N, feature.fill)]
    missing = 1 - len(present_N) / len(values_N)
    if distance := _far(missing, feature.missing, lists):
        filled = "" if feature.fill is None else f", or {feature.fill:.4g} as where it is missing,"
        message = f"missing{filled} in {_percent(missing)} of the documents, in training in {_percent(feature.missing)}"
        yield distance, "missing", missing, feature.missing, message
    if len(present_N) and feature.kind == "categorical":
        yield from _code_findings(feature, present_N, len(values_N), lists, names)
    elif len(present_N) and feature.quantiles:  # without quantiles training had no value, so there is no range
        yield from _range_findings(feature, present_N, (lists[0], round(lists[1] * (1 - missing))))


def _code_findings(
    feature: FeatureReference,
    present_N: Floats,
    rows: int,
    lists: tuple[int, int],
    names: Mapping[str, int],
) -> _Findings:
    codes_V, counts_V = np.unique(present_N.astype(np.int64), return_counts=True)
    new_V = ~np.isin(codes_V, feature.codes)
    share = float(counts_V[new_V].sum() / rows)
    if distance := _far(share, feature.new, lists):
        code = int(codes_V[new_V][counts_V[new_V].argmax()])
        text = {number: text for text, number in names.items()}.get(code, code)
        message = (
            f"{_percent(share)} of the documents have a category that training lacks, most often {text!r}; "
            f"{_percent(feature.new)} were to be expected"
        )
        yield distance, "category", share, feature.new, message


def _range_findings(feature: FeatureReference, present_N: Floats, lists: tuple[int, int]) -> _Findings:
    least, low, middle, high, most = feature.quantiles
    median = float(np.median(present_N))
    medians = f"the median is {median:.4g}, in training {middle:.4g}"
    by_N = np.maximum(least - present_N, present_N - most)
    outside, far_outside = float((by_N > 0).mean()), float((by_N > most - least).mean())
    distance = _far(outside, 0.0, lists)
    if distance and (outside >= _NEAR or far_outside >= _FAR):
        message = (
            f"{_percent(outside)} of its values are outside training's range of {least:.4g} to {most:.4g}; {medians}"
        )
        yield distance, "range", outside, 0.0, message
        return
    below, above = float((present_N < low).mean()), float((present_N > high).mean())
    if (distance := _far(max(below, above), _TAIL, lists)) and max(below, above) >= 0.5:
        side = f"below {low:.4g}" if below > above else f"above {high:.4g}"
        message = f"{_percent(max(below, above))} of its values are {side}, in training {_percent(_TAIL)}; {medians}"
        yield distance, "scale", median, middle, message


def _far(share: float, training: float, lists: tuple[int, int]) -> float:
    """How far a share is from training's, in nats per list; 0 if not to report. `lists`: training's and the rows'."""
    m, n = lists
    p = (training * m + 1) / (m + 2)  # add-one smoothing: what training has not shown may still happen
    if share < _SHARE or share * (1 - p) < _ODDS * p * (1 - share):
        return 0.0
    common = (training * m + share * n) / (m + n)
    evidence = m * _divergence(training, common) + n * _divergence(share, common)
    return _divergence(share, p) if evidence > _EVIDENCE else 0.0


def _divergence(share: float, other: float) -> float:
    """Kullback-Leibler divergence of two shares; `other` may be 0 or 1 only if both are."""
    return sum(p * math.log(p / q) for p, q in ((share, other), (1 - share, 1 - other)) if p > 0)


def _percent(share: float) -> str:
    """A share as a percentage in two digits."""
    return f"{100 * share:.2g}%" if share < 0.995 else "100%"


_SAID = 10
"""Most features of a period to log one by one."""


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
        reading = self.reading()
        self._check_columns(reading)
        RowsJob(out=self.data, prepare=reading, ray=self.ray).run()
        settings = {name: getattr(self, name) for name in ScorerConfig.model_fields}
        job = ScoreJob(**settings, out=self.out, data=self.data, layout="items", meta=self.meta)
        self._compare([*job.plan().files])
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

    def reading(self) -> PrepareConfig:
        """The settings of `prepare` that find the features of all bundles in the rows.

        Raises:
            InputError: a bundle is missing or cannot score, or it is not known how its training data were read.
        """
        opened = [bundles.load(url) for url in self.bundles]
        for each in opened:
            each.scorer()  # raises for a bundle that cannot score, before any row is read
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

    def _compare(self, periods: Sequence[str]) -> None:
        """Log how the rows of some periods differ from training, or refuse them."""
        opened = [bundles.load(url) for url in self.bundles]
        by_period = {period: skew_of(self.data, period, opened) for period in periods}
        refused = [
            line
            for period, findings in by_period.items()
            for line in _skew_lines(period, [each for each in findings if self._refuses(each)])
        ]
        if refused:
            raise Refused([*refused, "nothing is ranked; mend the rows, or set refuse=false to rank them as they are"])
        for period, findings in by_period.items():
            for line in _skew_lines(period, findings):
                log.warning("predict: %s", line)

    def _refuses(self, finding: Skew) -> bool:
        return self.refuse if isinstance(self.refuse, bool) else finding.kind in self.refuse

    def _check_columns(self, reading: PrepareConfig) -> None:
        """Refuse the rows if their first file lacks columns; the error names them all."""
        first = list_inputs(reading.inputs)[0].url
        if missing := reading.source.missing_columns(first):
            raise InputError(
                f"{first}: no column {', '.join(missing)}, which {self.name} needs; name columns that have other names "
                "there under source.columns; features must have the names of the training data"
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


def _skew_lines(period: str, findings: Sequence[Skew]) -> list[str]:
    """A line for each of the first findings, and one with the number of others."""
    ending = [f"{period}: {len(findings) - _SAID} more"] if len(findings) > _SAID else []
    return [f"{period}: {each}" for each in findings[:_SAID]] + ending


_DEPTH = 10


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
        opened = {url: bundles.load(url) for url in self.bundles}
        selection = bundles.with_tokens_of(select(Split(data=(self.data,)), labelled=False), opened.values())
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
