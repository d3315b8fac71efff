r"""Compare rankers by simulated interleaving: credit, lift, and the impressions that it takes to see it.

After `make compare`:

  python -m jobs.interleave --set out=runs/interleaved \
      --set 'models={gbdt: runs/demo/seed-0/gbdt/model,
                     simsiam: runs/demo/seed-0/simsiam/model}' \
      --set 'test={data: runs/demo/data, periods: 2026-W07..2026-W08}'
"""

from jobs.cli import Command, main, of_class

_KEYS = """
out models scores test test.data test.periods test.labels
impressions user noise max_relevance depth eta metric seed
"""
COMMAND = Command("interleave", of_class("ltrscale.evaluation.interleave:InterleaveJob"), __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
