"""Reading through slurmrestd, against a server that answers as it does; tests/e2e has the real one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from joulery.adapters.clusters.slurm import SlurmBackend, SlurmScope
from joulery.adapters.clusters.slurm_commands import Done, command
from joulery.adapters.clusters.slurm_rest import RestPlace, SlurmRest, newest_version
from joulery.domain.cluster import Hold, JobState
from joulery.domain.errors import CapabilityError, DataError
from tests.adapters.clusters.fake_slurm import FakeSlurm


@dataclass
class Service:
    """What the service knows; its answers have the form of 22.05's openapi/v0.0.38."""

    slurm: FakeSlurm = field(default_factory=FakeSlurm)
    versions: tuple[str, ...] = ("v0.0.38",)
    token: str = ""
    nodes: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    users: set[str] = field(default_factory=set)
    port: int = 0
    broken: bool = False
    status: int = 200

    def answer(self, path: str, headers: Any) -> tuple[int, Any]:
        self.asked.append(path)
        self.users |= {str(headers.get("X-SLURM-USER-NAME"))}
        if self.token and headers.get("X-SLURM-USER-TOKEN") != self.token:
            return 401, {"errors": [{"error": "Authentication failure"}]}
        if self.status != 200:
            return self.status, {"errors": [{"error": "Unspecified error"}]}
        if path == "/openapi/v3":
            return 200, {"paths": {f"/slurm/{version}/jobs": {} for version in self.versions} | {"/openapi": {}}}
        if path.endswith("/jobs"):
            return 200, json.loads(self.slurm(command("jobs")).out) if not self.broken else {"jbos": []}
        if path.endswith("/partitions"):
            old = path.endswith("v0.0.38/partitions")
            tiers = self.slurm.tiers.items()
            each = [{"name": name, **({"priority_tier": n} if old else {"priority": {"tier": n}})} for name, n in tiers]
            return 200, {"partitions": [*each, {"name": "untold"}]}
        nodes = self.nodes or [
            {
                "name": name,
                "state": state,
                "gres": gres,
                "state_flags": [],
                "partitions": ["train"],
                "cpus": 64,
                "idle_cpus": 64,
                "real_memory": 1000,
                "alloc_memory": 0,
            }
            for name, state, gres in self.slurm.nodes
        ]
        return 200, {"nodes": nodes, "errors": []}


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, document = made.answer(self.path, self.headers)
            body = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


class Reader:
    """A backend that reads from the service and changes through the fake commands."""

    def __init__(self, service: Service, token: str = "", scope: SlurmScope | None = None) -> None:
        self.commands: list[tuple[str, ...]] = []
        self.service = service
        place = RestPlace(url=f"http://127.0.0.1:{service.port}", user="joulery", token=lambda: token, timeout_s=10.0)
        self.rest = SlurmRest(place, self.run)
        self.backend = SlurmBackend(self.rest.run, scope or SlurmScope(), closing=self.rest)

    def run(self, command: Sequence[str]) -> Done:
        self.commands.append(tuple(command))
        if tuple(command[:2]) == ("scontrol", "token"):
            return Done(0, f"SLURM_JWT={self.service.token}\n", "")
        return self.service.slurm(command)


@pytest.fixture
def reader(service: Service) -> Iterator[Any]:
    made: list[Reader] = []

    def make(**more: Any) -> Reader:
        made.append(Reader(service, **more))
        return made[-1]

    yield make
    for one in made:
        one.backend.close()


def test_jobs_and_nodes_come_from_the_service_and_changes_go_through_scontrol(service: Service, reader: Any) -> None:
    service.slurm.submit(1)
    service.slurm.submit(2, job_state="RUNNING")
    one = reader()
    seen = one.backend.snapshot()
    plain = SlurmBackend(service.slurm, SlurmScope()).snapshot()
    assert repr(seen) == repr(plain) and seen.slots == 4, "progress is NaN, which equals nothing"
    assert [job.state for job in seen.jobs] == [JobState.WAITING, JobState.RUNNING]
    assert {words[0] for words in one.commands} == {"scontrol", "sprio"}, "no process was started to read jobs or nodes"
    one.backend.apply(Hold(1))
    assert {command[0] for command in one.commands} <= {"scontrol", "sprio"}, "nor to write"
    assert service.asked.count("/openapi/v3") == 1, "the version is agreed on once"


