import math
import re

import pytest
from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from scripts.metrics_page import PAGE, page

from joulery import __version__
from joulery.domain.decisions import Decision
from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.energy.footprint import Footprint, Part
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import EnergyShare, Outcome, RequestRecord
from joulery.domain.serving.timeline import (
    CarbonBasis,
    CarbonFeed,
    CarbonLabel,
    Charge,
    DecisionRecord,
    MeterNow,
    NowSnapshot,
    ServiceLabel,
    ServiceTick,
    SiteLabel,
    Tick,
)
from joulery.gateway.metrics import ENERGY_BUCKETS_J, LATENCY_BUCKETS_S, MAX_LABELS, METRICS, Family, Metrics, Registry

NAN = math.nan


def record(service="photos", variant="lite0", outcome=Outcome.OK, latency_s=0.02, energy_j=0.5):
    share = None if energy_j is None else EnergyShare(energy_j, None, Quality.MODELLED)
    return RequestRecord(service, variant, "r1", 10.0, 10.0, 10.0 + latency_s, outcome, 0.01, 0.01, 1, share)


def footprint(energy_j, **more):
    return Footprint(
        parts=(Part("cpu:0", "package", energy_j, Quality.MODELLED, "cpu-model"),),
        idle_j=2.0,
        unattributed_j=1.0,
        duration_s=10.0,
        covered_s=9.0,
        idle_quality=Quality.MODELLED,
        **more,
    )


def snapshot(charges=(), **more):
    site = SiteLabel(
        "s",
        "act",
        carbon=CarbonLabel("GB", "a file", CarbonBasis.REPLAYED),
        services=(ServiceLabel("photos", 0.08, 0.95, (("lite0", 0.75),)),),
    )
    fields = {
        "ticks": (
            Tick(1.0, 1.0, g_per_kwh=900.0),
            Tick(
                2.0,
                1.0,
                power_w=40.0,
                g_per_kwh=180.0,
                services=(
                    ServiceTick("photos", 10, attainment_ratio=0.9, accuracy_ratio=0.75),
                    ServiceTick("quiet", 0),
                ),
            ),
        ),
        "meters": (
            MeterNow("cpu:0", "package", "cpu-model", Quality.MODELLED, 40.0, 0.1),
            MeterNow("gpu:0", "board", "nvml", Quality.MEASURED, NAN, math.inf),
        ),
        **more,
    }
    fields = {"carbon": CarbonFeed(known=True, age_s=30.0), **fields}
    return NowSnapshot(site, 0.0, 2.0, charges=tuple(charges), **fields)


def samples(metrics):
    body, _ = metrics.render()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_a_snapshot_becomes_base_units():
    grams = {"carbon_g": 3.0, "carbon_covered_j": 13.0, "signal": Signal.AVERAGE, "scope": Scope.LIFECYCLE}
    metrics = Metrics(["photos"], lambda: snapshot([Charge("photos", "nlp", footprint(10.0, **grams))]))
    got = samples(metrics)
    who = (("owner", "nlp"), ("workload", "photos"))
    part = (("component", "package"), ("device", "cpu:0"), ("owner", "nlp"), ("quality", "modelled"))
    assert got["joulery_energy_joules_total", *part, ("workload", "photos")] == 10.0
    assert got["joulery_idle_joules_total", who[0], ("quality", "modelled"), who[1]] == 2.0
    assert got["joulery_unattributed_joules_total", who[0], ("quality", "modelled"), who[1]] == 1.0
    assert got["joulery_carbon_grams_total", who[0], ("scope", "lifecycle"), ("signal", "average"), who[1]] == 3.0
    assert got["joulery_coverage_ratio", *who] == 0.9
    intensity = [value for key, value in got.items() if key[0].startswith("joulery_carbon_intensity_grams")]
    assert intensity == [180.0]
    assert got["joulery_slo_attainment_ratio", ("workload", "photos")] == 0.9
    assert got["joulery_accuracy_ratio", ("workload", "photos")] == 0.75
    assert got["joulery_slo_latency_seconds", ("quantile", "0.95"), ("workload", "photos")] == 0.08


def test_what_is_unknown_is_absent_not_zero():
    got = samples(Metrics(["photos"], lambda: snapshot([Charge("photos", "nlp", footprint(1.0))])))
    names = [(key[0], dict(key[1:])) for key in got]
    assert not any(name == "joulery_carbon_grams_total" for name, _ in names)
    assert not any(labels.get("workload") == "quiet" for _, labels in names)
    assert [labels["device"] for name, labels in names if name == "joulery_power_watts"] == ["cpu:0"]
    stale = {dict(key[1:])["device"]: v for key, v in got.items() if key[0] == "joulery_meter_staleness_seconds"}
    assert stale == {"cpu:0": 0.1, "gpu:0": math.inf}


def test_before_the_first_snapshot_only_the_build_is_known():
    got = samples(Metrics())
    assert [key for key in got if "build" not in key[0]] == []
    assert got[next(iter(got))] == 1.0
    assert ("version", __version__) in next(iter(got))


def test_two_charges_of_one_owner_are_one_series():
    both = [Charge("photos", "nlp", footprint(10.0)), Charge("photos", "nlp", footprint(5.0))]
    got = samples(Metrics(["photos"], lambda: snapshot(both)))
    assert [value for key, value in got.items() if key[0] == "joulery_energy_joules_total"] == [15.0]


