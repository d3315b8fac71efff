r"""Search over the settings of a job: trees, pretraining, or finetuning. An interrupted search is resumed.

After `make compare`:

  python -m jobs.tune --set out=runs/search --set trials=5 \
      --set job.kind=gbdt \
      --set 'space={gbdt.num_leaves: {low: 4, high: 64, integer: true}}' \
      --set 'job.splits={
          train: {data: runs/demo/data, periods: 2026-W01..2026-W05},
          validation: {data: runs/demo/data, periods: 2026-W06},
          test: {data: runs/demo/data, periods: 2026-W07..2026-W08}}'
"""

from jobs.cli import Command, main, of_class

_KEYS = """
out job job.splits job.gbdt job.pretrain job.finetune job.pretrained
space space.NAME.low space.NAME.high space.NAME.log space.NAME.integer space.NAME.choices space.NAME.when
trials concurrent search.kind search.seed search.startup asha cpus gpus fresh
"""
COMMAND = Command("tune", of_class("ltrscale.tuning.tune:TuneJob"), __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
