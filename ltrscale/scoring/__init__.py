"""Scoring: a bundle scores periods of a data set; each period is committed when its files are there.

One process scores file after file. Under Ray, actors that hold the bundle do so, each a file at a time. Who scores a
file also puts it in place; the caller takes the files over and commits their period. What is committed stays, whatever
happens to the rest, and is not scored again unless the bundle or the data have changed.
"""

from ltrscale.scoring.periods import is_scored, score
from ltrscale.scoring.plan import ActorsConfig, ScoreConfig

__all__ = ["ActorsConfig", "ScoreConfig", "is_scored", "score"]
