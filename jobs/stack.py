r"""Train a stack: LightGBM over the out-of-fold scores of several models.

After `make compare`:

  python -m jobs.stack --set out=runs/stack \
      --set 'members={trees: {kind: gbdt}, network: {kind: neural}}' \
      --set 'splits.train={data: runs/demo/data, periods: 2026-W01..2026-W05}' \
      --set 'splits.validation={data: runs/demo/data, periods: 2026-W06}' \
      --set 'splits.test={data: runs/demo/data, periods: 2026-W07..2026-W08}'
"""

from jobs.cli import Command, Job, main


def _job() -> Job:
    from ltrscale.experiments.methods.choices import StackJob

    return StackJob, StackJob.run


_KEYS = """
out members members.NAME.gbdt members.NAME.pretrain members.NAME.finetune bundles
splits.train splits.train.data splits.train.periods splits.train.labelled_fraction splits.validation splits.test
stack.features stack.standardise stack.folds
stack.gbdt stack.gbdt.num_trees stack.gbdt.learning_rate stack.gbdt.num_leaves stack.gbdt.min_data_in_leaf
seed workers.number
"""
COMMAND = Command("stack", _job, __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