@pytest.mark.parametrize(
    ("node", "slots"),
    [
        ({"state": "mixed", "state_flags": []}, 2),
        ({"state": "idle", "state_flags": ["DRAIN"]}, 0),
        ({"state": "idle", "state_flags": ["NOT_RESPONDING"]}, 0),
        ({"state": "idle", "state_flags": ["POWERED_DOWN"]}, 2),
        ({"state": "down", "state_flags": []}, 0),
        ({"state": ["IDLE", "DRAIN"]}, 0),
        ({"state": ["ALLOCATED"]}, 2),
        ({"state": ["IDLE", "NOT_RESPONDING"]}, 0),
        ({"state": ["IDLE", "MAINTENANCE"]}, 0),
        ({"state": "idle", "gres": ""}, 0),
        ({"state": "idle", "partitions": ["other"]}, 0),
    ],
)
def test_nodes_of_old_and_new_versions(service: Service, reader: Any, node: dict[str, Any], slots: int) -> None:
    service.nodes = [{"name": "g1", "gres": "gpu:a100:2", "partitions": ["train"], **node}]
    assert reader(scope=SlurmScope(partitions=("train",))).backend.snapshot().slots == slots


@pytest.mark.parametrize("version", ["v0.0.38", "v0.0.42"])
def test_tiers_of_partitions_come_from_the_service(service: Service, reader: Any, version: str) -> None:
    service.versions = (version,)
    service.slurm.tiers = {"train": 3, "low": 1}
    service.slurm.submit(1, priority=7)
    service.nodes = [{"name": "g1", "gres": "gpu:2", "state": "idle", "partitions": ["train", "low"]}]
    assert [job.priority for job in reader().backend.snapshot().jobs] == [2 * 2.0**32 + 7]


def test_an_expired_token_is_renewed_once(service: Service, reader: Any) -> None:
    service.token = "fresh"
    one = reader(token="stale")
    assert one.backend.snapshot().slots == 4
    assert [words for words in one.commands if "token" in words] == [("scontrol", "token", "lifespan=86400")]
    assert service.users == {"joulery"}
    tokens = iter(("second", "third", "fourth"))
    other = reader(token="first")
    other.rest._run = lambda command: Done(0, f"SLURM_JWT={next(tokens)}\n", "")
    with pytest.raises(CapabilityError, match="HTTP 401"):
        other.backend.snapshot()
    assert next(tokens) == "third", "asked for one, no more"
    service.token = "fresh"
    wrong = reader(token="fresh")
    service.token = ""
    assert wrong.backend.snapshot().slots == 4
    service.status = 403
    with pytest.raises(CapabilityError, match="HTTP 403"):
        wrong.backend.snapshot()


def test_what_is_not_understood_or_not_there_is_said(service: Service, reader: Any) -> None:
    service.broken = True
    with pytest.raises(DataError, match="not understood"):
        reader().backend.snapshot()
    service.broken, service.versions = False, ("v0.0.36",)
    with pytest.raises(DataError, match=r"v0\.0\.36; v0\.0\.38 to v0\.0\.45"):
        reader().backend.snapshot()
    service.versions, service.status = ("v0.0.38",), 500
    with pytest.raises(CapabilityError, match="HTTP 500"):
        reader().backend.snapshot()
    service.port = 9
    with pytest.raises(CapabilityError, match="does not answer"):
        reader().backend.snapshot()


def test_the_newest_version_both_know() -> None:
    def offers(*versions: str) -> str:
        return json.dumps({"paths": {f"/slurm/{version}/jobs/": {} for version in versions}})

    assert newest_version(offers("v0.0.38", "v0.0.39", "v0.0.40")) == "v0.0.40"
    assert newest_version(offers("v0.0.9", "v0.0.42", "v0.0.46", "v0.1.0")) == "v0.0.42"
    for bad in ("", "[]", '{"paths": 3}'):
        with pytest.raises(DataError):
            newest_version(bad)
