import asyncio
import os
from dataclasses import replace

import pytest

from joulery.app.profiling.joining import JoiningTimes
from joulery.app.serving.service import choose, objectives_from_config, service_setup
from joulery.app.serving.site_watch import SiteWatch
from joulery.config import load
from joulery.domain.errors import ConfigError, DataError, InfeasibleError
from joulery.domain.serving.engine import (
    ModelKind,
    ModelRef,
    Outcome,
    ReplicaSpec,
    ReplicaState,
    ReplicaView,
    RequestRecord,
)
from joulery.domain.serving.profile import Timings
from joulery.policies.serving.search.layout_space import cpu_slices
from joulery.policies.serving.variants.traffic_split import TrafficSplit
from joulery.runtime.serving.running_service import RunningService
from joulery.runtime.session.requests import RequestWindow
from joulery.steady_time import unix_s
from tests.app.serving.test_service import profile, two_cores  # noqa: F401 - a fixture
from tests.policies.serving.trial_world import trying
from tests.runtime.site_files import toy_site


def rewritten(path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    stamp = path.stat()
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1_000_000))


def test_a_file_that_stays_as_it_is_says_nothing(tmp_path):
    watch = SiteWatch(toy_site(tmp_path))
    assert watch.changed() == (None, "")


def test_a_tightened_slo_is_taken_over_once(tmp_path):
    path = toy_site(tmp_path)
    watch = SiteWatch(path)
    rewritten(path, "500 ms", "100 ms")
    site, remark = watch.changed()
    assert site.services[0].slo.latency_s == 0.1 and remark == ""
    assert watch.changed() == (None, "")


def test_what_cannot_change_without_a_restart_is_said(tmp_path):
    path = toy_site(tmp_path, changed={"lambda: 10 %": "lambda: 10 %, search: learning"})
    watch = SiteWatch(path)
    rewritten(path, "lambda: 10 %", "lambda: 20 %")
    assert watch.changed()[1] == ""
    rewritten(path, "search: learning", "search: clover")
    site, remark = watch.changed()
    assert site is not None and "restart for the rest" in remark


def test_a_file_that_is_wrong_or_gone_changes_nothing(tmp_path):
    path = toy_site(tmp_path)
    watch = SiteWatch(path)
    rewritten(path, "500 ms", "500 apples")
    site, remark = watch.changed()
    assert site is None and "not taken over" in remark and "apples" in remark
    path.unlink()
    site, remark = watch.changed()
    assert site is None and "not taken over" in remark
    toy_site(tmp_path)
    assert watch.changed()[0] is not None


def test_an_accuracy_loss_is_carbon_alone_within_a_floor(tmp_path):
    site = SiteWatch(toy_site(tmp_path, changed={"lambda: 10 %": "accuracy_loss: 5 %"})).read
    asked = objectives_from_config(site.services[0], 0.8)
    assert (asked.lambda_ratio, asked.minimum_accuracy_ratio) == (1.0, pytest.approx(0.76))
    with pytest.raises(InfeasibleError):
        replace(trying(), objectives=objectives_from_config(site.services[0], 1.0))


VIEW = ReplicaView(
    "r1", ReplicaSpec("sums", "large", cpu_slices((1,))[0], ModelRef(ModelKind.PYTHON, "a:b")), ReplicaState.READY
)
CLOVER = "policy: {kind: clover, lambda: 10 %, base_intensity: 200 g/kWh}"
FIXED = "policy: {kind: fixed, variant: small}"
THIRD = """        - {name: third, accuracy: 85 %, accuracy_source: made up,
            model: {kind: python, target: "tests.runtime.toy_models:Sum", options: {busy_s: 0.004}}}
    slo:"""


def running(path) -> RunningService:
    """The service of a site file, as it was started."""
    site = load(path)
    config = site.services[0]
    setup = service_setup(site, config, path.parent)
    chosen = choose(site, config, setup, profile())
    window = RequestWindow("sums", 60.0)
    return RunningService(setup, chosen, profile(), window, layouts=[(0.0, chosen.policy.candidates[0])])


def revise(path, one: RunningService, watch: SiteWatch, *changes: tuple[str, str]) -> list[str]:
    """Change the file, take over what may be; the warnings."""
    for old, new in changes:
        rewritten(path, old, new)
    revisions, warnings = watch.revisions({"sums": one})
    for revision in revisions:
        one.setup, one.chosen = revision.setup, revision.chosen
    return warnings


