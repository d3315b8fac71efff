r"""Pretrain an encoder on all documents of a split, without labels.

After `make compare`:

  python -m jobs.pretrain --set out=runs/encoder \
      --set train.data=runs/demo/data --set train.periods=2026-W01..2026-W05
"""

from jobs.cli import Command, Job, main


def _job() -> Job:
    from ltrscale.training.pretrain import PretrainJob

    return PretrainJob, PretrainJob.run


_KEYS = """
out train.data train.periods
pretrain.method pretrain.augment pretrain.mask pretrain.preset
pretrain.network.encoder pretrain.network.transform.numeric
pretrain.epochs pretrain.stream.docs_per_batch pretrain.stream.streams
pretrain.optimizer.learning_rate pretrain.optimizer.weight_decay pretrain.optimizer.schedule
pretrain.seed pretrain.device pretrain.precision pretrain.keep_every
workers.number workers.gpus fresh
"""
COMMAND = Command("pretrain", _job, __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
