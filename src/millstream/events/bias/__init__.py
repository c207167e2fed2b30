"""The bias report: whether the rollouts that were kept are a fair sample of those that were admitted, from events alone.

Kept: a rollout that reached its reward in a group that was trained, or filtered, which is declared. Lost: a rollout with an
attempt that failed or was aborted, retried or not (a second attempt is a new draw: under a time limit, a shorter one), or whose
group failed, was aborted or was restarted. Only groups with a fate are compared: rollouts in flight when the log ends are not
lost, and appear in the table alone.

How long a lost rollout would have become is often unknown, because it was cut off. Its length is then censored: a lower bound.
The mean over all admitted then has two ends. At one, a censored rollout would have continued like the others that came as far
(Kaplan-Meier); at the other, it would have ended where it was cut off. The two agree for a time limit. In other cases, events
cannot tell a failure that hits long rollouts more often, since they are exposed longer, from one that hits all alike, at their
end or on the way (Tsiatis 1975), and Kaplan-Meier alone would raise a false alarm in every run with failures at random. So the
`bias` is what both ends grant, the interval spans both, and a verdict needs both on one side of 0.

A rollout that failed after a time that none of the others came near did not take long; it hung. How long it would have taken is
unknown, and its seconds are not used. A time limit that cuts off slow rollouts looks different: others end shortly before it.

The interval and the p-values are by bootstrap over whole groups (by permutation for the sources), because rollouts of a group
are alike and fail together. The p-values are adjusted (Holm 1979): a run that loses at random is called biased, by any of the
tests, in at most 5% of cases.

    table.py       events -> one line per rollout
    bootstrap.py   the Kaplan-Meier mean, and all means over resampled groups
    compare.py     tokens, seconds, difficulty, sources: the tests
    report.py      `bias_report`: all of it
"""

from millstream.events.bias.bootstrap import kaplan_meier_mean
from millstream.events.bias.compare import BiasTest
from millstream.events.bias.report import BiasReport, ClassRow, bias_report

__all__ = ["BiasReport", "BiasTest", "ClassRow", "bias_report", "kaplan_meier_mean"]
