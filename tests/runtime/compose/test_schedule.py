from typing import Any

import pytest

from joulery.config.jobs import GreenConfig
from joulery.policies.shifting import ShiftRule
from joulery.policies.training import Green, green_paper
from joulery.runtime.compose.schedule import green_policy


@pytest.mark.parametrize(
    ("section", "field", "expected"),
    [
        ({"mu": 1.5}, "mu", 1.5),
        ({"theta": "50 %"}, "theta", 0.5),
        ({"gamma": 0.8}, "gamma", 0.8),
        ({"cap": 3}, "cap", 3),
        ({"shift": "paper"}, "shift", ShiftRule.PAPER),
        ({"hysteresis": 1.0}, "hysteresis", 1.0),
        ({"profiles": False}, "profile_cache", False),
        ({"carbon_gamma": 0.05}, "carbon_gamma", 0.05),
        ({"starve": 3.0}, "starve_ratio", 3.0),
        ({"node_slots": 2}, "node_gpus", 2),
    ],
)
def test_every_knob_of_a_site_reaches_the_policy(section: dict[str, Any], field: str, expected: object) -> None:
    for kind, preset in (("green", Green()), ("green-paper", green_paper())):
        made = green_policy(GreenConfig.model_validate({"kind": kind, **section}))
        changed = {name for name in Green.__dataclass_fields__ if getattr(made, name) != getattr(preset, name)}
        assert getattr(made, field) == expected
        assert changed <= {field}
    plain = green_policy(GreenConfig())
    assert plain == Green() and plain.theta == 0.3
