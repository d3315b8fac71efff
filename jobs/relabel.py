r"""Simulate or clean labels, or append features of exact match: derive a data set from one that jobs.prepare made.

After `make compare`:

  python -m jobs.relabel --set data=runs/demo/data --set out=runs/few-labels \
      --set 'relabel.steps=[{kind: labelled_fraction, fraction: 0.1}]'

Of a data set with tokens of queries and documents:

  python -m jobs.relabel --config jobs/configs/data/match-nfcorpus.yaml
"""

from jobs.cli import Command, main, of_class

_KEYS = """
out data relabel.steps relabel.steps.0.periods relabel.steps.0.fraction
relabel.steps.0.tau relabel.steps.0.documents relabel.steps.0.copies relabel.steps.0.user relabel.steps.0.ranking
relabel.steps.0.jitter relabel.steps.0.depth relabel.steps.0.alpha relabel.steps.0.delta relabel.steps.0.extra
relabel.steps.0.counted relabel.steps.0.statistics relabel.seed
"""
COMMAND = Command("relabel", of_class("ltrscale.derive.relabel:RelabelJob"), __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
