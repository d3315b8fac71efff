r"""Append exact-match features (TF, IDF, TF-IDF, BM25, query likelihood) to a data set with tokens.

After `python -m jobs.prepare --config jobs/configs/data/prepare-nfcorpus.yaml`:

  python -m jobs.match --set data=data/nfcorpus --set out=data/nfcorpus-match \
      --set match.periods=train
"""

from jobs.cli import Command, Job, main


def _job() -> Job:
    from ltrscale.derive.match import MatchJob

    return MatchJob, MatchJob.run


_KEYS = """
out data match match.query match.documents match.together match.periods match.statistics
"""
COMMAND = Command("match", _job, __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
