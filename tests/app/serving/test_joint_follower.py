"""A running joint plan made again: for another load, for batches that take longer, within its moves."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from joulery.app.planning.plans import plan_site
from joulery.app.serving.joint_follower import JointFollower
from joulery.config import load
from joulery.config.site import Mode
from joulery.domain.serving.engine import Outcome
from tests.app.planning.test_joint_over_time import site_file


class Window:
    """Requests of a service as they were seen."""

    def __init__(self, rate_rps, service_s):
        self.rate, self.records = rate_rps, [SimpleNamespace(outcome=Outcome.OK, service_s=service_s)] * 60

    def since(self, now_s):
        return self.records

    def rate_rps(self, now_s):
        return self.rate


def follower(folder, mode=Mode.ACT, photos_rps=500.0, slower=0.5):
    site = load(site_file(folder))
    plan = cast(Any, plan_site(site).plan)
    batch_s = {}
    for each in (one for gpu in plan.gpus for one in gpu.instances):
        batch_s[each.workload] = max(batch_s.get(each.workload, 0.0), each.latency_s)
    recorded = []
    session = SimpleNamespace(
        site=SimpleNamespace(mode=mode),
        services={
            "photos": SimpleNamespace(window=Window(photos_rps, slower * batch_s["photos"])),
            "video": SimpleNamespace(window=Window(100.0, 0.5 * batch_s["video"])),
        },
        history=SimpleNamespace(add_decision=recorded.append),
    )
    control = SimpleNamespace(joint=plan)
    made = JointFollower.of(cast(Any, session), cast(Any, control))
    assert made is not None
    return made, site, control, recorded


def served(gpus):
    found = {}
    for each in (one for gpu in gpus for one in gpu.instances):
        found[each.workload] = found.get(each.workload, 0.0) + each.rate_rps
    return found


def test_a_load_that_stays_away_from_the_plan_is_planned_for(tmp_path):
    made, site, control, recorded = follower(tmp_path, photos_rps=600.0)
    causes = [made.look(float(now_s)) for now_s in range(150)]
    assert next(cause for cause in causes if cause) == "load"
    assert recorded[0].outcome == "applied" and "photos" in recorded[0].decision.reason
    gpus = made.next(site, "load")
    assert 550 < served(gpus)["photos"] <= 600 and served(gpus)["video"] == pytest.approx(100.0, rel=1e-3)
    before = control.joint
    made.taken_over()
    assert control.joint is not before and control.joint.gpus == gpus
    assert made.policy.planned_rps["photos"] == pytest.approx(served(gpus)["photos"])


def test_batches_that_take_longer_are_a_margin_of_the_next_plan(tmp_path):
    made, site, _, recorded = follower(tmp_path, slower=1.2)
    assert made.look(0.0) == "latency"
    assert recorded[0].decision.kind == "correct_predictor"
    assert recorded[0].decision.value == pytest.approx(0.2)
    gpus = made.next(site, "latency")
    made.taken_over()
    assert all(e.latency_s <= e.limit_s for gpu in gpus for e in gpu.instances)
    assert made.policy.corrections == pytest.approx({"photos": 0.2})
    assert made.look(1.0) in ("", "latency")


def test_a_changed_site_file_is_planned_for_at_its_own_rates(tmp_path):
    made, _, _, _ = follower(tmp_path, photos_rps=600.0)
    assert served(made.next(load(site_file(tmp_path, 450)), "services"))["photos"] == pytest.approx(450.0)


def test_other_modes_only_say_it(tmp_path):
    made, _, _, recorded = follower(tmp_path, Mode.ADVISE, photos_rps=600.0)
    assert not any(made.look(float(now_s)) for now_s in range(150))
    assert recorded[0].outcome == "advised"


def test_other_presets_have_no_follower():
    assert JointFollower.of(cast(Any, None), cast(Any, SimpleNamespace(joint=None))) is None
