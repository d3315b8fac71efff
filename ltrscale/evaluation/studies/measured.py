"""The stages that find the test groups of a study, and measure one bundle on them: every metric of every group.

Metrics on every test group are stored once for each bundle. Groups that leave every metric undefined are not scored;
a process keeps the others in memory for the next bundle.

Shapes: N documents, Q groups, M metrics.
"""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from ltrscale.arrays import Doubles, Ints
from ltrscale.batch import QueryGroups
from ltrscale.bundle import load, with_tokens_of
from ltrscale.config import Operational
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import SplitsWithTest
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.scored import finite
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.evaluate import fit_detector
from ltrscale.evaluation.measure.measuring import Measuring, values_of
from ltrscale.evaluation.measure.outliers import OutlierConfig, OutlierDetector
from ltrscale.evaluation.measure.report import GROUPS, EvaluatedData, read_group_rows
from ltrscale.evaluation.measure.settings import EvaluateSettings
from ltrscale.evaluation.measure.slices import ALL, OUTLIERS, Slicer
from ltrscale.origin import digest
from ltrscale.progress import Report
from ltrscale.ranking.metric import Metric
from ltrscale.reports.findings import Findings, commit_report
from ltrscale.stages.inputs import BundleUrl, bundle_hashes, dataset_hashes
from ltrscale.stages.provenance import check_unseen
from ltrscale.stages.stage import Origin, Settings, Stage, with_splits

_KEPT_BYTES = 1 << 30
"""A process keeps test groups of at most this size in memory; it reads larger ones again for each bundle."""


class TestedOn(Findings):
    """The test groups of a study, beside `groups.parquet` with a row for each: gid, period, documents, outlier."""

    __test__: ClassVar = False  # for pytest
    called: ClassVar = "a description of test groups"
    made_by_job: ClassVar = "jobs.study"
    test: EvaluatedData
    detector: OutlierDetector


class Measured(Findings):
    """One bundle on the test groups, beside `groups.parquet` with gid and every metric of each group that has one."""

    called: ClassVar = "the metrics of a bundle"
    made_by_job: ClassVar = "jobs.study"
    metrics: tuple[str, ...]
    validation: dict[str, float]
    """Validation metrics as training reported them, by the metric's name."""
    labelled_groups: int | None
    """Number of labelled groups it was trained on; None if the bundle does not state it."""
    documents: int
    """Documents scored."""
    seconds: float
    """Time to score them, without reading."""


