"""Time and energy at a clock for work without measured curves: by its elasticity, and by a known chip's voltage.

The voltage curve of most devices is not published. Where it is not known, that of the V100
(:data:`joulery.perf.power.clock_curves`) is stretched over the device's own range of clocks: an assumption, which must
be stated where its results are shown.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import ConfigError
from joulery.perf.power.clock_curves import V100, ClockModel

SATURATION_RATIO = 0.95
"""Utilisation beyond which the tail of a queue is not predicted."""


def slowdown_ratio(clocks_mhz: npt.ArrayLike, elasticity_ratio: float = 1.0) -> FloatArray:
    """Time of the same work at each clock, as a ratio of that at the highest.

    Args:
        clocks_mhz: Ascending, MHz, float64[clocks].
        elasticity_ratio: Half the sensitivity score of μ-Serve (section 3.1): 1 for work bound by arithmetic, 0 for
            work that does not depend on the clock.
    """
    clocks = np.asarray(clocks_mhz, np.float64)
    return np.asarray(1.0 + elasticity_ratio * (clocks[-1] / clocks - 1.0), np.float64)


def above_idle_ratio(clocks_mhz: npt.ArrayLike, model: ClockModel = V100) -> FloatArray:
    """Power of a busy device above that of an idle one at its lowest clock, as a ratio of that at the highest clock.

    Args:
        clocks_mhz: Ascending, MHz, float64[clocks].
        model: Model whose voltage curve is stretched over these clocks.
    """
    clocks = np.asarray(clocks_mhz, np.float64)
    stretched = clocks / clocks[-1] * model.max_mhz
    above_w = model.busy_power_w(stretched) - model.idle_power_w([model.min_mhz])
    return np.asarray(above_w / above_w[-1], np.float64)


def scaled_knee_mhz(max_mhz: float, model: ClockModel = V100) -> float:
    """Voltage knee of a device with a given highest clock, MHz, if its curve is the model's."""
    return max_mhz * model.knee_mhz / model.max_mhz


def tail_s(
    service_s: npt.ArrayLike, own_tail_s: npt.ArrayLike, rate_rps: float, servers: int, quantile: float
) -> FloatArray:
    """A quantile of the time from arrival to answer for random arrivals: the wait in the queue plus the work itself.

    The queue is an M/M/1 whose one server is as fast as all of them together: P(wait > t) = ρ exp(-(μ - λ) t).

    Args:
        service_s: Mean service time, s, float64[clocks].
        own_tail_s: The same quantile of the service time alone, s, float64[clocks].
        rate_rps: Arrivals, 1/s.
        servers: Number of requests that are served at once, >= 1.
        quantile: The quantile, in (0, 1).

    Returns:
        Seconds, float64[clocks]; infinite from 95 % utilisation on.

    Raises:
        ConfigError: No server, or an impossible quantile.
    """
    if servers < 1 or not 0 < quantile < 1:
        raise ConfigError("a queue needs a server and a quantile between 0 and 1", got=f"{servers}, {quantile}")
    service, own = np.asarray(service_s, np.float64), np.asarray(own_tail_s, np.float64)
    rho = rate_rps * service / servers
    with np.errstate(divide="ignore", invalid="ignore"):
        wait_s = service / servers * np.maximum(np.log(rho / (1.0 - quantile)), 0.0) / (1.0 - rho)
    return np.asarray(np.where(rho < SATURATION_RATIO, own + np.where(rho > 0, wait_s, 0.0), math.inf), np.float64)
