"""The order of service that the lengths of past jobs call for: least service first, or first come, first served.

Least attained service needs no lengths and ends short jobs early when lengths vary widely, but among jobs of about
the same length it delays all of them for each other. The squared coefficient of variation of the lengths (variance
over squared mean) separates the two cases: sharing a server gives a shorter mean completion time than first come, first
served exactly where it is above 1 (Kleinrock, Queueing Systems II, section 4.4).

Jobs that are not over count with the service they have had: the lengths of ended jobs alone are biased towards short
ones while long ones still run. The estimate is the product limit (Kaplan and Meier, 1958).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

ENDED_JOBS = 1000
"""The lengths of so many jobs that ended last are observed."""
_EVIDENCE = 1.0
"""So many standard errors, each 1 over the root of the number of ended jobs, below 1 is evidence enough."""


def length_scv(ended_s: npt.ArrayLike, unfinished_s: npt.ArrayLike = ()) -> float:
    """Squared coefficient of variation of the lengths of jobs, unfinished ones included.

    Args:
        ended_s: Service of ended jobs, GPU-seconds, float64[n].
        unfinished_s: Service so far of jobs that are not over, float64[m].

    Returns:
        At least 0; NaN where no job has ended. Entries that are not positive and finite do not count.
    """
    ended, unfinished = np.sort(_positive(ended_s)), np.sort(_positive(unfinished_s))
    if not len(ended):
        return math.nan
    # Both sorted, the unfinished behind the ended ones of equal length: the ended ones are at risk together with them.
    unfinished_at = np.searchsorted(ended, unfinished, side="right") + np.arange(len(unfinished))
    over = np.ones(len(ended) + len(unfinished))
    over[unfinished_at] = 0.0
    length = np.empty(len(over))
    length[over == 1.0], length[unfinished_at] = ended, unfinished
    length /= length[-1]  # scaled, so that squares of huge lengths stay finite
    at_risk = np.arange(len(length), 0.0, -1.0)
    survival = np.cumprod(1.0 - over / at_risk)
    mass = np.diff(np.concatenate(([1.0], survival))) * -1.0
    mass[-1] += survival[-1]  # whatever outlives the longest is taken to end there
    mean = float(mass @ length)
    return max(0.0, float(mass @ length**2) / mean**2 - 1.0)


def first_come(scv: float, ended: int, before: bool) -> bool:
    """Whether jobs are served in the order of their submission.

    Args:
        scv: Of the lengths, as :func:`length_scv` gives it.
        ended: How many ended jobs it is of.
        before: Whether they were served so until now; they are until the lengths vary by more than 1.

    Returns:
        False where nothing is known.
    """
    if math.isnan(scv) or ended < 1:
        return False
    return scv <= 1.0 if before else scv <= 1.0 - _EVIDENCE / math.sqrt(ended)


def _positive(lengths_s: npt.ArrayLike) -> npt.NDArray[np.float64]:
    found = np.asarray(lengths_s, np.float64)
    return found[(found > 0) & np.isfinite(found)]