def test_a_canary_joins_a_fixed_service_grows_and_takes_over_without_a_restart(tmp_path):
    path = toy_site(tmp_path, changed={CLOVER: FIXED})
    one, watch = running(path), SiteWatch(path, tmp_path)
    base = one.chosen.base
    split = "policy: {kind: split, shares: {small: 90 %, third: 10 %}}"
    assert revise(path, one, watch, (FIXED, split), ("    slo:", THIRD)) == []
    assert isinstance(one.chosen.driven, TrafficSplit) and one.chosen.loaded == ("small", "third")
    assert "third joined without a profile" in one.chosen.remark and "small" in one.chosen.remark
    assert one.setup.models["third"].options == '{"busy_s": 0.004}'
    for k in range(20):
        end_s = unix_s() - 1.0 + k / 100
        record = RequestRecord("sums", "third", "r", end_s - 0.05, end_s - 0.04, end_s, Outcome.OK, 0.04, 0.03, 1, None)
        one.window.add(record)
    assert revise(path, one, watch, ("small: 90 %, third: 10 %", "small: 40 %, third: 60 %")) == []
    assert set(one.chosen.policy.candidates[0].counts) == {"third"} and one.chosen.base == base
    assert revise(path, one, watch, ("{small: 40 %, third: 60 %}", "{third: 100 %}")) == []
    assert one.chosen.loaded == ("third",) and one.setup.family["small"].accuracy_ratio == 0.75, "it answered before"


def test_a_variant_that_answered_is_planned_with_its_live_times(tmp_path):
    path = toy_site(tmp_path, changed={CLOVER: FIXED})
    one, watch = running(path), SiteWatch(path, tmp_path)
    for k in range(20):
        end_s = unix_s() - 1.0 + k / 100
        one.window.add(
            RequestRecord("sums", "third", "r", end_s - 0.05, end_s - 0.04, end_s, Outcome.OK, 0.04, 0.03, 1, None)
        )
    assert revise(path, one, watch, (FIXED, "policy: {kind: fixed, variant: third}"), ("    slo:", THIRD)) == []
    assert one.chosen.remark == ""
    assert one.chosen.predictor.profile.entry("third", cpu_slices((1,))[0]).loaded.mean_s == pytest.approx(0.04)


def test_a_split_that_cannot_be_run_changes_nothing(tmp_path):
    path = toy_site(tmp_path, changed={CLOVER: FIXED})
    one, watch = running(path), SiteWatch(path, tmp_path)
    before = one.chosen
    (warning,) = revise(path, one, watch, (FIXED, "policy: {kind: split, shares: {small: 90 %, third: 10 %}}"))
    assert "not taken over" in warning and "third" in warning and one.chosen is before
    (warning,) = revise(path, one, watch, ("small: 90 %, third: 10 %", "small: 90 %, large: 20 %"))
    assert "100 %" in warning and one.chosen is before


def test_another_kind_of_policy_needs_a_restart(tmp_path):
    path = toy_site(tmp_path)
    one, watch = running(path), SiteWatch(path, tmp_path)
    before = one.chosen
    (warning,) = revise(path, one, watch, (CLOVER, FIXED))
    assert "restart for the rest" in warning and one.chosen is before


@pytest.mark.parametrize(
    ("policy", "more", "fault"),
    [
        ("{kind: split, shares: {small: 60 %, large: 30 %}}", {}, "sum to 100 %"),
        ("{kind: split, shares: {}}", {}, "sum to 100 %"),
        ("{kind: split, shares: {small: 60 %, lage: 40 %}}", {}, "not a variant of this service"),
        ("{kind: split, shares: {small: 60 %, large: 40 %}}", {"mode: act": "mode: advise"}, "mode act only"),
        (
            "{kind: split, shares: {small: 60 %, large: 40 %}}",
            {"    slo:": "    minimum_accuracy: 79 %\n    slo:"},
            "less accurate than minimum_accuracy",
        ),
        (
            "{kind: split, shares: {small: 60 %, large: 40 %}}",
            {"serving: {": "serving: {engine: {kind: ray}, "},
            "not on Ray",
        ),
    ],
)
def test_a_split_that_cannot_be_kept_is_one_error(tmp_path, policy, more, fault):
    with pytest.raises(ConfigError, match=fault):
        load(toy_site(tmp_path, changed={CLOVER: f"policy: {policy}", **more}))


NEW = """        - {name: third, accuracy: 78 %, accuracy_source: made up,
            model: {kind: python, target: "tests.runtime.toy_models:Sum", options: {busy_s: 0.006}}}
    slo:"""