def test_labels_are_bounded_and_nothing_is_lost():
    many = [Charge("photos", f"owner{i:04}", footprint(1.0)) for i in range(MAX_LABELS + 50)]
    got = samples(Metrics(["photos"], lambda: snapshot(many)))
    energy = {dict(key[1:])["owner"]: v for key, v in got.items() if key[0] == "joulery_energy_joules_total"}
    assert len(energy) == MAX_LABELS + 1
    assert energy["other"] == 50.0
    assert math.fsum(energy.values()) == MAX_LABELS + 50


def test_requests_are_counted_by_outcome_and_answers_observed():
    metrics = Metrics(["photos"])
    for _ in range(3):
        metrics.request(record())
    metrics.request(record(energy_j=None))
    metrics.request(record(outcome=Outcome.OVERLOADED, variant=""))
    got = samples(metrics)
    assert got["joulery_requests_total", ("outcome", "ok"), ("workload", "photos")] == 4
    assert got["joulery_requests_total", ("outcome", "overloaded"), ("workload", "photos")] == 1
    who = (("variant", "lite0"), ("workload", "photos"))
    assert got["joulery_request_latency_seconds_count", *who] == 4
    assert got["joulery_request_latency_seconds_sum", *who] == pytest.approx(0.08)
    assert got["joulery_request_energy_joules_count", *who] == 3
    assert got["joulery_request_energy_joules_sum", *who] == 1.5
    buckets = {dict(k[1:])["le"]: v for k, v in got.items() if k[0] == "joulery_request_latency_seconds_bucket"}
    assert (buckets["0.01"], buckets["0.025"]) == (0, 4)


def test_the_buckets_reach_from_a_tenth_of_a_millisecond_and_millijoule():
    assert LATENCY_BUCKETS_S[:4] == (0.0001, 0.00025, 0.0005, 0.001)
    assert (LATENCY_BUCKETS_S[-1], ENERGY_BUCKETS_J[0], ENERGY_BUCKETS_J[-1]) == (500.0, 0.0001, 50000.0)


def test_names_that_clients_invent_make_no_series():
    metrics = Metrics(["photos"])
    for i in range(1000):
        metrics.request(record(service=f"invented{i}", variant="", outcome=Outcome.UNKNOWN))
    assert samples(metrics)["joulery_requests_total", ("outcome", "unknown"), ("workload", "other")] == 1000
    assert len(metrics.render()[0].splitlines()) < 100


def test_decisions_and_replans_are_counted():
    metrics = Metrics(mode="shadow")
    for i in range(MAX_LABELS + 5):
        decision = Decision("set_mix", "photos", {}, "clover", "why", f"cause{i}")
        metrics.decision(DecisionRecord(1.0, decision, "shadowed"))
    got = samples(metrics)
    labels = (("kind", "set_mix"), ("mode", "shadow"), ("outcome", "shadowed"), ("policy", "clover"))
    assert got["joulery_decisions_total", *labels] == MAX_LABELS + 5
    assert got["joulery_replans_total", ("cause", "other")] == 5


def test_what_is_exposed_is_what_is_declared():
    grams = {"carbon_g": 3.0, "carbon_covered_j": 13.0, "signal": Signal.AVERAGE, "scope": Scope.LIFECYCLE}
    metrics = Metrics(["photos"], lambda: snapshot([Charge("photos", "nlp", footprint(10.0, **grams))]))
    metrics.request(record())
    metrics.decision(DecisionRecord(1.0, Decision("set_mix", "photos", {}, "clover", "why", "intensity"), "applied"))
    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    seen = {}
    for family in parse_openmetrics(body.decode()):
        for sample in family.samples:
            if sample.name.endswith(("_created", "_bucket", "_sum")):
                continue
            name = sample.name.removesuffix("_count") if family.type == "histogram" else sample.name
            seen[name] = (family.type, frozenset(sample.labels), family.documentation)
    assert seen == {m.name: (m.kind, frozenset(m.labels), m.help) for m in METRICS}


def test_names_end_in_a_base_unit():
    units = "joules|grams|watts|seconds|ratio|grams_per_kilowatthour|requests|decisions|replans|info"
    for family in METRICS:
        assert re.fullmatch(rf"joulery_[a-z_]*({units})(_total)?", family.name), family.name
        assert family.name.endswith("_total") == (family.kind == "counter")


def test_the_reference_page_is_current():
    assert PAGE.read_text() == page(), "run: python scripts/metrics_page.py"


def test_a_renamed_family_is_exported_under_both_names():
    families = (
        Family("app_running_requests", "gauge", ("model",), "Requests that run.", old="app_working_requests"),
        Family("app_answers_total", "counter", (), "Answers.", old="app_replies_total"),
        Family("app_wait_seconds", "histogram", (), "Time in the queue.", old="app_rest_seconds"),
        Family("app_plain", "gauge", (), "Never renamed."),
    )
    registry = Registry(families)
    Gauge("app_running_requests", "h", ["model"], registry=registry).labels("a").set(3)
    Counter("app_answers", "h", registry=registry).inc(2)
    Histogram("app_wait_seconds", "h", buckets=(1.0,), registry=registry).observe(0.5)
    Gauge("app_plain", "h", registry=registry).set(1)
    text = generate_latest(registry).decode()
    values = {
        (s.name, tuple(s.labels.items())): s.value for f in text_string_to_metric_families(text) for s in f.samples
    }
    assert values["app_running_requests", (("model", "a"),)] == values["app_working_requests", (("model", "a"),)] == 3
    assert values["app_answers_total", ()] == values["app_replies_total", ()] == 2
    for suffix in ("sum", "count"):
        assert values[f"app_wait_seconds_{suffix}", ()] == values[f"app_rest_seconds_{suffix}", ()]
    assert "Old name of app_running_requests" in text
