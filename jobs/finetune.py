r"""Finetune a ranker on the labelled groups of a split.

After `make compare`:

  python -m jobs.finetune --set out=runs/ranker \
      --set 'splits.train={data: runs/demo/data, periods: 2026-W01..2026-W05}' \
      --set 'splits.validation={data: runs/demo/data, periods: 2026-W06}' \
      --set 'splits.test={data: runs/demo/data, periods: 2026-W07..2026-W08}'
"""

from jobs.cli import Command, main, of_class

_KEYS = """
out pretrained
splits.train splits.train.data splits.train.periods splits.train.labelled_fraction splits.validation splits.test
finetune.loss finetune.context finetune.debias finetune.network.encoder finetune.network.transform.numeric
finetune.head_epochs finetune.epochs finetune.patience finetune.validation_metric
finetune.stream.docs_per_batch finetune.optimizer.learning_rate finetune.optimizer.schedule
finetune.seed finetune.device workers.number workers.gpus fresh
"""
COMMAND = Command("finetune", of_class("ltrscale.training.finetune:FinetuneJob"), __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
