"""The first configs of a log: what `jobs.init` writes after a look at it."""
