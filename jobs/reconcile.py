r"""Say why LightGBM, XGBoost, CatBoost, trec_eval, scikit-learn, ranx, LETOR or allRank gives another figure.

Each program has rules of its own for ties, gains, groups without a relevant document, short lists and the ideal order.
This job computes a metric by our rules and by each program's, switches the rules one after the other from ours to
theirs, and names each rule's part of the difference with the groups that show it. No other program needs to be
installed.

From a table (Parquet or CSV) with a row for each document:

  python -m jobs.reconcile --set out=runs/why \
      --set 'source={kind: table, path: scores.csv, query: qid, item: doc, label: y, score: s}'

From a bundle and the groups to score, after `make demo`:

  python -m jobs.reconcile --set out=runs/why --set 'metrics=[ndcg@10, map]' \
      --set 'source={kind: bundle, bundle: runs/demo/seed-0/gbdt/model,
                     split: {data: runs/demo/data, periods: 2026-W07..2026-W08}}'
"""

from jobs.cli import Command, main
from ltrscale.workflows.reconcile import ReconcileJob

COMMAND = Command(
    "reconcile",
    ReconcileJob,
    ReconcileJob.run,
    __doc__,
)

if __name__ == "__main__":
    main(COMMAND)
