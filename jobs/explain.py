r"""Say why an item stands above another one: what each feature adds to the difference of their scores.

After `make compare`, what drives rank 1 in the queries of a week:

  python -m jobs.explain --bundle runs/demo/seed-0/gbdt/model \
      --data runs/demo/data --set periods=2026-W08 --out runs/explained

With `--set query=ID` it explains the first item of one query, with
`--set 'items=[A, B]'` too why A stands above B. Slices are chosen with
`--set 'where=n_documents > 20'`.

Of a pretrained encoder it reports which features solve the contrast: the loss
with each feature permuted in one of two views.

  python -m jobs.explain --bundle runs/demo/seed-0/simclr_rank/pretrained \
      --data runs/demo/data --set periods=2026-W01..2026-W05 --out runs/contrast
"""

from jobs.cli import Command, main, of_class

COMMAND = Command(
    "explain", of_class("ltrscale.evaluation.measure.explain:ExplainJob"), __doc__, flags="bundle data out"
)

if __name__ == "__main__":
    main(COMMAND)
