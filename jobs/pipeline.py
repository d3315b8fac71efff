r"""From raw log to evaluated comparison: prepare, train every method with every seed, evaluate.

Stages that are up to date are skipped. With `folds` it runs on each fold of a collection, where `{fold}` in a text
stands for the name of the fold, and summarises all folds.

  python -m jobs.pipeline --config jobs/configs/start/demo.yaml \
      --set out=runs/mine --set 'seeds=[0]'
  python -m jobs.pipeline --config jobs/configs/results/crossval-letor.yaml \
      --set 'folds=[Fold1, Fold2]' --set out=runs/two-folds
"""

from jobs.cli import Command, main, of_class

_KEYS = """
out folds data prepare relabel
splits.train.periods splits.train.labelled_fraction splits.validation.periods splits.test.periods splits.gap
seeds methods methods.NAME.gbdt methods.NAME.pretrain.method methods.NAME.pretrain.augment
methods.NAME.pretrain.epochs methods.NAME.pretrained_as methods.NAME.finetune.loss
methods.NAME.finetune.network.encoder methods.NAME.finetune.epochs
evaluate.baseline evaluate.ndcg_at evaluate_on refit.methods workers.number
"""
COMMAND = Command("pipeline", of_class("ltrscale.experiments.pipeline:PipelineJob"), __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
