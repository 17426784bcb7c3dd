"""What the node exporter publishes: every declared family, escaped labels, HTTP within limits, OTLP as specified."""

import http.client
import json
import threading
from contextlib import contextmanager

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from joulery.domain.energy.workload import ModelCounters, NodeWorkload
from joulery.domain.errors import ConfigError
from joulery.gateway.exporter.collector import ExporterMetrics
from joulery.gateway.exporter.families import EXPORT_METRICS
from joulery.gateway.exporter.http import MetricsServer
from joulery.gateway.exporter.otlp import otlp_body
from joulery.gateway.metrics import METRICS
from joulery.runtime.exporting.intensity_feed import IntensityFeed
from tests.runtime.exporting.nodes import START_S, Node, StatedEngine
from tests.runtime.exporting.test_node import series
from tests.waiting import PATIENCE_S

NASTY = 'a"b\\c\nd{}é\x00'


@pytest.fixture
def node():
    engine = StatedEngine(pid=1, counted={NASTY: ModelCounters(0.0, 0.0, 0.0)}, active=1.0)
    feed = IntensityFeed(lambda now_s: series([360.0]), lambda: START_S)
    feed.first()
    made = Node(engines=(engine,), intensity=feed)
    made.use.processes = {1: (NodeWorkload("process", NASTY), 4.0), 2: (NodeWorkload("slurm", "7"), 4.0)}
    made.run(10)
    engine.counted = {NASTY: ModelCounters(3.0, 40.0, 60.0)}
    made.run(10)
    return made


def families(node, accept=""):
    text, _ = ExporterMetrics(node.exporter).render(accept)
    parse = parse_openmetrics if "openmetrics" in accept else text_string_to_metric_families
    return {family.name: family for family in parse(text.decode())}


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_every_family_has_samples_with_the_labels_declared(node, accept):
    found = families(node, accept)
    for declared in EXPORT_METRICS:
        samples = [
            one for one in found[declared.name.removesuffix("_total")].samples if not one.name.endswith("_created")
        ]
        assert samples, declared.name
        assert {tuple(sorted(sample.labels)) for sample in samples} == {tuple(sorted(declared.labels))}, declared.name


def test_labels_are_escaped(node):
    found = families(node)
    assert {one.labels["model"] for one in found["joulery_model_requests"].samples} == {NASTY}
    assert NASTY in {one.labels["workload"] for one in found["joulery_workload_energy_joules"].samples}


def test_names_shared_with_the_gateway_mean_the_same():
    gateway = {family.name: family for family in METRICS}
    for family in EXPORT_METRICS:
        if family.name in gateway:
            assert family == gateway[family.name]


def value(node, name, **labels):
    samples = [one for family in families(node).values() for one in family.samples if one.name == name]
    return sum(one.value for one in samples if labels.items() <= one.labels.items())


def test_a_scrape_adds_up(node):
    metered = value(node, "joulery_node_energy_joules_total")
    parts = [
        value(node, f"joulery_{name}_joules_total") for name in ("workload_energy", "node_idle", "node_unattributed")
    ]
    assert metered == pytest.approx(sum(parts), rel=1e-9) == pytest.approx(2000.0)
    assert value(node, "joulery_node_carbon_grams_total") == pytest.approx(0.2)
    spent = value(node, "joulery_model_energy_joules_total")
    assert value(node, "joulery_model_joules_per_request") == pytest.approx(spent / 3)
    assert value(node, "joulery_model_joules_per_token", tokens="output") == pytest.approx(spent / 60)
    assert value(node, "joulery_model_joules_per_token", tokens="all") == pytest.approx(spent / 100)


@contextmanager
def served(node, trouble=lambda: ""):
    server = MetricsServer("127.0.0.1", 0, ExporterMetrics(node.exporter).render, trouble)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def asked(server, method, path):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=PATIENCE_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def test_the_server_answers_scrapes_and_probes_and_nothing_else(node):
    trouble = [""]
    with served(node, lambda: trouble[0]) as server:
        status, body, headers = asked(server, "GET", "/metrics?x=1")
        assert status == 200 and b"joulery_build_info" in body and headers["Content-Type"].startswith("text/plain")
        assert "Python" not in headers["Server"]
        assert asked(server, "HEAD", "/metrics")[:2] == (200, b"")
        assert asked(server, "GET", "/healthz")[:2] == (200, b"ok\n")
        trouble[0] = "no sample for 60 s"
        assert asked(server, "GET", "/healthz")[0] == 503
        assert asked(server, "GET", "/../etc/passwd")[0] == 404
        assert asked(server, "POST", "/metrics")[0] == 501
        with pytest.raises(ConfigError, match="another process"):
            MetricsServer("127.0.0.1", server.server_address[1], lambda accept: (b"", ""), lambda: "")


def test_a_push_is_what_a_collector_expects(node):
    body = json.loads(otlp_body(node.exporter, "node-1", 1, 2))
    (resource,) = body["resourceMetrics"]
    assert {"key": "host.name", "value": {"stringValue": "node-1"}} in resource["resource"]["attributes"]
    metrics = {metric["name"]: metric for metric in resource["scopeMetrics"][0]["metrics"]}
    energy, power = metrics["hw.energy"], metrics["hw.power"]
    assert (energy["unit"], energy["sum"]["isMonotonic"], energy["sum"]["aggregationTemporality"]) == ("J", True, 2)
    (point,) = energy["sum"]["dataPoints"]
    assert (point["asDouble"], point["startTimeUnixNano"], point["timeUnixNano"]) == (2000.0, "1", "2")
    assert {"key": "hw.type", "value": {"stringValue": "cpu"}} in point["attributes"]
    assert power["unit"] == "W" and power["gauge"]["dataPoints"][0]["asDouble"] == pytest.approx(100.0)
    tokens = metrics["joulery.model.tokens"]["sum"]["dataPoints"]
    assert sorted(point["asDouble"] for point in tokens) == [40.0, 60.0]


def test_an_address_that_is_not_here_is_said_of_its_own_flag():
    with pytest.raises(ConfigError) as refused:
        MetricsServer("192.0.2.7", 0, lambda: (b"", ""), lambda: "")
    assert refused.value.pointer == "--listen"
    assert "Errno" not in refused.value.message
