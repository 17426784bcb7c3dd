"""The load generator: requests sent to a gateway over HTTP at times fixed beforehand, from a process of its own.

Arrivals are open-loop: a request is due at its time, independent of those before it, and its latency counts from then,
so a server that stalls cannot hide its delay (no coordinated omission). ``python -m joulery.runtime.load --help``
describes the process; :func:`start` starts it for a plan, :func:`read_outcomes` reads the file that it wrote.
"""

from joulery.runtime.load.load_plan import LoadPlan, constant_times_s, poisson_times_s
from joulery.runtime.load.outcomes import Outcomes, read_outcomes
from joulery.runtime.load.process import TOKEN, Load, LoadResult, command, start

__all__ = [
    "TOKEN",
    "Load",
    "LoadPlan",
    "LoadResult",
    "Outcomes",
    "command",
    "constant_times_s",
    "poisson_times_s",
    "read_outcomes",
    "start",
]
