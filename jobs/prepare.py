r"""Turn raw logs (LETOR text, CSV, Parquet) into a data set of query groups.

From LETOR text, where each file becomes a period:

  python -m jobs.prepare --set out=data/letor --set prepare.source.kind=letor \
      --set 'prepare.inputs=[{path: train.txt, period: train},
                             {path: test.txt, period: test}]'
"""

from jobs.cli import Command, main, of_class

_KEYS = """
out prepare.inputs prepare.inputs.0.path prepare.inputs.0.period
prepare.source prepare.source.n_features prepare.source.columns.query prepare.source.columns.item
prepare.source.columns.label prepare.source.columns.time prepare.source.columns.period
prepare.source.columns.features prepare.source.columns.categorical prepare.source.columns.tokens
prepare.source.joins
prepare.sort prepare.add prepare.max_rejected prepare.expect
synthetic synthetic.weeks synthetic.groups_per_week ray
"""
COMMAND = Command("prepare", of_class("ltrscale.ingest.prepare:PrepareJob"), __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
