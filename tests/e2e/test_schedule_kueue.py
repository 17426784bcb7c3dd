"""``joulery schedule --backend kueue`` as a process beside an API server of Kubernetes in memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.fakes.kueue import FakeKueue
from tests.waiting import wait_until

SITE = """\
joulery: 1
name: cluster
mode: act
carbon: {{kind: typical, zone: GB}}
jobs:
  backend: local
  state: {state}
  quantum: 2 s
  poll: 200 ms
  restart: 1 s
  patience: 1 s
  power: {{slot: 250 W}}
"""


@pytest.fixture
def fake() -> FakeKueue:
    made = FakeKueue(rate=0.0, grace_s=0.2)
    made.flavor("a")
    made.queue("q", {"a": {"nominalQuota": 4}})
    return made


@contextmanager
def living(fake: FakeKueue) -> Iterator[str]:
    """The API server over HTTP, with Kueue at work beside it."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.05):
            fake.pass_time(0.05)

    thread = threading.Thread(target=work)
    with fake.serve() as url:
        thread.start()
        try:
            yield url
        finally:
            ended.set()
            thread.join()


def joulery(folder: Path, url: str, *words: str) -> tuple[list[str], dict[str, str]]:
    """The command line and its environment: a kubeconfig with a token."""
    (folder / "site.yaml").write_text(SITE.format(state=folder / "state"))
    kubeconfig = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "token"}}],
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    environment = {"PATH": os.environ["PATH"], "KUBECONFIG": str(folder / "kubeconfig")}
    return [sys.executable, "-m", "joulery", *words], environment


def held(fake: FakeKueue) -> set[str]:
    workloads = fake.objects["workloads"].values()
    return {one["metadata"]["name"] for one in workloads if "joulery/held" in one["metadata"]["labels"]}


def test_one_round_in_words_changes_nothing_and_says_why(fake: FakeKueue, tmp_path: Path) -> None:
    for number in range(1, 7):
        fake.submit(number, 1)
    with living(fake) as url:
        wait_until(lambda: len(fake.running()) == 4)
        command, environment = joulery(
            tmp_path,
            url,
            "schedule",
            str(tmp_path / "site.yaml"),
            "--backend",
            "kueue",
            "--once",
            "--mode",
            "advise",
            "--json",
        )
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert any(line["kind"] == "round" for line in lines)
        assert all(line["outcome"] == "advised" and line["reason"] for line in lines if line["kind"] == "action")
        assert held(fake) == set() and not any(method == "PATCH" for method, _ in fake.requests)


def test_holds_outlive_a_kill_and_are_given_back_by_the_watchdog_and_by_the_end(
    fake: FakeKueue, tmp_path: Path
) -> None:
    for number in range(1, 13):
        fake.submit(number, 2)
    with living(fake) as url:
        words = ("schedule", str(tmp_path / "site.yaml"), "--backend", "kueue", "--json")
        command, environment = joulery(tmp_path, url, *words)
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as first:
            wait_until(lambda: len(held(fake)) >= 4)
            first.send_signal(signal.SIGKILL)
        wait_until(lambda: held(fake) == set())
        assert len(fake.running()) == 2
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as second:
            wait_until(lambda: len(held(fake)) >= 4)
            second.send_signal(signal.SIGTERM)
            assert second.wait(30) == 0
        assert held(fake) == set() and sum(fake.running().values()) == 4


def test_without_access_it_says_what_to_do(fake: FakeKueue, tmp_path: Path) -> None:
    with living(fake) as url:
        words = ("schedule", str(tmp_path / "site.yaml"), "--backend", "kueue", "--once", "--mode", "advise")
        command, environment = joulery(tmp_path, url, *words)
        for change, text in (({"tokens": set()}, "does not know this user"), ({"rights": set()}, "kubectl apply -k")):
            for name, value in change.items():
                before = getattr(fake, name)
                setattr(fake, name, value)
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            setattr(fake, name, before)
            assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr
        del environment["KUBECONFIG"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 2 and "no access to Kubernetes" in done.stderr
        command, environment = joulery(tmp_path, url, "doctor", "--kueue", "--json")
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        checks = [check for check in json.loads(done.stdout)["checks"] if check["area"] == "kueue"]
        assert len(checks) == 6 and all(check["status"] == "ok" for check in checks)
