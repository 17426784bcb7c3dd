"""A real Prometheus scrapes the exporter's page and answers every query of the dashboard, the rules and the docs."""

import json
import shutil
import subprocess
import urllib.parse
import urllib.request

import pytest
from scripts.metrics_page import QUERIES

from joulery.domain.energy.workload import ModelCounters, NodeWorkload
from joulery.gateway.exporter.collector import ExporterMetrics
from joulery.runtime.exporting.intensity_feed import IntensityFeed
from tests.deploy.test_files import DEPLOY, expressions
from tests.fakes.engine_pages import Page, shown
from tests.runtime.exporting.nodes import START_S, Node, StatedEngine
from tests.runtime.exporting.test_node import series
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
CONFIG = """\
global: {{scrape_interval: 250ms, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs: [{{job_name: joulery-node, static_configs: [{{targets: ["{target}"]}}]}}]
"""


def page_of_a_node():
    engine = StatedEngine(pid=1, counted={"qwen": ModelCounters(0.0, 0.0, 0.0)}, active=1.0)
    feed = IntensityFeed(lambda now_s: series([360.0]), lambda: START_S)
    feed.first()
    node = Node(engines=(engine,), intensity=feed)
    node.use.processes = {1: (NodeWorkload("slurm", "7"), 4.0)}
    node.run(10)
    engine.counted = {"qwen": ModelCounters(3.0, 40.0, 60.0)}
    node.run(10)
    return ExporterMetrics(node.exporter).render()[0].decode()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """The address of a Prometheus that has scraped twice."""
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed")
    folder = tmp_path_factory.mktemp("prometheus")
    with shown(Page(page_of_a_node())) as page:
        config = CONFIG.format(rules=DEPLOY / "prometheus/alerts.yml", target=page.url.removeprefix("http://"))
        (folder / "prometheus.yml").write_text(config)
        command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        with (folder / "log").open("w+") as log:
            process = subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stderr=log)
            try:
                address = wait_until(lambda: listening(folder / "log"), "the port of Prometheus")
                wait_until(lambda: twice(address), "two scrapes")
                yield address
            finally:
                process.terminate()
                process.wait(60)


def listening(log):
    found = [line for line in log.read_text().splitlines() if "Listening on" in line and "address=" in line]
    return found and f"http://{found[0].rpartition('address=')[2].split()[0]}"


def ask(address, query):
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        found = json.load(answer)
    assert found["status"] == "success", query
    return found["data"]["result"]


def twice(address):
    try:
        found = ask(address, "count_over_time(up[1m])")
    except OSError:
        return False
    return found and float(found[0]["value"][1]) >= 3


def filled(expression):
    return expression.replace("$instance", ".*").replace("$__rate_interval", "1m")


def test_every_panel_and_every_example_has_an_answer(prometheus):
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    empty = [query for query in [*panels, *QUERIES.values()] if not ask(prometheus, filled(query))]
    assert empty == []


def test_every_rule_is_evaluated(prometheus):
    for expression in expressions():
        ask(prometheus, filled(expression))
    with urllib.request.urlopen(f"{prometheus}/api/v1/rules", timeout=PATIENCE_S) as answer:
        groups = json.load(answer)["data"]["groups"]
    assert {rule.get("lastError", "") for group in groups for rule in group["rules"]} <= {""}


def test_joules_of_a_token_come_out_as_on_the_page(prometheus):
    (found,) = ask(prometheus, 'joulery_model_joules_per_token{tokens="output"}')
    (energy,) = ask(prometheus, "joulery_model_energy_joules_total")
    assert float(found["value"][1]) == pytest.approx(float(energy["value"][1]) / 60.0)
    assert found["metric"]["model"] == "qwen"


def dashboard():
    return json.loads((DEPLOY / "grafana/joulery-node.json").read_text())
