"""Make one ranker of several finetuned ones: the mean of their scores, or a linear layer over their embeddings."""

from jobs.cli import main
from ltrscale.workflows.stages import CombineJob

if __name__ == "__main__":
    main(CombineJob, CombineJob.run, "combine", __doc__)
