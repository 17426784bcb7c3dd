"""Settings of every test."""

import signal

from hypothesis import HealthCheck, settings

# Wall time is no assertion: a loaded machine is slow, not wrong.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

# A shell that runs `make test &` has it ignore Ctrl-C, and everything a test starts would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
