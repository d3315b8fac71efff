r"""From raw log to evaluated comparison: prepare, train every method with every seed, evaluate.

Stages that are up to date are skipped.

  python -m jobs.pipeline --config jobs/configs/start/demo.yaml \
      --set out=runs/mine --set 'seeds=[0]'
"""

from jobs.cli import Command, Job, main


def _job() -> Job:
    from ltrscale.experiments.pipeline import PipelineConfig

    return PipelineConfig, PipelineConfig.run


_KEYS = """
out data prepare synthetic relabel
splits.train.periods splits.train.labelled_fraction splits.validation.periods splits.test.periods splits.gap
seeds methods methods.NAME.gbdt methods.NAME.pretrain.method methods.NAME.pretrain.augment
methods.NAME.pretrain.epochs methods.NAME.pretrained_as methods.NAME.finetune.loss
methods.NAME.finetune.network.encoder methods.NAME.finetune.epochs
evaluate.baseline evaluate.ndcg_at evaluate_on refit.methods workers.number
"""
COMMAND = Command("pipeline", _job, __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
