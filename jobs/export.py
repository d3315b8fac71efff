r"""Export a bundle of LightGBM trees in the library's text format, after checking that it gives equal scores.

After `make demo`:

  python -m jobs.export --set out=runs/trees-as-text \
      --set bundle=runs/demo/seed-0/gbdt/model --set data=runs/demo/data
"""

from jobs.cli import Command, main
from ltrscale.workflows.tree_stages import ExportJob

COMMAND = Command("export", ExportJob, ExportJob.run, __doc__)

if __name__ == "__main__":
    main(COMMAND)
