r"""Pretrain the network of `kind: in_context`, which ranks by labelled groups that it reads, on synthetic problems.

Three minutes of a GPU, as for the weights of the package (docs/results/in-context.md);
`methods.NAME.in_context.pretrained=runs/network` of a pipeline then reads with these:

  python -m jobs.pretrain_in_context --set out=runs/network \
      --set pretrain.minutes=3.2 --set pretrain.steps=100000 \
      --set pretrain.problems.values=3000000 --set pretrain.problems.at_once=64
"""

from jobs.cli import Command, Job, main


def _job() -> Job:
    from ltrscale.training.pretrain_in_context import PretrainInContextJob

    return PretrainInContextJob, PretrainInContextJob.run


_KEYS = """
out pretrain.steps pretrain.minutes pretrain.problems.values pretrain.problems.at_once pretrain.optimizer.learning_rate
pretrain.validate_every pretrain.keep_every pretrain.start pretrain.seed pretrain.device pretrain.processes fresh
"""
COMMAND = Command("pretrain_in_context", _job, __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
