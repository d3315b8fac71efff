r"""Export a bundle for a program that serves it, after checking that its reader gives equal scores.

After `make compare`:

  python -m jobs.export --to lightgbm --set out=runs/export/lightgbm \
      --set bundle=runs/demo/seed-0/gbdt/model --set data=runs/demo/data

Into MLflow's model registry, as a model that `mlflow.pyfunc` loads:

  python -m jobs.export --to mlflow --set out=runs/export/mlflow \
      --set bundle=runs/demo/seed-0/gbdt/model \
      --set registry.name=demo --set registry.store=sqlite:///runs/mlflow.db
"""

from jobs.cli import Command, Job, main


def _job() -> Job:
    from ltrscale.serving.export import ExportJob

    return ExportJob, ExportJob.run


COMMAND = Command("export", _job, __doc__, flags="to")

if __name__ == "__main__":
    main(COMMAND)
