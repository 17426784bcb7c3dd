"""The eight process-share cases of the Smaragdine report through the whole path from readings to a footprint."""

import json
import math
from typing import Any

import pytest

from joulery.accounting.charge import IdleRule, ShareRule
from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.energy.power import BusyTimes, PowerTrace
from joulery.domain.quality import Quality
from tests.accounting.readings import charge_readings
from tests.data_folder import data_folder

TICKS_PER_S = 100.0


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((data_folder("smaragdine") / "align" / "virtualization.json").read_text())
    assert len(found) == 8
    return found


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("by", list(ShareRule))
def test_a_trace_is_charged_the_same_way(number: int, by: ShareRule) -> None:
    case = cases()[number]
    app, busy = (sum(case[f"{kind}_ticks_per_cpu"]) / TICKS_PER_S for kind in ("app", "busy"))
    channel = Channel("cpu:0", "package", ReadingKind.COUNTER, "rapl", Quality.MEASURED)
    trace = PowerTrace(channel, [0, 10**9], [7.0, 7.0 + case["socket_energy_J"]], 1.0)
    times = BusyTimes([0, 10**9], [app], [busy], cpus=len(case["busy_ticks_per_cpu"]))
    charged = charge_readings([trace], {"cpu:0": times}, 0.0, 1.0, idle=IdleRule.WHOLE, by=by)
    assert math.isclose(charged.run.attributed_j, case[f"expected_app_J_{by}_share"], rel_tol=1e-12)
    assert math.isclose(charged.run.energy_j + charged.other_j, case["socket_energy_J"], rel_tol=1e-12)
    idle_j = case["socket_energy_J"] - charged.run.attributed_j - charged.other_j
    assert math.isclose(charged.run.idle_j, idle_j, rel_tol=1e-12, abs_tol=1e-12)
