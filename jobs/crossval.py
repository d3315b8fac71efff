r"""Compare methods on each fold of a collection: run the pipeline fold by fold, then summarise all folds.

In the pipeline's config `{fold}` stands for the name of the fold. Stages that are up to date are skipped.

  python -m jobs.crossval --config jobs/configs/results/crossval-letor.yaml \
      --set 'folds=[Fold1, Fold2]' --set out=runs/two-folds
"""

from jobs.cli import Command, Job, main


def _job() -> Job:
    from ltrscale.experiments.crossval import CrossvalJob

    return CrossvalJob, CrossvalJob.run


_KEYS = """
out folds pipeline.prepare pipeline.data pipeline.relabel
pipeline.splits.train.periods pipeline.splits.train.labelled_fraction pipeline.splits.validation.periods
pipeline.splits.test.periods
pipeline.seeds pipeline.methods pipeline.methods.NAME.gbdt pipeline.methods.NAME.pretrain.method
pipeline.methods.NAME.pretrain.epochs pipeline.methods.NAME.finetune.loss
pipeline.methods.NAME.finetune.network.encoder pipeline.methods.NAME.finetune.epochs
pipeline.evaluate.baseline pipeline.evaluate.ndcg_at pipeline.evaluate_on pipeline.workers.number
"""
COMMAND = Command("crossval", _job, __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
