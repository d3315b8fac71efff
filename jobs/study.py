r"""Study methods over numbers of labelled groups: from which number on does which method pay?

Models that are up to date are skipped; `summary/report.md` is written anew while models arrive. On the data set that
jobs.prepare makes with prepare-mq2008.yaml:

  python -m jobs.study --config jobs/configs/start/study-mq2008.yaml \
      --workers 2 --set out=runs/mine
"""

from jobs.cli import Command, main, of_class

_KEYS = """
out data splits.train.periods splits.validation.periods splits.test.periods
grid grid.0.labelled grid.0.draws grid.0.pretrainings grid.0.methods
methods methods.NAME.gbdt methods.NAME.space methods.NAME.pretrain.method
methods.NAME.pretrain.augment methods.NAME.pretrain.epochs methods.NAME.pretrained_as methods.NAME.finetune.loss
methods.NAME.finetune.network.encoder methods.NAME.finetune.epochs
control evaluate.baseline evaluate.ndcg_at workers.number
"""
COMMAND = Command("study", of_class("ltrscale.experiments.study:StudyJob"), __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
