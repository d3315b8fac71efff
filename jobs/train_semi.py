r"""Train trees that also learn from unlabelled groups: by principal components, pseudo-labels, or both.

After `make demo`:

  python -m jobs.train_semi --set out=runs/semi --set semi.pca=10 \
      --set 'splits.train={data: runs/demo/data, periods: 2026-W01..2026-W05}' \
      --set 'splits.validation={data: runs/demo/data, periods: 2026-W06}' \
      --set 'splits.test={data: runs/demo/data, periods: 2026-W07..2026-W08}'
"""

from jobs.cli import Command, Job, main


def _job() -> Job:
    from ltrscale.trees.semi import SemiJob

    return SemiJob, SemiJob.run


COMMAND = Command(
    "train_semi",
    _job,
    __doc__,
    keys="""
    out
    splits.train splits.train.data splits.train.periods splits.train.labelled_fraction splits.validation splits.test
    semi.pca semi.pseudo_labels semi.pseudo_labels.grades semi.first
    semi.gbdt semi.gbdt.num_trees semi.gbdt.learning_rate semi.gbdt.num_leaves semi.gbdt.min_data_in_leaf
    semi.gbdt.early_stopping_rounds semi.gbdt.seed
    """,
)

if __name__ == "__main__":
    main(COMMAND)
