from typing import Any

import pytest

from joulery.config.jobs import JobsConfig
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
        ({"ceiling": "2 h"}, "ceiling_gpu_s", 7200.0),
        ({"ageing": "1 d"}, "ageing_s", 86_400.0),
        ({"preempt_after": "5 min"}, "preempt_after_s", 300.0),
    ],
)
def test_every_knob_of_a_site_reaches_the_policy(section: dict[str, Any], field: str, expected: object) -> None:
    for kind, preset in (("green", Green()), ("green-paper", green_paper())):
        made = green_policy(JobsConfig.model_validate({"policy": {"kind": kind, **section}}))
        changed = {name for name in Green.__dataclass_fields__ if getattr(made, name) != getattr(preset, name)}
        assert getattr(made, field) == expected
        assert changed <= {field}
    plain = green_policy(JobsConfig())
    assert plain == Green() and plain.theta == 0.3


def test_a_job_that_waits_a_quantum_may_preempt_unless_the_site_says_otherwise() -> None:
    quick: dict[str, Any] = {"quantum": "20 s", "poll": "1 s"}
    assert green_policy(JobsConfig.model_validate(quick)).preempt_after_s == 20.0
    as_published = {**quick, "policy": {"kind": "green-paper"}}
    assert green_policy(JobsConfig.model_validate(as_published)).preempt_after_s == 0.0
