"""The first weekly.yaml of a log: what `jobs.weekly` does with each new period, with what each choice means."""

from ltrscale import storage
from ltrscale.experiments.first.pipeline import plain_yaml

_METHOD = "trees"


def weekly_text(out: str, unit: str) -> str:
    """The config for the log whose other configs are in a directory, by periods of a unit such as `week`."""
    places = {name: storage.join(out, name) for name in ("weekly", "pipeline.yaml", "weekly.yaml")}
    return _WEEKLY.format(
        out=plain_yaml(places["weekly"]),
        pipeline=plain_yaml(places["pipeline.yaml"]),
        config=plain_yaml(places["weekly.yaml"]),
        production=plain_yaml(storage.join(out, "models", "seed-0", _METHOD, "model")),
        method=_METHOD,
        unit=unit,
    )


_WEEKLY = """\
# Made by jobs.init: what is done with the rows of each new {unit}, by one command after jobs.pipeline has run once:
#   python -m jobs.weekly --config {config} --inputs NEW_ROWS
# With --dry-run it says what it would do. Status 3: refused, and the old model stays. docs/weeks.md of ltrscale.
out: {out} # service.json there names the model in service
pipeline: {pipeline} # the data set that grows, and the settings of the method
method: {method} # the cheapest to train each {unit}; or another one of the pipeline
production: {production} # in service before the first {unit}: the pipeline's model
max_rejected: null # share of bad rows above which nothing is done; null: as in prepare.yaml

splits: # counted from the new {unit}
  train: {{periods: all but last 2}} # last 26 but 2: forgets what is older
  validation: {{periods: last 1 but 1}}
  test: {{periods: last 1}} # judges both models, which may not have seen it; last 2 has more groups, and is less fresh

bounds:
  refuse: worse # a model that is shown to be worse; unproven: one that is not shown to be as good, which takes groups
  margin: 0.005
  feature_psi: 5 # a feature that differs more from training is taken for a fault, such as prices in cents
  moving: [] # features that may differ, such as the weekday
  expected: [] # features that rank nearly alone, and are known when the list is shown; others of that kind are refused

refit: false # true: what goes into service learns from the newest {unit}s too, after the gate has said yes
export: null # lightgbm, xgboost, elasticsearch, opensearch, vespa or treelite, as for jobs.export
registry: null # {{name: shop, store: "sqlite:///mlflow.db"}} registers it in MLflow
"""
