"""Registers a bundle in MLflow's model registry, as a `python_function` model without a pickle."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config, validate
from ltrscale.errors import InputError, without_credentials
from ltrscale.late import Late
from ltrscale.progress import log
from ltrscale.stages.mlflow_runs import EXPERIMENT, MLFLOW, client, mlflow_errors, patient, plain_key
from ltrscale.stages.trackers import numbers

if TYPE_CHECKING:
    from ltrscale import bundle as bundles
    from ltrscale.ingest import mapping
    from ltrscale.serving import columns
else:
    bundles = Late("ltrscale.bundle")
    mapping, columns = Late("ltrscale.ingest.mapping"), Late("ltrscale.serving.columns")

_LOADER = "ltrscale.api.in_mlflow"
"""The module that MLflow imports to open the model."""
ALIAS = "in_service"
"""The alias of the version that serves."""


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


def _signature(bundle: bundles.Bundle) -> Any:
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
