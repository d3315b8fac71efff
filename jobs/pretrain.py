r"""Pretrain an encoder on all documents of a split, without labels, or an in-context network on synthetic problems.

After `make compare`:

  python -m jobs.pretrain --set out=runs/encoder \
      --set train.data=runs/demo/data --set train.periods=2026-W01..2026-W05

With `in_context` it pretrains the network of `kind: in_context`, which ranks by labelled groups that it reads. Three
minutes of a GPU, as for the weights of the package (docs/results/in-context.md);
`methods.NAME.in_context.pretrained=runs/network` of a pipeline then reads with these:

  python -m jobs.pretrain --set out=runs/network \
      --set in_context.minutes=3.2 --set in_context.steps=100000 \
      --set in_context.problems.values=3000000 \
      --set in_context.problems.at_once=64
"""

from jobs.cli import Command, main, of_class

_KEYS = """
out train.data train.periods
pretrain.method pretrain.augment pretrain.mask pretrain.preset
pretrain.network.encoder pretrain.network.transform.numeric
pretrain.epochs pretrain.stream.docs_per_batch pretrain.stream.streams
pretrain.optimizer.learning_rate pretrain.optimizer.weight_decay pretrain.optimizer.schedule
pretrain.seed pretrain.device pretrain.precision pretrain.keep_every
in_context in_context.steps in_context.minutes
workers.number workers.gpus fresh
"""
COMMAND = Command("pretrain", of_class("ltrscale.training.pretrain:PretrainJob"), __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
