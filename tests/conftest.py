"""Settings of every test."""

import os
import signal

from hypothesis import HealthCheck, settings

# Wall time is no assertion: a loaded machine is slow, not wrong. New examples are drawn in every run, and found faults
# kept; in CI they are the same each time, so that a change is not judged by the luck of a draw.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("house"), derandomize=True, database=None)
settings.load_profile("same" if os.environ.get("JOULERY_SAME_EXAMPLES") else "house")

# A shell that runs `make test &` has it ignore Ctrl-C, and everything a test starts would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
