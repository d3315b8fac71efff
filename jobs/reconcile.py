r"""Say why LightGBM, XGBoost, CatBoost, trec_eval or another tool reports another figure for the same scores.

Each program has rules of its own for ties, gains, groups without a relevant document, short lists and the ideal order.
This job computes a metric by our rules and by those of each program (scikit-learn, ranx, LETOR's script and allRank
too), switches the rules one after the other from ours to theirs, and names each rule's part of the difference with the
groups that show it. No other program needs to be installed. Scores and labels come from a bundle on a split, from
committed scores, or from a Parquet or CSV table of query, item, label and score
(`source={kind: table, path: scores.csv}`). After `make compare`:

  python -m jobs.reconcile --set out=runs/why \
      --set 'source={kind: bundle, bundle: runs/demo/seed-0/gbdt/model,
                     split: {data: runs/demo/data,
                             periods: 2026-W07..2026-W08}}'
"""

from jobs.cli import Command, main, of_class

_KEYS = """
out source source.path source.query source.item source.label source.score source.bundle source.scores
source.split source.split.data source.split.periods source.split.labels
metrics relevant_from programs
"""
COMMAND = Command("reconcile", of_class("ltrscale.evaluation.measure.reconcile:ReconcileJob"), __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
