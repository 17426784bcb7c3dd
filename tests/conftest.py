"""Settings of every test."""

from hypothesis import HealthCheck, settings

# Wall time is no assertion: a loaded machine is slow, not wrong.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")
