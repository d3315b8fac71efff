"""Exports of a bundle: files for another program, published only after that program's reader gave the same scores.

A bundle can also go, as it is, into MLflow's model registry: as a `python_function` model without a pickle.

model.*          the model; the files depend on the format
raw_rows.*       the transformer from raw rows to the model's features (`raw`)
history.*.sql    what adds the features of earlier events to raw rows, if the model has any (`raw`)
features.json    the columns that the model reads: order, names, kinds, missing values, numbers of categories
parity.json      number of compared documents, and the largest difference of scores
README.md        how to read these files, for people
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config, Operational, by_kind, validate
from ltrscale.data.dataset.split import Periods, Split
from ltrscale.errors import InputError, without_credentials
from ltrscale.late import Late
from ltrscale.progress import Report, log
from ltrscale.serving.format import FEATURES_FILE, ExportedFeatures, Files, Format
from ltrscale.serving.ltr_plugins import ElasticsearchFormat, OpenSearchFormat
from ltrscale.serving.onnx import OnnxFormat
from ltrscale.serving.trees import LightGBMFormat, TreeliteFormat, XGBoostFormat
from ltrscale.serving.vespa import VespaFormat
from ltrscale.stages.inputs import BundleUrl, dataset_hashes
from ltrscale.stages.mlflow_runs import EXPERIMENT, MLFLOW, client, mlflow_errors, patient, plain_key
from ltrscale.stages.stage import Origin, Settings, Stage
from ltrscale.stages.trackers import numbers

if TYPE_CHECKING:
    from ltrscale import bundle as bundles
    from ltrscale.ingest import mapping
    from ltrscale.serving import columns, parity, raw
else:
    bundles, columns = Late("ltrscale.bundle"), Late("ltrscale.serving.columns")
    parity, raw = Late("ltrscale.serving.parity"), Late("ltrscale.serving.raw")
    mapping = Late("ltrscale.ingest.mapping")

AnyFormat = (
    LightGBMFormat | XGBoostFormat | OnnxFormat | ElasticsearchFormat | OpenSearchFormat | VespaFormat | TreeliteFormat
)

FORMATS: dict[str, Format] = {kind: format_class() for kind, format_class in by_kind(AnyFormat).items()}
"""All formats by their names."""
_MLFLOW = "mlflow"
_LOADER = "ltrscale.api.in_mlflow"
"""The module that MLflow imports to open the model."""
ALIAS = "in_service"
"""The alias of the version that serves."""
if TYPE_CHECKING:
    FormatName = str
    _Target = str
else:
    FormatName = Literal[tuple(FORMATS)]
    _Target = Literal[FormatName, _MLFLOW]

_PARITY, _CARD = "parity.json", "README.md"
_OF_HISTORY = """
Some features are counted from earlier events. `history.duckdb.sql` and `history.bigquery.sql` give the rows of a table
`rows` with these features, which they compute from a table `events`; both have the columns of the log.
"""


class Registry(Config):
    """A model in a registry."""

    name: str = Field(min_length=1)
    """Name of the registered model."""
    store: str | None = None
    """Tracking store and registry, such as sqlite:///mlflow.db or http://host:5000; by default what the environment
    variable LTRSCALE_MLFLOW names."""

    @property
    def uri(self) -> str:
        """The store; raises `InputError` if none is named."""
        if store := self.store or os.environ.get(MLFLOW):
            return store
        raise InputError(f"store: name MLflow's store, such as sqlite:///mlflow.db, or set {MLFLOW}")


class ExportJob(Stage):
    """Export a bundle for a program that serves it, with a description of its features, or to MLflow's registry."""

    stage: ClassVar = "export"
    out: Operational[str]
    """Directory of the export."""
    bundle: BundleUrl
    """Bundle of one model; for MLflow any bundle that scores."""
    to: _Target = "lightgbm"
    """Format: LightGBM's text, XGBoost's UBJ and JSON, an ONNX graph of a network, a model of the Learning to
    Rank plugin of Elasticsearch or OpenSearch, LightGBM's dump for Vespa, or a treelite checkpoint for Triton; `mlflow`
    registers the bundle as it is, as a model that `mlflow.pyfunc` loads, and `out` records its version."""
    registry: Registry | None = None
    """The model in MLflow's registry of which the bundle becomes a version; for `mlflow` alone."""
    raw: str | None = None
    """Raw rows in the form of the log, for the check of `raw_rows.py`: a file, a directory or a pattern. By default the
    inputs that `data` was made from, if they still exist."""
    data: str | None = None
    """Data set directory; scores are compared on its documents, and it has the texts of categories. All formats but
    `mlflow` need it."""
    rows: int = Field(10_000, ge=1)
    """Number of documents to compare scores on; all if there are fewer."""
    tolerance: float | None = Field(None, ge=0)
    """Largest difference of scores that passes, as a share of the largest score (at least 1); by default 1e-9 for
    LightGBM's text and Vespa, which compute in double precision, 1e-4 for ONNX, and 1e-5 for the others."""
    measure: Operational[bool] = False
    """Print the time of one query of 100 documents with the export, on one core of this process: the median and the
    99th percentile, from raw rows to scores, or without such rows from features."""
    periods: Periods = None
    """Periods, ranges or periods counted from the newest, as in a split; all if it is left out."""

    def check(self) -> None:
        """Refuse settings that do not fit the format."""
        if self.to == _MLFLOW:
            if self.registry is None:
                raise InputError("registry: name the model in MLflow's registry, such as --set registry.name=shop")
            if self.measure or self.raw is not None:
                raise InputError(
                    f"{'measure' if self.measure else 'raw'}: mlflow gets the bundle as it is; leave it out"
                )
        elif self.registry is not None:
            raise InputError(f"registry: {self.to} is no model of a registry; leave it out, or set to={_MLFLOW}")
        elif self.data is None:
            raise InputError("data: name the data set on whose documents the scores are compared")

    def identity(self) -> Settings:
        """The format, the registered model, the documents to compare, and the tolerance."""
        settings = self.model_dump(mode="json", include={"to", "registry", "rows", "tolerance", "periods"})
        if self.registry is not None:  # the environment may name the store
            settings["registry"]["store"] = without_credentials(self.registry.uri)
        return settings

    def inputs(self) -> dict[str, str]:
        """Content of the data set, the bundle, and the raw rows if given."""
        raw = {} if self.raw is None else {url: storage.fingerprint(url) for url in storage.list_files(self.raw)}
        return (dataset_hashes([self._split]) if self.data else {}) | super().inputs() | raw

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Publish the files of the format once their scores are compared, or register the bundle."""
        if self.registry is not None:
            version = register_bundle(self.bundle, self.registry)
            with storage.Commit(self.out) as commit:
                commit.finish({"made_by": origin, "name": self.registry.name, "version": version})
            return
        bundle, to = bundles.load(self.bundle), FORMATS[self.to]
        has_items = columns.reading_raw(bundle, [feature.name for feature in bundle.features]) is not None
        if self.raw is not None and not has_items:
            raise InputError(f"raw: {self.bundle} {raw.NO_ITEMS}; leave it out")
        raw_files = raw.raw_files_of(self.raw, self._data) if has_items else []
        files, compared = parity.check_parity(
            to, bundle, self._split, raw_files, rows=self.rows, tolerance=self.tolerance
        )
        _publish(to, files, compared, self.out, made_by=origin)

    def run(self) -> bool:
        """Export unless it is up to date; then measure if `measure` is set."""
        result = super().run()
        if self.measure:
            times = parity.query_times(FORMATS[self.to], self.bundle, self.out, raw=self.raw, data=self._data)
            log.info("measure: %s: %s", self.out, times)
        return result

    @property
    def _data(self) -> str:
        assert self.data is not None  # `check` requires it
        return self.data

    @property
    def _split(self) -> Split:
        return Split(data=(self._data,), periods=self.periods)


def _publish(to: Format, files: Files, compared: "parity.Parity", out: str, *, made_by: Mapping[str, Any]) -> None:
    """Commit the checked files to a directory."""
    features = ExportedFeatures.model_validate_json(files[FEATURES_FILE])
    card = f"""# {to.title}

