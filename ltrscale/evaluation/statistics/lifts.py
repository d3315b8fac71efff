"""What users say of two ways to rank, from moments by user: differences, lifts, and the users that these take.

A goal of a user is a pair (x, y) whose sums are divided: clicks over sessions, orders over 1 user. So users, who are
the sample, may have any number of sessions.

Shapes: M columns (goals, arms, draws of a simulation).
"""

from typing import NamedTuple

import numpy as np

from ltrscale.arrays import Doubles
from ltrscale.late import Late

special = Late("scipy.special")

TAIL = 0.025
"""Chance of a difference beyond one end of a 95% interval."""
POWER_ASKED = 0.8
"""The probability of finding a difference for which samples are counted."""


class UserMoments(NamedTuple):
    """Moments of x and y over users: number, means, variances and covariance (of a sample)."""

    n_M: Doubles
    x_M: Doubles
    y_M: Doubles
    xx_M: Doubles
    yy_M: Doubles
    xy_M: Doubles


class Lifts(NamedTuple):
    """A difference as a share of a base, both with normal errors: its columns are independent tests."""

    difference_M: Doubles
    base_M: Doubles
    variance_M: Doubles
    """Of the difference."""
    base_variance_M: Doubles
    covariance_M: Doubles
    df_M: Doubles

    @classmethod
    def between(cls, control: UserMoments, arm: UserMoments) -> "Lifts":
        """Of two groups of users: the arm's ratio minus the control's, with the degrees of Welch (1947)."""
        (base_M, of_base_M), (mean_M, of_mean_M) = ratio(control), ratio(arm)
        variance_M = of_base_M + of_mean_M
        spread_M = of_base_M**2 / (control.n_M - 1) + of_mean_M**2 / (arm.n_M - 1)
        df_M = np.divide(variance_M**2, spread_M, out=np.full_like(variance_M, np.inf), where=spread_M > 0)
        return cls(mean_M - base_M, base_M, variance_M, of_base_M, -of_base_M, df_M)

    @classmethod
    def within(cls, users: UserMoments) -> "Lifts":
        """Of users who saw both: x is the difference of their credits, y the mean of both credits."""
        n_M = users.n_M
        return cls(users.x_M, users.y_M, users.xx_M / n_M, users.yy_M / n_M, users.xy_M / n_M, n_M - 1)

    def p(self) -> Doubles:
        """Two-sided p values of no difference, by Student's t; 1 where nothing varies nor differs."""
        with np.errstate(divide="ignore", invalid="ignore"):
            t_M = np.abs(self.difference_M) / np.sqrt(self.variance_M)
        return np.asarray(np.where(self.difference_M == 0, 1.0, 2 * special.stdtr(self.df_M, -t_M)))

    def interval(self) -> tuple[Doubles, Doubles]:
        """Ends of the 95% intervals of the differences."""
        half_M = self._limit() * np.sqrt(self.variance_M)
        return self.difference_M - half_M, self.difference_M + half_M

    def relative(self) -> tuple[Doubles, Doubles, Doubles]:
        """The lifts, and the ends of their 95% intervals; NaN where the base is not clearly above 0.

        The ends are those shares of the base that the test of the difference does not reject (Fieller 1954): the
        interval has 0 inside exactly where that of the difference has. For large samples it is the delta method's.
        """
        t2_M = self._limit() ** 2
        square_M = self.base_M**2 - t2_M * self.base_variance_M
        middle_M = self.difference_M * self.base_M - t2_M * self.covariance_M
        rest_M = self.difference_M**2 - t2_M * self.variance_M
        known_M = (square_M > 0) & (self.base_M > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            half_M = np.sqrt(np.maximum(middle_M**2 - square_M * rest_M, 0.0))
            found = self.difference_M / self.base_M, (middle_M - half_M) / square_M, (middle_M + half_M) / square_M
        lift_M, low_M, high_M = (np.where(known_M, values_M, np.nan) for values_M in found)
        return lift_M, low_M, high_M

    def _limit(self) -> Doubles:
        return np.asarray(special.stdtrit(self.df_M, 1 - TAIL))


def ratio(users: UserMoments) -> tuple[Doubles, Doubles]:
    """The ratio of both sums, NaN without any size, and its variance by the delta method (Deng and others 2018)."""
    users = users._replace(y_M=np.where(users.y_M == 0, np.nan, users.y_M))
    ratio_M = users.x_M / users.y_M
    residual_M = users.xx_M - 2 * ratio_M * users.xy_M + ratio_M**2 * users.yy_M
    return ratio_M, np.maximum(residual_M, 0.0) / (users.n_M * users.y_M**2)


def samples_needed(mean: float, variance: float, *, level: float = 2 * TAIL) -> float | None:
    """Independent samples until a two-sided test finds a mean with a probability of .8; None for a mean of 0.

    `((z_{1 - level / 2} + z_.8) / mean)^2 variance` (Cohen 1988).
    """
    return ((special.ndtri(1 - level / 2) + special.ndtri(POWER_ASKED)) / mean) ** 2 * variance if mean else None
