"""Unix time that never steps.

The wall clock of a machine is set now and then: by NTP after a boot, by a person, by a virtual machine that was paused.
A run is one timeline: requests, readings of meters, and decisions of policies are compared by their times. Latencies
would be negative, and a policy that waits until five seconds after a decision would wait for an hour.
"""

from __future__ import annotations

import time

_OFFSET_S = time.time() - time.monotonic()


def unix_s() -> float:
    """Unix seconds: the wall clock as it was when the process began, and the monotonic clock since."""
    return _OFFSET_S + time.monotonic()
