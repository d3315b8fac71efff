r"""Judge a live test by its log: which arm raises which goal, if its users were drawn as planned.

The log has the rows of an A/B test (`kind: ab`: a user, an arm, and what the user did) or of interleaving
(`kind: interleaving`: a user, and the arm whose item was clicked). Lifts have 95% intervals over users, p is adjusted
for all goals. The exit status is 3, with a line for each fault, if an arm has too many users for its share, or a user
has several arms. Before the planned end there is no verdict.

  python -m jobs.verdict --set out=runs/verdict \
      --set 'log={kind: ab, inputs: ab.csv, time: day}' \
      --set 'arms={old: 1, new: 1}' --set control=old \
      --set until=2026-03-14 \
      --set 'goals={orders: orders,
                    ctr: {column: clicks, per: sessions}}'

With plan=0.05 and the log of a past time, it says how many users it takes to find a lift of 5%.
"""

from jobs.cli import Command, main, of_class

COMMAND = Command("verdict", of_class("ltrscale.evaluation.verdict:VerdictJob"), __doc__)

if __name__ == "__main__":
    main(COMMAND)
