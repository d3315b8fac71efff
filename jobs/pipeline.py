"""From raw log to evaluated comparison: prepare, train every method with every seed, evaluate.

Stages whose output is committed with the same config and inputs are skipped.
"""

from jobs.cli import main
from ltrscale.workflows.pipeline import PipelineConfig, run_pipeline

if __name__ == "__main__":
    main(PipelineConfig, run_pipeline, "pipeline", __doc__)
