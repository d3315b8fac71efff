r"""Evaluate bundles on the test split: metrics, slices, significance, report.

After `make compare`:

  python -m jobs.evaluate --set out=runs/report \
      --set 'evaluate.models={gbdt: runs/demo/seed-0/gbdt/model,
                              simsiam: runs/demo/seed-0/simsiam/model}' \
      --set 'evaluate.splits={
          train: {data: runs/demo/data, periods: 2026-W01..2026-W05},
          validation: {data: runs/demo/data, periods: 2026-W06},
          test: {data: runs/demo/data, periods: 2026-W07..2026-W08}}' \
      --set 'evaluate.slices={long: n_documents > 20, bought: max_label >= 4}' \
      --set 'evaluate.slice_by=[period, n_relevant]'

Besides all groups it judges those with outlier values and, if you name them,
slices: groups that meet a condition, and each value of a column.
docs/methods.md has the language of conditions and all columns.
`--set evaluate.by_period=true` judges each period: the metric since the end of
training, and the drift of features and scores.
"""

from jobs.cli import Command, main, of_class

_KEYS = """
out evaluate.models evaluate.scores
evaluate.splits evaluate.splits.validation evaluate.splits.test evaluate.splits.test.data
evaluate.splits.test.periods evaluate.splits.test.labels
evaluate.baseline evaluate.ndcg_at evaluate.precision_at evaluate.primary_cutoff evaluate.relevant_from
evaluate.policy evaluate.clicks evaluate.slices evaluate.slice_by evaluate.by_period
evaluate.outliers.gap evaluate.outliers.known evaluate.resamples ray
"""
COMMAND = Command("evaluate", of_class("ltrscale.evaluation.measure.evaluate_job:EvaluateJob"), __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
