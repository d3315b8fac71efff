r"""Register a bundle in MLflow's model registry, as a model that `mlflow.pyfunc` loads.

After `make compare`:

  python -m jobs.register --set store=sqlite:///runs/mlflow.db --set name=demo \
      --set bundle=runs/demo/seed-0/gbdt/model
"""

from jobs.cli import Command, Job, main


def _job() -> Job:
    from ltrscale.serving.register import RegisterJob

    return RegisterJob, RegisterJob.run


COMMAND = Command("register", _job, __doc__)

if __name__ == "__main__":
    main(COMMAND)
