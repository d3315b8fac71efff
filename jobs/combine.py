r"""Combine several finetuned rankers into one: by their mean score, or by a linear layer over their embeddings.

After `make demo`:

  python -m jobs.combine --set out=runs/both --set combine.how=concat \
      --set 'bundles=[runs/demo/seed-0/simclr_rank/model,
                      runs/demo/seed-0/simsiam/model]' \
      --set 'splits.train={data: runs/demo/data, periods: 2026-W01..2026-W05}' \
      --set 'splits.validation={data: runs/demo/data, periods: 2026-W06}' \
      --set 'splits.test={data: runs/demo/data, periods: 2026-W07..2026-W08}'
"""

from jobs.cli import Command, Job, main


def _job() -> Job:
    from ltrscale.training.combine import CombineJob

    return CombineJob, CombineJob.run


COMMAND = Command(
    "combine",
    _job,
    __doc__,
    keys="""
    out bundles
    splits.train splits.train.data splits.train.periods splits.train.labelled_fraction splits.validation splits.test
    combine.how combine.dropout combine.loss combine.epochs combine.patience combine.validation_metric
    combine.stream.docs_per_batch combine.optimizer.learning_rate combine.seed combine.device workers.number fresh
    """,
)

if __name__ == "__main__":
    main(COMMAND)
