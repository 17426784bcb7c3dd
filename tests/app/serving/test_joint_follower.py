"""A running joint plan made again: for another load, for batches that take longer, within its moves."""

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from joulery.app.planning.plans import plan_site
from joulery.app.runs.replay import decide_again
from joulery.app.serving.joint_follower import JointFollower, watt_price
from joulery.config import load
from joulery.config.plan import ObjectiveWeights
from joulery.config.site import Mode
from joulery.domain.gpu.optimum import objective_of
from joulery.domain.serving.engine import Outcome
from joulery.runtime.session.history import policy_entry, step_entry
from tests.app.planning.test_joint_over_time import site_file


class Window:
    """Requests of a service as they were seen."""

    def __init__(self, rate_rps, service_s):
        self.rate, self.records = rate_rps, [SimpleNamespace(outcome=Outcome.OK, service_s=service_s)] * 60

    def since(self, now_s):
        return self.records

    def rate_rps(self, now_s):
        return self.rate


class History:
    """What is recorded."""

    def __init__(self):
        self.decisions, self.log = [], []

    def add_decision(self, record):
        self.decisions.append(record)

    def add_policy(self, policy):
        self.log.append({"kind": "policy", **json.loads(json.dumps(policy_entry(policy)))})

    def add_step(self, service, seen, step):
        self.log.append({"kind": "step", **json.loads(json.dumps(step_entry(service, seen, step)))})


def follower(
    folder, mode=Mode.ACT, photos_rps=500.0, slower=0.5, plan_text="", grid=lambda now_s: math.nan, planned_rps=500
):
    file = site_file(folder, planned_rps)
    file.write_text(file.read_text().replace("preset: joint", f"preset: joint{plan_text}"))
    site = load(file)
    plan = cast(Any, plan_site(site).plan)
    batch_s = {}
    for each in (one for gpu in plan.gpus for one in gpu.instances):
        batch_s[each.workload] = max(batch_s.get(each.workload, 0.0), each.latency_s)
    history = History()
    session = SimpleNamespace(
        site=site.model_copy(update={"mode": mode}),
        grid=SimpleNamespace(at=grid),
        services={
            "photos": SimpleNamespace(window=Window(photos_rps, slower * batch_s["photos"])),
            "video": SimpleNamespace(window=Window(100.0, 0.5 * batch_s["video"])),
        },
        history=history,
    )
    control = SimpleNamespace(joint=plan)
    made = JointFollower.of(cast(Any, session), cast(Any, control))
    assert made is not None
    return made, site, control, history.decisions


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


def test_what_was_decided_is_decided_again_across_plans(tmp_path):
    made, site, _, _ = follower(tmp_path, photos_rps=600.0)
    causes = [made.look(5.0 * at) for at in range(30)]
    assert made.next(site, next(cause for cause in causes if cause)) is not None
    made.taken_over()
    [made.look(150.0 + 5.0 * at) for at in range(10)]
    log = made.session.history.log
    assert [entry["kind"] for entry in log].count("policy") == 2
    replayed = decide_again(log)
    assert replayed.differences == () and replayed.decisions == 1 and replayed.steps == 40


def test_a_plan_that_saves_too_little_stays(tmp_path):
    made, site, control, recorded = follower(tmp_path, photos_rps=430.0)
    made.rates_rps = {"photos": 499.0, "video": 100.0}
    assert made.next(site, "load") is None, "a clock at most would change"
    made.stay(7.0)
    (kept,) = recorded
    assert kept.decision.kind == "keep_plan" and "instead of" in kept.decision.reason and kept.t_s == 7.0
    before = control.joint
    made.taken_over()
    assert control.joint is before, "the plan in force goes on"


def test_more_load_is_planned_for_whatever_it_costs(tmp_path):
    made, site, _, _ = follower(tmp_path)
    made.rates_rps = {"photos": 700.0, "video": 100.0}
    gpus = made.next(site, "load")
    assert gpus is not None and served(gpus)["photos"] > 690
    assert "instead of" in made.why


WEIGHTS = ", objective: weights, weights: {cost: 0.01, carbon: 5}, intensity: 300 g/kWh"


def test_another_intensity_changes_a_plan_that_weighs_grams_against_dollars(tmp_path):
    made, site, control, recorded = follower(
        tmp_path, photos_rps=400.0, planned_rps=400, plan_text=WEIGHTS, grid=lambda now_s: 3000.0
    )
    causes = [made.look(5.0 * at) for at in range(70)]
    assert "intensity" in causes
    assert recorded[0].decision.cause == "intensity"
    before = control.joint
    gpus = made.next(site, "intensity")
    assert gpus is not None and sum(g.power_w for g in gpus) < sum(g.power_w for g in before.gpus), made.why
    made.taken_over()
    assert control.joint is not before and control.joint.certificate.objective.g_per_kwh == 3000.0
    assert made.policy.watt.g_per_kwh == 3000.0


def test_another_intensity_changes_no_plan_of_watts_or_dollars_alone(tmp_path):
    made, *_ = follower(tmp_path, plan_text=", intensity: 300 g/kWh", grid=lambda now_s: 900.0)
    assert not any(made.look(5.0 * at) for at in range(200))
    section = made.site.plan
    for name, words in (("energy", "watts alone"), ("cost", "dollars alone"), ("carbon", "every plan alike")):
        price = watt_price(objective_of(name, 300.0), section)
        assert price.per_w_per_g == 0.0 and words in price.why_fixed
    mixed = section.model_copy(update={"weights": ObjectiveWeights(carbon=0.1, cost=1.0)})
    objective = objective_of({"carbon": 0.1, "cost": 1.0}, 300.0, pue=1.2)
    price = watt_price(objective, mixed)
    later = objective_of({"carbon": 0.1, "cost": 1.0}, 480.0, pue=1.2)
    assert price.ratio(480.0) == pytest.approx(later.per_w / objective.per_w) and not price.why_fixed
    embodied = objective_of("carbon", 300.0, embodied_g_per_hour=9.0)
    assert watt_price(embodied, section).ratio(600.0) == pytest.approx(2.0)
    watts = objective_of({"carbon": 0.1, "energy": 0.2}, 300.0)
    assert "every plan alike" in watt_price(watts, mixed).why_fixed


def test_rates_of_a_changed_site_file_are_followed_from_then_on(tmp_path):
    made, _, _, _ = follower(tmp_path)
    changed = load(site_file(tmp_path, 450))
    assert made.next(changed, "services") is not None
    made.taken_over()
    assert made.site is changed and made.policy.planned_rps["photos"] == pytest.approx(450.0)
