r"""Train boosted trees on the labelled groups of a split: LightGBM, XGBoost or CatBoost.

After `make compare`:

  python -m jobs.train_gbdt --set out=runs/trees --set gbdt.num_leaves=8 \
      --set 'splits.train={data: runs/demo/data, periods: 2026-W01..2026-W05}' \
      --set 'splits.validation={data: runs/demo/data, periods: 2026-W06}' \
      --set 'splits.test={data: runs/demo/data, periods: 2026-W07..2026-W08}'
"""

from jobs.cli import Command, main, of_class

_KEYS = """
out
splits.train splits.train.data splits.train.periods splits.train.labelled_fraction splits.validation splits.test
gbdt gbdt.objective gbdt.num_trees gbdt.learning_rate gbdt.num_leaves gbdt.min_data_in_leaf
gbdt.feature_fraction gbdt.bagging_fraction gbdt.early_stopping_rounds gbdt.stop_on gbdt.label_gain gbdt.targets
gbdt.seed gbdt.num_threads ensemble workers.number
"""
COMMAND = Command("train_gbdt", of_class("ltrscale.trees.gbdt:GBDTJob"), __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