The model scores documents; higher is better.

{to.use}

{to.inputs(features)}
{to.of_rows if raw.CODE in files else ""}{_OF_HISTORY if raw.HISTORY.format("duckdb") in files else ""}
Before this was published, the scores of a reader that has these files only were compared with the ranker's own on
{compared.documents:,} documents: they were at most {compared.largest_difference:.3g} apart (`parity.json`).
"""
    reports = {_PARITY: (compared.model_dump_json(indent=1) + "\n").encode(), _CARD: card.encode()}
    with storage.Commit(out) as commit:
        commit.write({**files, **reports})
        commit.finish({"made_by": made_by})
    message = "export: %s: the scores of %s documents are at most %.2g from the bundle's"
    log.info(message, out, f"{compared.documents:,}", compared.largest_difference)
    if compared.raw is not None:
        message = "export: %s: raw_rows.py makes the features of %s rows of %s as prepare does; scores differ by %.2g"
        log.info(message, out, f"{compared.raw.documents:,}", compared.raw.file, compared.raw.largest_difference)


def register_bundle(url: str, registry: Registry) -> str:
    """Register a bundle as a new version of a model, with its metrics and settings; returns the version.

    Raises:
        InputError: the bundle is missing or cannot score, no store is named, MLflow is not installed, or it refuses.
        UnavailableError: MLflow does not answer.
    """
    store = registry.uri
    bundle, files, content_hash = bundles.load(url), bundles.bundle_files(url), bundles.content_hash(url)
    bundle.scorer()  # raises if it cannot score
    signature = _signature(bundle)
    client(store)
    import mlflow

    mlflow.set_tracking_uri(store)
    mlflow.set_registry_uri(store)
    with storage.scratch.directory() as folder, ExitStack() as stack:
        for name, content in files.items():
            storage.write_bytes(str(folder / "bundle" / name), content)
        stack.enter_context(mlflow_errors(f"{registry.name}: {url} cannot be registered"))
        stack.enter_context(patient())
        mlflow.set_experiment(os.environ.get(EXPERIMENT, "ltrscale"))
        stack.enter_context(mlflow.start_run(run_name=registry.name))
        mlflow.log_metrics({plain_key(name): value for name, value in numbers(bundle.metrics).items()})
        mlflow.set_tags({"bundle": url, "content_hash": content_hash})
        mlflow.log_dict(dict(bundle.config), "training.json")
        logged = mlflow.pyfunc.log_model(
            name="model",
            loader_module=_LOADER,
            data_path=str(folder / "bundle"),
            pip_requirements=["ltrscale"],
            signature=signature,
            registered_model_name=registry.name,
        )
    version = str(logged.registered_model_version)
    log.info("register: %s is version %s of %s in %s", url, version, registry.name, without_credentials(store))
    return version


def put_alias(registry: Registry, version: str) -> None:
    """Point the alias `in_service` of a registered model to this version.

    Raises:
        InputError: no store is named, or the registry refuses.
        UnavailableError: MLflow does not answer.
    """
    store = client(registry.uri)
    with mlflow_errors(f"{registry.name}: its alias {ALIAS} cannot name version {version}"):
        store.set_registered_model_alias(registry.name, ALIAS, version)


def _signature(bundle: "bundles.Bundle") -> Any:
    """The columns of the raw log that scoring reads, and the scores; None if no query column is known."""
    # columns of any type: MLflow would refuse whole numbers where the log had fractions
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema
    from mlflow.types.schema import AnyType

    found, _ = columns.uses_of(bundle)
    if "query" not in found:
        return None
    scoring = columns.uses_in_scoring(found, bundle, bundle.url)
    uses = validate(mapping.ColumnMapping, scoring, bundle.url)
    names = [*(name for name, _ in uses.named()), *uses.features, *uses.categorical, *uses.dates, *uses.vector_columns]
    inputs = [ColSpec(AnyType(), name) for name in dict.fromkeys(names) if name != columns.ROW]
    return ModelSignature(Schema(inputs), Schema([ColSpec("double")]))
