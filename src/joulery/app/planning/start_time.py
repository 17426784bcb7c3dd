"""``joulery when``: find the best start time of a job from a carbon forecast."""

from __future__ import annotations

from joulery.app.measuring import open_carbon as open_carbon
from joulery.domain.energy.carbon import CarbonSeries
from joulery.domain.errors import CapabilityError
from joulery.domain.ports import CarbonSource
from joulery.policies.training.start_time import StartTime as StartTime
from joulery.policies.training.start_time import best_start


def when_to_start(
    source: CarbonSource, now_s: float, duration_s: float, within_s: float
) -> tuple[StartTime, CarbonSeries]:
    """Find the best start time; return it with the forecast that it is based on.

    Args:
        source: The source of carbon intensity.
        now_s: Unix seconds.
        duration_s: Length of the job.
        within_s: Seconds from now within which the job must end.

    Raises:
        DataError: The job does not fit, or the source does not cover it.
    """
    try:
        series = source.forecast(now_s, now_s + within_s)
    except CapabilityError:  # a file or a stated value: what it says of the future is all there is
        series = source.history(now_s, now_s + within_s)
    return best_start(series, now_s, duration_s, within_s), series
