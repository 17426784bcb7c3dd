"""Unix time that never steps.

The wall clock of a machine is set now and then: by NTP after a boot, by a person, by a virtual machine that was paused.
A run is one timeline: requests, readings of meters, and decisions of policies are compared by their times. After a
step of the clock, latencies could be negative, and a policy could wait an hour instead of five seconds.
"""

from __future__ import annotations

import time

_OFFSET_S = time.time() - time.monotonic()


def unix_s() -> float:
    """Unix time in seconds: the wall clock at the start of the process, advanced by the monotonic clock."""
    return _OFFSET_S + time.monotonic()