class TestGroups(Stage):
    """Describe the test groups."""

    __test__: ClassVar = False  # for pytest
    stage: ClassVar = "study_test"
    splits: SplitsWithTest
    evaluate: EvaluateSettings

    def check(self) -> None:
        """Refuse splits that overlap."""
        check_disjoint(self.splits)

    def own_settings(self) -> OutlierConfig:
        """Settings of outliers."""
        return self.evaluate.outliers

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Fit the outlier rules on the validation split, and commit which labelled test groups are outliers.

        Raises:
            InputError: a split has no group to read, or `evaluate.outliers` names an unknown feature.
        """
        settings, test = self.evaluate, select(self.splits.test, labelled=True)
        detector = fit_detector(settings, self.splits.validation, test)
        measuring = Measuring(
            models=(),
            scores={},
            slicer=Slicer.make({}, (), detector=detector, selection=test, relevant_from=settings.relevant_from),
            metrics=partial(values_of, metrics={}, settings=settings),
            features=test.features,
            docs_per_batch=settings.docs_per_batch,
        )
        names = ["gid", "period", "documents", "outlier"]
        rows = [
            pa.table(
                [part.gids_Q, pa.repeat(part.period, len(part.gids_Q)), part.documents_Q, part.slices[OUTLIERS]], names
            )
            for part in measuring.on(test)
        ]
        table = pa.concat_tables(rows)
        about = EvaluatedData(
            data=self.splits.test.data,
            periods=tuple(table["period"].unique().to_pylist()),
            hash=test.hash,
            groups=len(table),
            documents=pc.sum(table["documents"]).as_py(),
            slices={ALL: len(table), OUTLIERS: pc.sum(table["outlier"]).as_py()},
        )
        commit_report(self.out, TestedOn(test=about, detector=detector), made_by=origin, tables={GROUPS: table})


class Measurement(Stage):
    """Measure a model on the test groups."""

    stage: ClassVar = "measure"
    bundle: BundleUrl
    splits: SplitsWithTest
    evaluate: EvaluateSettings
    threads: Operational[int]

    def check(self) -> None:
        """Refuse a bundle that has seen test periods."""
        check_unseen(self.bundle, self.splits.test)

    def identity(self) -> Settings:
        """The metrics with the settings that their names leave out, and the test periods."""
        always = self.evaluate.model_dump(mode="json", include={"relevant_from", "leave_out_constant"})
        # without defaults, so that measurements without these keys stay up to date
        changed = self.evaluate.model_dump(mode="json", include={"grades", "gains"}, exclude_defaults=True)
        return with_splits({"metrics": [*self.evaluate.measured], **always, **changed}, self.splits.test)

    def inputs(self) -> dict[str, str]:
        """Content of the data sets and the bundle."""
        return dataset_hashes([self.splits.test]) | bundle_hashes([self.bundle])

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Score the labelled test groups, and commit the metrics of every group that has one.

        Raises:
            InputError: the bundle was made for other features, gives scores that are not finite, or no test group
                defines a metric.
        """
        metrics, bundle = self.evaluate.measured, load(self.bundle)
        test = with_tokens_of(select(self.splits.test, labelled=True), [bundle])
        score = bundle.scorer(features=test.features, threads=self.threads)
        values, gids, documents, seconds = [], [], 0, 0.0
        for groups in _defined_groups(test, metrics, self.evaluate):
            assert groups.ids_Q is not None
            start = time.perf_counter()
            scores_N = score(groups)
            seconds, documents = seconds + time.perf_counter() - start, documents + groups.n_documents
            values.append(values_of(finite(scores_N, self.bundle), groups, metrics, self.evaluate).T.numpy())
            gids.append(groups.ids_Q.numpy())
        if not values:
            data = ", ".join(self.splits.test.data)
            raise InputError(f"{data}: no test group has a relevant document; choose other periods")
        columns = [pa.array(values_Q, mask=np.isnan(values_Q)) for values_Q in np.concatenate(values).T]
        measured = Measured(
            metrics=tuple(metrics),
            validation={
                name.removeprefix("validation_"): float(value)
                for name, value in bundle.metrics.items()
                if name.startswith("validation_") and isinstance(value, int | float)
            },
            labelled_groups=bundle.count("labelled_groups"),
            documents=documents,
            seconds=round(seconds, 4),
        )
        table = pa.table([np.concatenate(gids), *columns], names=["gid", *metrics])
        commit_report(self.out, measured, made_by=origin, tables={GROUPS: table})


_kept: dict[str, list[QueryGroups]] = {}
"""The groups that this process scored last, by key."""


def _defined_groups(
    test: Selection, metrics: Mapping[str, Metric], settings: EvaluateSettings
) -> Iterator[QueryGroups]:
    """The groups that define a metric; from memory, if they fit there and this process has read them."""
    read = [feature.name for feature in test.features], [field.column for field in test.tokens]
    key = digest([test.hash, *read, settings.model_dump(mode="json")])
    if key in _kept:
        yield from _kept[key]
        return
    _kept.clear()  # first, so that memory never holds the old groups beside the new ones
    keep: list[QueryGroups] = []
    size = 0
    for batch in iterate(test, docs_per_batch=settings.docs_per_batch):
        # which groups define a metric depends on the labels alone
        values_MQ = values_of(torch.zeros(batch.n_documents), batch, metrics, settings)
        defined = batch.select((~values_MQ.isnan()).any(dim=0).nonzero().flatten())
        if defined.n_groups:
            size += sum(values.nbytes for values in defined.tensors())
            if size <= _KEPT_BYTES:
                keep.append(defined)
            else:
                keep.clear()
            yield defined
    if size <= _KEPT_BYTES:
        _kept[key] = keep


def read_outliers(url: str) -> dict[int, bool]:
    """Whether each test group is an outlier, by gid, as `TestGroups` committed it."""
    table = read_group_rows(url, ["gid", "outlier"])
    return dict(zip(table["gid"].to_pylist(), table["outlier"].to_pylist(), strict=True))


def read_values(url: str, metrics: tuple[str, ...]) -> tuple[Ints, Doubles]:
    """The gids [Q] and the metrics [Q, M], NaN where undefined, as `Measurement` committed them."""
    table = read_group_rows(url, ["gid", *metrics])
    return table["gid"].to_numpy(), np.stack([table[name].to_numpy() for name in metrics], axis=1)
