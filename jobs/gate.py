"""Compare a candidate with the bundle in production on the newest periods and on slices.

The exit status is 0 if the candidate passes, and 3 if it is refused, with a line for each bound that is broken.

After `make compare`, with the config of the example:

  python -m jobs.gate --config jobs/configs/start/gate.yaml

which is, in short:

  out: runs/gate
  production: runs/demo/seed-0/gbdt/model
  candidate: runs/demo/seed-0/simclr_rank/model
  splits:
    train: {data: runs/demo/data, periods: 2026-W01..2026-W05}
    validation: {data: runs/demo/data, periods: 2026-W06}
    test: {data: runs/demo/data, periods: 2026-W07..2026-W08}
  evaluate:
    slices: {long: n_documents > 20, incomplete: missing}
  bounds:
    margin: 0.005       # with confidence, not worse by more
    slice_margin: 0.01  # on no slice shown to be worse by more

The same command with --plan says, before a candidate is trained, how many groups the margin needs.
"""

from jobs.cli import Command, main, of_class

_KEYS = """
out production candidate
splits splits.train splits.validation splits.test splits.test.data splits.test.periods
evaluate.slices evaluate.slice_by evaluate.primary_cutoff evaluate.outliers.gap
bounds.refuse bounds.margin bounds.slice_margin bounds.groups bounds.expected
bounds.drifted bounds.feature_psi bounds.moving bounds.score_psi
plan_from ray
"""
COMMAND = Command("gate", of_class("ltrscale.evaluation.gate:GateJob"), __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
