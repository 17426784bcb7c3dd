"""``joulery export`` as a user runs it: one scrape, an always-on exporter, an engine, a collector."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.engine_pages import Page, shown, vllm
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.e2e
COMMAND = (sys.executable, "-m", "joulery", "export")
METER = ("--meter", "cpu-model:10,40")


def export(*arguments, **more):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, **more)


def values(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(found, name):
    return sum(value for key, value in found.items() if key[0] == name)


@contextmanager
def running(*arguments):
    """An exporter on a free port, its address and its process; it ends cleanly."""
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", "--beside", *METER, *arguments], stderr=subprocess.PIPE, text=True
    )
    try:
        lines = iter(process.stderr.readline, "")
        address = next(match[1] for line in lines if (match := re.search(r"listening on (\S+)", line)))
        yield address, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 0


def fetch(address):
    with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def test_one_scrape_adds_up_and_nothing_listens():
    done = export("--port", "9", "--once", "--period", "200 ms", *METER, "--carbon", "360 g/kWh")
    assert done.returncode == 0, done.stderr
    found = values(done.stdout)
    divided = total(found, "joulery_node_divided_joules_total")
    names = ("workload_energy", "node_idle", "node_unattributed")
    assert divided > 0
    assert sum(total(found, f"joulery_{name}_joules_total") for name in names) == pytest.approx(divided, rel=1e-9)
    assert total(found, "joulery_node_carbon_grams_total") == pytest.approx(divided * 1e-4)


def test_one_scrape_without_home_rights_or_intensity(tmp_path):
    done = export("--once", "--period", "200 ms", *METER, env={"PATH": os.environ["PATH"]}, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "\njoulery_workload_carbon_grams_total{" not in done.stdout
    assert "\njoulery_carbon_intensity_known_ratio " not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "99999"), "--port"),
        (("--carbon", "no-such-file.csv"), "no-such-file.csv"),
        (("--meter", "dcgm:localhost:1"), "does not answer"),
        (("--user", "no-such-user-here"), "--user"),
    ],
)
def test_bad_input_is_one_message(arguments, message):
    done = export(*(METER if "--meter" not in arguments else ()), "--beside", *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert message in done.stderr


def test_a_second_exporter_of_a_node_is_refused():
    with socket.socket(socket.AF_UNIX) as held:
        with suppress(OSError):  # an exporter runs on this machine already
            held.bind("\0joulery-export")
        done = export("--port", "0", *METER)
    assert done.returncode == 2
    assert "another joulery export runs on this node" in done.stderr


def test_an_engine_gets_its_own_joules_and_pushes_reach_the_collector():
    """The page is served by this very process, which is found by its port."""
    page = Page(vllm(running=1.0))
    with shown(page), running(
        "--period", "100 ms", "--engine", page.url, "--engine-interval", "100 ms", "--otlp", page.url,
        "--otlp-interval", "1 s", "--carbon", "360 g/kWh",
    ) as (address, process):  # fmt: skip
        answered, output = 7.0, 340.0

        def per_token():
            nonlocal answered, output
            answered, output = answered + 1, output + 50
            page.text = vllm(output=output, answered=answered, running=1.0)
            sum(range(100_000))
            found = values(fetch(address))
            return total(found, "joulery_model_joules_per_token") > 0 and found

        found = wait_until(per_token, "joules of a token")
        spent = total(found, "joulery_model_energy_joules_total")
        assert 0 < spent <= total(found, "joulery_node_divided_joules_total")
        assert total(found, "joulery_model_carbon_grams_total") == pytest.approx(spent * 1e-4)
        parts = {dict(key[1:])["part"]: v for key, v in found.items() if key[0] == "joulery_engine_energy_joules_total"}
        assert parts["models"] == pytest.approx(spent)
        assert fetch(address.replace("/metrics", "/healthz")) == "ok\n"
        body = json.loads(wait_until(lambda: page.posts, "a push")[0])
        metrics = body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
        assert {"hw.energy", "hw.power"} <= {metric["name"] for metric in metrics}
        page.text = ""
        wait_until(lambda: 'joulery_engine_up{engine="' in fetch(address) and " 0.0" in re.search(
            r"joulery_engine_up\{.*", fetch(address))[0], "the engine down")  # fmt: skip
        assert process.poll() is None


def table(pid, name):
    return Path(f"/proc/{pid}/net/{name}").read_text().splitlines()


def test_it_listens_on_loopback_by_default():
    with running() as (address, process):
        port = int(address.rpartition(":")[2].partition("/")[0])
        tables = [line.split() for name in ("tcp", "tcp6") for line in table(process.pid, name)]
        listening = {row[1] for row in tables if len(row) > 3 and row[3] == "0A" and row[1].endswith(f":{port:04X}")}
    assert listening == {f"0100007F:{port:04X}"}