SMALL = """        - {name: small, accuracy: 75 %, accuracy_source: made up,
            model: {kind: python, target: "tests.runtime.toy_models:Sum", options: {busy_s: 0.002}}}
"""
LARGE = SMALL.replace("small, accuracy: 75 %", "large, accuracy: 80 %").replace("0.002", "0.006")


def chosen_from(one: RunningService) -> set[str]:
    return {name for layout in one.chosen.policy.candidates for name in layout.counts}


@pytest.mark.parametrize("search", ["predict", "learning", "clover"])
def test_variants_of_a_clover_policy_join_and_leave_and_the_baseline_stays(tmp_path, search):
    path = toy_site(tmp_path, changed={"lambda: 10 %": f"lambda: 10 %, search: {search}"})
    one, watch = running(path), SiteWatch(path, tmp_path)
    before = one.chosen
    assert revise(path, one, watch, ("    slo:", NEW)) == []
    assert chosen_from(one) == {"small", "large"}, "its times are assumed: it answers a small share first"
    assert set(one.chosen.loaded) == {"small", "large", "third"}
    assert "third is planned" in one.chosen.remark and "times of large" in one.chosen.remark
    assert one.chosen.base == before.base and one.chosen.audit == before.audit
    assert one.chosen.policy.family == (("large", False), ("small", False), ("third", True))
    assert revise(path, one, watch, (SMALL, "")) == []
    assert chosen_from(one) == {"large"} and set(one.chosen.loaded) == {"large", "third"}
    assert one.setup.family["small"].accuracy_ratio == 0.75, "its answers are still counted"
    assert one.chosen.predictor.instances(before.policy.candidates[0]), "and compared"
    assert revise(path, one, watch, ("    slo:", SMALL + "    slo:")) == []
    assert chosen_from(one) == {"small", "large"} and one.chosen.remark == "", "it was measured already"


def answered(one: RunningService, variant: str, end_s: float, took_s: float = 0.1) -> None:
    """A request that a variant answered."""
    begin_s = end_s - took_s
    one.window.add(RequestRecord("sums", variant, "r1", begin_s, begin_s, end_s, Outcome.OK, took_s, 0.03, 1, None))


@pytest.mark.parametrize("search", ["predict", "learning"])
def test_answers_of_a_small_share_are_kept_until_they_are_enough(tmp_path, monkeypatch, search):
    """One a second at most, in a window of a few seconds: its times are known from the thirtieth on."""
    path = toy_site(tmp_path, changed={"lambda: 10 %": f"lambda: 10 %, search: {search}"})
    one, watch = running(path), SiteWatch(path, tmp_path, lambda: [replace(VIEW, warm=("small", "third"))])
    one.window = RequestWindow("sums", 4.0)
    assert revise(path, one, watch, ("    slo:", NEW)) == []
    for k in range(40):
        now_s = 1e9 + k
        monkeypatch.setattr("joulery.app.serving.site_watch.unix_s", lambda now_s=now_s: now_s)
        answered(one, "third", now_s - 0.5)
        for part in range(5):
            answered(one, "large", now_s - 0.1 * part, 0.02)
        assert revise(path, one, watch) == []
        known = k + 1 >= 30
        assert one.chosen.policy.family == (("large", False), ("small", False), ("third", not known))
        assert chosen_from(one) == {"small", "large"} | ({"third"} if known else set())


def test_a_variant_that_replicas_do_not_keep_loaded_is_planned_with_what_is_assumed(tmp_path, monkeypatch):
    path = toy_site(tmp_path)
    one, watch = running(path), SiteWatch(path, tmp_path, lambda: [replace(VIEW, warm=("small",))])
    assert revise(path, one, watch, ("    slo:", NEW)) == []
    for now_s, there in ((1e9, False), (1e9 + 59, False), (1e9 + 61, True)):
        monkeypatch.setattr("joulery.app.serving.site_watch.unix_s", lambda now_s=now_s: now_s)
        assert revise(path, one, watch) == [] and ("third" in chosen_from(one)) == there
    assert "do not keep third loaded" in one.chosen.remark
    assert max(layout.counts.get("third", 0) for layout in one.chosen.policy.candidates) == 1
    chosen = one.chosen
    assert revise(path, one, watch) == [] and one.chosen is chosen, "said once"


def test_where_no_requests_are_steered_one_replica_at_most_is_of_assumed_times(tmp_path):
    path = toy_site(tmp_path)
    one, watch = running(path), SiteWatch(path, tmp_path, steers=False)
    assert revise(path, one, watch, ("    slo:", NEW)) == []
    assert chosen_from(one) == {"small", "large", "third"}
    assert max(layout.counts.get("third", 0) for layout in one.chosen.policy.candidates) == 1


