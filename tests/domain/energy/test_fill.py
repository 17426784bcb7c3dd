import math

import pytest

from joulery.domain.energy.carbon import Fill, FillRule
from joulery.domain.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("error", FillRule()),
        (" gap ", FillRule(Fill.GAP)),
        ("forecast", FillRule(Fill.FORECAST)),
        ("previous:3h", FillRule(Fill.PREVIOUS, 10800.0)),
        ("linear: 90 min", FillRule(Fill.LINEAR, 5400.0)),
        ("previous:0.5d", FillRule(Fill.PREVIOUS, 43200.0)),
        ("linear:20s", FillRule(Fill.LINEAR, 20.0)),
    ],
)
def test_rules_are_read(text: str, rule: FillRule) -> None:
    assert FillRule.parse(text) == rule
    assert FillRule.parse(str(rule)) == rule


@pytest.mark.parametrize(
    "text", ["", "zero", "previous", "linear:", "linear:3", "linear:-1h", "gap:3h", "linear:0h", "previous:3 weeks"]
)
def test_other_rules_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        FillRule.parse(text)


@pytest.mark.parametrize("longest_s", [0.0, -1.0, math.inf, math.nan])
def test_a_bridge_needs_a_length(longest_s: float) -> None:
    with pytest.raises(ConfigError, match="needs the longest gap"):
        FillRule(Fill.PREVIOUS, longest_s)
