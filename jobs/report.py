r"""Make the report that people look at: one page of HTML that opens without a network, and the same as Markdown.

It shows an evaluation with its bundles and data: leaderboard, slices, periods,
learning curves, features, outliers, embeddings, agreement, the lists where two
methods differ most, quarantine and cost. A gate, a study and a search
join it if they are named. A section whose source is not there says why,
and what would bring it.

After the example of `python -m jobs.evaluate --help`:

  python -m jobs.report --set evaluation=runs/report --set out=runs/page
"""

from jobs.cli import Command, main, of_class

COMMAND = Command("report", of_class("ltrscale.experiments.report.make:ReportJob"), __doc__)

if __name__ == "__main__":
    main(COMMAND)