def test_a_variant_that_is_timed_joins_with_times_of_its_own(tmp_path):
    """It takes 1.5 times the CPU seconds of the variant next to it in accuracy; then its live times are known."""
    path = toy_site(tmp_path)
    one, timed = running(path), []

    async def time_joining(service, config, name, model):
        timed.append((service.name, name, model.options))
        return JoiningTimes(cpu_slices((1,))[0], Timings([0.03], [0.015]))

    async def joined() -> list[str]:
        watch = SiteWatch(path, tmp_path, lambda: [VIEW], time_joining)
        assert revise(path, one, watch, ("    slo:", NEW)) == [] and chosen_from(one) == {"small", "large"}
        await asyncio.sleep(0)
        assert revise(path, one, watch) == []
        return revise(path, one, watch)

    asyncio.run(joined())
    assert timed == [("sums", "third", '{"busy_s": 0.006}')]
    assert "15 ms of CPU time" in one.chosen.remark and "times of large times 1.50" in one.chosen.remark
    half = one.chosen.predictor.profile.entry("third", cpu_slices((2,))[0]).loaded.mean_s
    assert half == pytest.approx(1.5 * profile().entry("large", cpu_slices((2,))[0]).loaded.mean_s)
    for k in range(40):
        end_s = unix_s() - 1.0 + k / 100
        one.window.add(
            RequestRecord("sums", "third", "r1", end_s - 0.5, end_s - 0.4, end_s, Outcome.OK, 0.3, 0.03, 1, None)
        )
    watch = SiteWatch(path, tmp_path, lambda: [VIEW])
    assert revise(path, one, watch) == []
    assert "third takes 2.00 times" in one.chosen.remark, "30 ms of CPU time a request; 400 ms are a busy machine's"
    assert one.chosen.policy.family == (("large", False), ("small", False), ("third", False))
    assert one.chosen.predictor.profile.entry("third", cpu_slices((2,))[0]).loaded.mean_s == pytest.approx(2 * half)
    chosen = one.chosen
    assert revise(path, one, watch) == [] and one.chosen is chosen, "once"


def test_a_variant_that_cannot_be_loaded_does_not_join(tmp_path):
    path = toy_site(tmp_path)
    one = running(path)
    before = one.chosen

    async def time_joining(service, config, name, model):
        raise DataError(f"{name} is no model")

    async def refused() -> list[str]:
        watch = SiteWatch(path, tmp_path, list, time_joining)
        assert revise(path, one, watch, ("    slo:", NEW)) == []
        await asyncio.sleep(0)
        return revise(path, one, watch)

    (warning,) = asyncio.run(refused())
    assert "not taken over" in warning and "third is no model" in warning and one.chosen is before


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (LARGE, "", "large is the baseline that savings of this run are compared with, and cannot leave"),
        ("busy_s: 0.002", "busy_s: 0.003", "small has another model"),
        ("accuracy: 75 %", "accuracy: 76 %", "small has another accuracy"),
    ],
)
def test_a_change_of_variants_that_would_mix_measurements_is_one_error(tmp_path, old, new, fault):
    path = toy_site(tmp_path)
    one, watch = running(path), SiteWatch(path, tmp_path)
    before = one.chosen
    (warning,) = revise(path, one, watch, (old, new))
    assert fault in warning and one.chosen is before


def test_objectives_stay_relative_to_the_baseline_when_a_better_variant_joins(tmp_path):
    path = toy_site(tmp_path, changed={"lambda: 10 %": "accuracy_loss: 5 %"})
    one, watch = running(path), SiteWatch(path, tmp_path)
    assert revise(path, one, watch, ("    slo:", NEW.replace("78 %", "90 %"))) == []
    assert one.chosen.policy.objectives.minimum_accuracy_ratio == pytest.approx(0.76)
    assert one.chosen.policy.search.objective.base_accuracy_ratio == 0.8


SERVER = """        - {name: server, accuracy: 84 %, accuracy_source: made up,
            model: {kind: open_inference, url: "http://127.0.0.1:9/net", power: 60 W}}
    slo:"""


@pytest.mark.parametrize("policy", ["clover", "fixed"])
def test_a_server_joins_a_service_of_this_machine_with_a_restart_only(tmp_path, policy):
    """Its watts and times follow from nothing that was measured here."""
    path = toy_site(tmp_path, changed={} if policy == "clover" else {CLOVER: FIXED})
    one, watch = running(path), SiteWatch(path, tmp_path)
    before = one.chosen
    (warning,) = revise(path, one, watch, ("    slo:", SERVER))
    assert "server cannot join without a restart" in warning and one.chosen is before
