"""Published coefficients with their sources. They are not measurements of this machine."""

from __future__ import annotations

import difflib

from joulery.domain.errors import ConfigError
from joulery.perf.catalog.synthetic_t4 import SYNTHETIC_T4
from joulery.perf.catalog.v100 import V100, V100_CALIBRATED, V100_REFIT
from joulery.perf.interference.model import InterferenceProfile

_PROFILES = {"v100": V100, "v100-calibrated": V100_CALIBRATED, "v100-refit": V100_REFIT, "synthetic-t4": SYNTHETIC_T4}


def names() -> tuple[str, ...]:
    """Names of the GPU types in the catalog."""
    return tuple(_PROFILES)


def profile(name: str) -> InterferenceProfile:
    """The published profile of a GPU type.

    Raises:
        ConfigError: The catalog has no GPU type of that name.
    """
    if name not in _PROFILES:
        near = difflib.get_close_matches(name, _PROFILES, n=2)
        raise ConfigError(
            f"the catalog has no GPU type {name!r}",
            got=name,
            expected=", ".join(_PROFILES),
            hint=(f"did you mean {' or '.join(near)}? " if near else "")
            + "name a profile file instead: fit one with `joulery profile --from solo.csv --pairs pairs.csv`",
        )
    return _PROFILES[name]
