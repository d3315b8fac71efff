r"""Export a bundle for a program that serves it, after checking that its reader gives equal scores.

After `make compare`:

  python -m jobs.export --to lightgbm --set out=runs/export/lightgbm \
      --set bundle=runs/demo/seed-0/gbdt/model --set data=runs/demo/data

Into MLflow's model registry, as a model that `mlflow.pyfunc` loads:

  python -m jobs.export --to mlflow --set out=runs/export/mlflow \
      --set bundle=runs/demo/seed-0/gbdt/model \
      --set registry.name=demo --set registry.store=sqlite:///runs/mlflow.db
"""

from jobs.cli import Command, main, of_class

COMMAND = Command("export", of_class("ltrscale.serving.export:ExportJob"), __doc__, flags="to")

if __name__ == "__main__":
    main(COMMAND)
