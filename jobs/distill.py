r"""Distil a teacher into trees and a pointwise network: score, train students, evaluate, compare, export.

Steps that are up to date are skipped.

After `make compare`:

  python -m jobs.distill --set out=runs/distilled --set data=runs/demo/data \
      --set teacher=runs/demo/seed-0/simclr_rank/model \
      --set 'students={trees: {kind: regression}, network: {kind: mlp}}' \
      --set 'splits={
          train: {periods: 2026-W01..2026-W05},
          validation: {periods: 2026-W06}, test: {periods: 2026-W07}}'
"""

from jobs.cli import Command, main, of_class

_KEYS = """
out data teacher scores
students students.NAME.trees students.NAME.finetune student_fraction
splits.train splits.train.periods splits.train.labelled_fraction splits.validation splits.test
direct direct.num_trees direct.learning_rate direct.num_leaves
evaluate.ndcg_at ray workers.number
"""
COMMAND = Command("distill", of_class("ltrscale.experiments.distill:DistillJob"), __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
