r"""Look at a click log before you train on it.

What position does to clicks, whether relevance can be separated from it, and which
click models predict later clicks. The data set needs positions, clicks and
document ids: columns.positions, columns.clicks and columns.item of jobs.prepare.

On a simulated log, after the three commands at the head of that config:

  python -m jobs.clicks --config jobs/configs/start/clicks-mq2008.yaml

Read the report from top to bottom. If positions do not overlap, it says so and
what to do: until then inverse propensity weights rest on an assumption that the
log cannot test. If they overlap, the propensities are what
`click_ratio_weights` and `dla` are to find. docs/clicks.md explains each table.
"""

from jobs.cli import Command, main, of_class

_KEYS = """
out log log.data log.periods held_out query depth sessions
relevant_from ndcg_at
"""
COMMAND = Command("clicks", of_class("ltrscale.evaluation.click_log:ClicksJob"), __doc__, _KEYS)

if __name__ == "__main__":
    main(COMMAND)
