"""Export a bundle of LightGBM trees as the library's own text, after a check that it gives equal scores."""

from jobs.cli import main
from ltrscale.workflows.tree_stages import ExportJob, export_stage

if __name__ == "__main__":
    main(ExportJob, export_stage, "export", __doc__)
