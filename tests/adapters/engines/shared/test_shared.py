"""One engine, several gateways, one controller: over real sockets, in one process."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from joulery import __version__
from joulery.adapters.engines.shared import client as client_module
from joulery.adapters.engines.shared import control as control_module
from joulery.adapters.engines.shared.client import EngineClient, GatewayName
from joulery.adapters.engines.shared.control import ControlServer
from joulery.adapters.engines.shared.controlled import ControlLink, SteeredEngine
from joulery.adapters.engines.shared.server import EngineServer
from joulery.domain.errors import ActuationError, CapabilityError
from joulery.domain.quality import Quality
from joulery.domain.serving.charging import ChargeTable
from joulery.domain.serving.dispatch import QueueLimit
from joulery.domain.serving.engine import (
    InferRequest,
    InferResponse,
    Outcome,
    QueuedRequest,
    ReplicaSpec,
    ReplicaState,
    ReplicaView,
    RequestError,
    RequestRecord,
    Transition,
)
from joulery.domain.serving.ledger import LedgerEntry, RequestLedger
from joulery.domain.serving.mix import MixStep, ServiceMixes, VariantMix
from joulery.gateway.joined.labels import SharedLabels
from joulery.gateway.tls import client_context
from joulery.steady_time import unix_s
from tests.adapters.engines.support import toy
from tests.gateway import certificates
from tests.waiting import eventually

SPEC = toy("Double", service="s")
ONE = InferRequest({"x": np.ones((1, 2), np.float32)})


class FakeEngine(ServiceMixes):
    """Answers at once, or when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.target: tuple[ReplicaSpec, ...] = ()
        self.starting = False
        self.limits: dict[str, QueueLimit | None] = {}
        self.go = asyncio.Event()
        self.go.set()
        self.running = self.answers = 0
        self.closed = False

    async def apply(self, target: Any, /) -> Transition:
        self.target = tuple(target)
        return Transition(self.target, (), (), unix_s(), 0.0, 0.0, 0.0)

    def replicas(self) -> tuple[ReplicaView, ...]:
        return tuple(ReplicaView(f"r{i}", spec, ReplicaState.READY) for i, spec in enumerate(self.target))

    def backlog(self) -> tuple[QueuedRequest, ...]:
        return tuple(QueuedRequest("s", unix_s()) for _ in range(self.running))

    def limit_queue(self, service: str, limit: QueueLimit | None, /) -> None:
        self.limits[service] = limit

    async def infer(self, service: str, request: InferRequest, /) -> InferResponse:
        arrival_s = unix_s()
        if self.starting or service not in {spec.service for spec in self.target}:
            raise RequestError(f"there is no service {service!r}", Outcome.UNKNOWN)
        if request.variant not in ("", SPEC.variant):
            raise RequestError(f"{service} runs no variant {request.variant!r} now", Outcome.UNKNOWN)
        self.running += 1
        try:
            await self.go.wait()
        finally:
            self.running -= 1
        if np.isnan(request.inputs["x"]).any():
            raise RequestError("NaN", Outcome.FAILED, variant="v", service_s=0.5, cpu_s=0.25, attempts=1)
        self.answers += 1
        outputs = {"y": 2 * request.inputs["x"]}
        return InferResponse(outputs, "v", "r0", arrival_s, unix_s(), unix_s(), 0.01, math.nan)

    async def close(self) -> None:
        self.closed = True


class Site:
    """An engine server on two sockets, with a fake engine."""

    def __init__(self, folder: Path) -> None:
        self.engine = FakeEngine()
        self.server = EngineServer(SharedLabels(), b"the token", ["s"])
        self.ended = asyncio.Event()
        self.control = ControlServer(self.server, self._make, self.ended.set)
        self.gateways, self.controls = str(folder / "g"), str(folder / "c")
        self.entries: list[LedgerEntry] = []
        self.joining: list[asyncio.Task[None]] = []
        self.links: list[ControlLink] = []
        self.text: Any = None

    async def _make(self, _: Any) -> FakeEngine:
        return self.engine

    async def gateway(self, name: str, **options: Any) -> EngineClient:
        client = EngineClient(f"unix:{self.gateways}", GatewayName(name, __version__), **options)
        self.joining.append(asyncio.create_task(client.run()))
        await eventually(lambda: client.joined or client.refused, f"{name} joined")
        return client

    async def controller(self, *, plan: str = "plan") -> SteeredEngine:
        async def page(path: str, query: str, accept: str) -> tuple[int, dict[str, str], bytes]:
            return 200, {"content-type": "text/plain"}, f"{path}?{query}".encode()

        link = ControlLink(page, lambda: None, self.text)
        self.links.append(link)
        await link.open(self.controls)
        found = await link.ask("look")
        engine = SteeredEngine(plan)
        engine.next = found.first
        engine.on_batch = lambda batch: self.entries.extend(batch.entries)
        await engine.take_over(link, found)
        await link.ask("begin", "site")
        return engine

    def conserved(self) -> None:
        """The law: of each gateway, received = ended + open; what was taken is what has ended."""
        ledger = self.server.ledger
        for name in ledger.received:
            assert ledger.received[name] == ledger.ended[name] + ledger.open_of(name)
        assert Counter(entry.gateway for entry in self.entries) == +ledger.ended


@asynccontextmanager
async def site(folder: Path) -> AsyncIterator[Site]:
    made, loop = Site(folder), asyncio.get_running_loop()
    made.server.start()
    listeners = [
        await loop.create_unix_server(made.server.protocol, made.gateways),
        await asyncio.start_unix_server(made.control.connected, made.controls),
    ]
    try:
        yield made
    finally:
        for task in made.joining:
            task.cancel()
        await asyncio.gather(*made.joining, return_exceptions=True)
        await made.server.stop()
        for link in made.links:
            await link.close()
        for one in listeners:
            one.close()
        await eventually(lambda: not made.control.controlled)
        await asyncio.sleep(0)


async def asked(client: EngineClient, request: InferRequest = ONE, service: str = "s") -> InferResponse | RequestError:
    """One request as a gateway makes it: answered, then recorded, in a task of its own."""

    async def work() -> InferResponse | RequestError:
        arrival_s = unix_s()
        try:
            answer = await client.infer(service, request)
        except RequestError as error:
            name = "" if error.outcome is Outcome.UNKNOWN else service
            costs = (error.service_s, error.cpu_s, error.attempts)
            client.record(
                RequestRecord(name, error.variant, "", arrival_s, math.nan, unix_s(), error.outcome, *costs, None)
            )
            return error
        times = (arrival_s, answer.start_s, answer.end_s)
        client.record(
            RequestRecord(
                service, answer.variant, answer.replica, *times, Outcome.OK, answer.service_s, answer.cpu_s, 1, None
            )
        )
        return answer

    return await asyncio.create_task(work())


async def test_requests_of_all_gateways_are_in_one_ledger(tmp_path: Path) -> None:
    async with site(tmp_path) as played:
        engine = await played.controller()
        await engine.apply([SPEC])
        gateways = [await played.gateway(f"g{i}") for i in range(3)]
        answers = await asyncio.gather(*(asked(client) for client in gateways for _ in range(20)))
        assert all(isinstance(one, InferResponse) and one.outputs["y"].tolist() == [[2.0, 2.0]] for one in answers)
        failed = await asked(gateways[0], InferRequest({"x": np.full((1, 2), np.nan, np.float32)}))
        assert isinstance(failed, RequestError) and (failed.outcome, failed.cpu_s) == (Outcome.FAILED, 0.25)
        await eventually(lambda: sum(played.server.ledger.ended.values()) == 61)
        await engine.refresh()
        played.conserved()
        outcomes = Counter(entry.record.outcome for entry in played.entries)
        assert outcomes == {Outcome.OK: 60, Outcome.FAILED: 1}
        assert math.isnan(played.entries[0].record.cpu_s), "an unknown cost stays unknown"
        assert all(entry.record.end_s >= entry.record.arrival_s for entry in played.entries)


async def test_a_gateway_that_has_just_started_answers_once_it_has_joined(tmp_path: Path) -> None:
    """It listens already: on a port that gateways share, clients of the others come to it at once."""
    async with site(tmp_path) as played:
        engine = await played.controller()
        await engine.apply([SPEC])
        client = EngineClient(f"unix:{played.gateways}", GatewayName("new", __version__))
        early = asyncio.create_task(asked(client))
        await eventually(lambda: client._first._waiters, "a request that waits")
        joins_s = unix_s()
        played.joining.append(asyncio.create_task(client.run()))
        answer = await early
        assert not isinstance(answer, RequestError)
        assert answer.arrival_s <= joins_s <= answer.start_s, "it waited for that"


async def test_a_request_waits_for_the_first_connection_no_longer_than_it_may_take(tmp_path: Path) -> None:
    client = EngineClient(f"unix:{tmp_path / 'nowhere'}", GatewayName("new", __version__))
    client._wait_until_s = math.inf
    refused = await asked(client, ONE._replace(timeout_s=0.01))
    assert isinstance(refused, RequestError) and refused.outcome is Outcome.UNAVAILABLE


async def test_a_gateway_without_an_engine_server_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("joulery.adapters.engines.shared.client._FIRST_S", 0.01)
    client = EngineClient(f"unix:{tmp_path / 'nowhere'}", GatewayName("new", __version__))
    for _ in range(2):
        refused = await asked(client)
        assert isinstance(refused, RequestError) and refused.outcome is Outcome.UNAVAILABLE


async def test_a_gateway_that_dies_loses_its_open_requests_only(tmp_path: Path) -> None:
    async with site(tmp_path) as played:
        engine = await played.controller()
        await engine.apply([SPEC])
        dies, stays = await played.gateway("dies"), await played.gateway("stays")
        played.engine.go.clear()
        waiting = [asyncio.create_task(asked(client)) for client in (dies, dies, dies, stays)]
        await eventually(lambda: played.engine.running == 4)
        await dies.close()
        await eventually(lambda: played.engine.running == 1, "the dead gateway's requests are withdrawn")
        played.engine.go.set()
        *lost, kept = await asyncio.gather(*waiting)
        assert all(isinstance(one, RequestError) and one.outcome is Outcome.UNAVAILABLE for one in lost)
        assert isinstance(kept, InferResponse)
        await eventually(lambda: dies.joined, "it joins again")
        assert isinstance(await asked(dies), InferResponse)
        await eventually(lambda: sum(played.server.ledger.ended.values()) == 5)
        await engine.refresh()
        played.conserved()
        outcomes = Counter((entry.gateway, entry.record.outcome) for entry in played.entries)
        assert outcomes == {("dies", Outcome.CANCELLED): 3, ("stays", Outcome.OK): 1, ("dies", Outcome.OK): 1}


async def test_without_its_controller_the_last_decisions_stay_in_force(tmp_path: Path) -> None:
    mix, limit = VariantMix((MixStep(10.0, math.inf, (("v", 1.0),)),)), QueueLimit(7, 2.0)
    async with site(tmp_path) as played:
        first = await played.controller()
        await first.apply([SPEC])
        first.set_mix("s", mix)
        first.limit_queue("s", limit)
        client = await played.gateway("g")
        await eventually(lambda: client.controller_away_s is None, "the gateway knows the controller")
        await asked(client)
        assert first.link is not None
        await first.link.close()
        await eventually(lambda: client.controller_away_s is not None, "the gateway knows that it is lost")
        assert (await client.page("/metrics", "", ""))[0] == 503
        assert isinstance(await asked(client), InferResponse)
        assert played.engine.mix("s") == mix and played.engine.limits == {"s": limit}
        second = await played.controller()
        await eventually(lambda: client.controller_away_s is None, "the gateway knows the next controller")
        await eventually(lambda: played.server.ledger.next == 2)
        await second.apply([SPEC])
        played.conserved()
        assert second.mix("s") == mix, "it finds the weights in force"
        assert (await client.page("/api/now", "since=1", "*/*"))[2] == b"/api/now?since=1"


async def test_a_second_controller_takes_what_the_first_had_not_stored(tmp_path: Path) -> None:
    async with site(tmp_path) as played:
        first = await played.controller()
        await first.apply([SPEC])
        client = await played.gateway("g")
        for _ in range(3):
            await asked(client)
        await eventually(lambda: played.server.ledger.next == 3)
        await first.refresh()
        first.stored()
        for _ in range(2):
            await asked(client)
        await eventually(lambda: played.server.ledger.next == 5)
        await first.refresh()  # taken, and lost with the controller before it was stored
        assert first.link is not None
        await first.link.close()
        assert len(played.entries) == 5
        del played.entries[3:]
        await eventually(lambda: not played.control.controlled)
        second = await played.controller()
        await second.refresh()
        assert len(played.entries) == 5
        played.conserved()


async def test_one_controller_at_a_time_and_of_this_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(tmp_path) as played:
        first = await played.controller()
        with pytest.raises(CapabilityError, match="has a controller"):
            await played.controller()
        assert first.link is not None
        await first.link.close()
        await eventually(lambda: not played.control.controlled)
        monkeypatch.setattr(control_module, "__version__", "0.0.1")
        with pytest.raises(CapabilityError, match=r"is of joulery 0\.0\.1"):
            await played.controller()


async def test_records_of_another_engine_server_are_sent_to_the_next(tmp_path: Path) -> None:
    """Requests that were open when an engine server died are in the ledger of the next; of the same one, once."""
    async with site(tmp_path) as played:
        engine = await played.controller()
        await engine.apply([SPEC])
        client = await played.gateway("g")
        played.engine.go.clear()
        waiting = asyncio.create_task(asked(client))
        await eventually(lambda: played.engine.running == 1)
        played.server.instance = "another"  # what the gateway joins next has never seen the request
        await client.close()
        assert isinstance(await waiting, RequestError)
        await eventually(lambda: played.server.ledger.ended["g"] == 2)
        records = [entry.record.outcome for entry in played.server.ledger.take(0).entries]
        assert records == [Outcome.CANCELLED, Outcome.UNAVAILABLE]


async def test_what_an_engine_server_took_with_it_is_in_the_ledger_of_the_next_once(tmp_path: Path) -> None:
    """A gateway keeps each record until a controller has taken it."""
    async with site(tmp_path) as played:
        engine = await played.controller()
        await engine.apply([SPEC])
        client = await played.gateway("g")
        for _ in range(3):
            await asked(client)
        await eventually(lambda: played.server.ledger.next == 3)
        await engine.refresh()
        engine.stored()
        for _ in range(2):
            await asked(client)
        await eventually(lambda: played.server.ledger.next == 5)
        # The engine server dies: another one has another ledger, knows no marks, and its gateways join it.
        played.server.instance, played.server.ledger = "another", RequestLedger()
        played.server.state.marks = None
        await client.close()
        await eventually(lambda: not client.joined)
        await eventually(lambda: client.joined)
        await asked(client)
        await eventually(lambda: played.server.ledger.next == 1)
        assert played.server.ledger.next == 1, "before a controller says what it has taken nothing is sent again"
        assert engine.link is not None
        engine.next, found = 0, await engine.link.ask("look")
        await engine.link.ask("publish", {"services": ["s"]}, None, engine.marks)
        await engine.take_over(engine.link, found)
        await eventually(lambda: played.server.ledger.next == 3)
        await engine.refresh()
        await engine.link.ask("publish", {"services": ["s"]}, None, engine.marks)
        await engine.link.ask("look")
        assert client._kept, "what is taken is not stored yet"
        engine.stored()
        await engine.link.ask("publish", {"services": ["s"]}, None, engine.marks)
        await eventually(lambda: not client._kept, "a gateway that keeps nothing")
        assert len(played.entries) == 6 and played.server.ledger.ended["g"] == 3


async def test_an_engine_server_that_the_controller_does_not_know_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its records were an earlier controller's to take: sent again, they might be counted twice."""
    async with site(tmp_path) as played:
        engine = await played.controller()
        await engine.apply([SPEC])
        client = await played.gateway("g")
        await asked(client)
        await eventually(lambda: played.server.ledger.next == 1)
        played.server.instance, played.server.ledger = "another", RequestLedger()
        await client.close()
        await eventually(lambda: not client.joined)
        await eventually(lambda: client.joined)
        assert engine.link is not None
        await engine.link.ask("publish", {"services": ["s"]}, None, {})
        await eventually(lambda: not client._kept, "a gateway that keeps nothing")
        assert played.server.ledger.next == 0


async def test_a_gateway_of_another_machine_needs_the_token(tmp_path: Path) -> None:
    async with site(tmp_path) as played:
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: played.server.protocol(guarded=True), "127.0.0.1", 0)
        where = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        found = []
        for secret in (None, b"a wrong one", b"the token"):
            client = EngineClient(where, GatewayName("far", __version__, secret=secret))
            joining = asyncio.create_task(client.run())
            await eventually(lambda client=client: client.joined or client.refused)
            found.append(client.refused)
            joining.cancel()
            await client.close()
            await asyncio.gather(joining, return_exceptions=True)
        listener.close()
        assert found == ["the token is wrong", "the token is wrong", ""]


async def joined_over(played: "Site", server_tls: Any, client_tls: Any, host: str = "127.0.0.1") -> EngineClient:
    """A gateway of another machine, once it has joined or knows why not."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: played.server.protocol(guarded=True), "127.0.0.1", 0, ssl=server_tls)
    where = f"{host}:{listener.sockets[0].getsockname()[1]}"
    client = EngineClient(where, GatewayName("far", __version__, secret=b"the token"), tls=client_tls)
    joining = asyncio.create_task(client.run())
    try:
        await eventually(lambda: client.joined or client.refused)
        if client.joined:
            await (await played.controller()).apply([SPEC])
            assert isinstance(await asked(client), InferResponse)
        return client
    finally:
        joining.cancel()
        await client.close()
        await asyncio.gather(joining, return_exceptions=True)
        listener.close()


async def test_a_gateway_of_another_machine_joins_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the certificate that it trusts; every other way has one clear reason."""
    monkeypatch.setattr(client_module.m, "SILENT_S", 0.5)
    mine, other = certificates.made(tmp_path), certificates.made(tmp_path, "other")
    server, trusting = mine.server_context(), client_context(mine.certificate)
    async with site(tmp_path) as played:
        assert (await joined_over(played, server, trusting)).refused == ""
        wrong = await joined_over(played, server, client_context(other.certificate))
        assert "not the one that is trusted here" in wrong.refused
        elsewhere = await joined_over(played, server, trusting, "localhost")
        assert "not the one that is trusted here" in elsewhere.refused, "it names another machine"
        assert "it does not speak TLS" in (await joined_over(played, None, trusting)).refused
        assert "without TLS: join with its certificate" in (await joined_over(played, server, None)).refused
        assert not played.server.ledger.open_of("far")


async def test_another_protocol_and_a_taken_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(tmp_path) as played:
        assert not (await played.gateway("g")).refused
        assert (await played.gateway("g")).refused == "there is a gateway 'g' already"
        monkeypatch.setattr("joulery.adapters.engines.shared.messages.PROTOCOL", 2)
        played.server.joined = lambda link, header: EngineServer.joined(  # type: ignore[method-assign]
            played.server, link, {**header, "protocol": 1}
        )
        assert "speaks protocol 2, the gateway 1" in (await played.gateway("older")).refused


async def test_latency_does_not_depend_on_the_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway whose clock is a year off has the same latencies."""
    async with site(tmp_path) as played:
        engine = await played.controller()
        await engine.apply([SPEC])
        client = await played.gateway("g")
        year_s = 3.15e7
        monkeypatch.setattr("joulery.adapters.engines.shared.client.unix_s", lambda: unix_s() + year_s)
        now_s = unix_s() + year_s
        client.record(RequestRecord("s", "v", "r", now_s - 3.0, now_s - 2.0, now_s, Outcome.OK, 1.0, 1.0, 1, None))
        await eventually(lambda: played.server.ledger.next == 1)
        (entry,) = played.server.ledger.take(0).entries
        assert entry.record.latency_s == pytest.approx(3.0, abs=1e-3)
        assert entry.record.start_s - entry.record.arrival_s == pytest.approx(1.0, abs=1e-3)
        assert abs(entry.record.end_s - asyncio.get_running_loop().time()) < 1e6, "on the engine server's clock"


async def test_a_replica_set_that_is_not_there_yet_is_no_unknown_service(tmp_path: Path) -> None:
    async with site(tmp_path) as played:
        client = await played.gateway("g")
        before = await asked(client)
        assert isinstance(before, RequestError) and before.outcome is Outcome.UNAVAILABLE
        engine = await played.controller()
        starting = await asked(client)
        assert isinstance(starting, RequestError) and starting.outcome is Outcome.UNAVAILABLE
        await engine.apply([SPEC])
        played.engine.starting = True  # as on Ray, whose replicas are seen before they take requests
        seen = await asked(client)
        assert isinstance(seen, RequestError) and seen.outcome is Outcome.UNAVAILABLE and seen.retry_after_s
        played.engine.starting = False
        variant = await asked(client, ONE._replace(variant="other"))
        assert isinstance(variant, RequestError) and variant.outcome is Outcome.UNKNOWN
        unknown = await asked(client, service="other")
        assert isinstance(unknown, RequestError) and unknown.outcome is Outcome.UNKNOWN
        await eventually(lambda: played.server.ledger.ended["g"] == 5)
        await engine.refresh()
        assert len(played.entries) == 3 and engine.latest.batch.unknown == 2


async def test_nodes_of_a_cluster_are_metered_and_ordered_through_the_engine_server(tmp_path: Path) -> None:
    async with site(tmp_path) as played:
        cluster: Any = played.engine
        ordered: list[Any] = []
        cluster.prefer_nodes = lambda ranks, patience_s: ordered.append((ranks, patience_s))

        async def nodes(meter: str, options: Any) -> dict[str, dict[str, Any]]:
            return {"10.0.0.1": {"meter": meter, "options": options}}

        cluster.nodes = nodes
        engine = await played.controller()
        link, engine.link = engine.link, None

        async def prepare() -> None:
            engine.link = link

        engine.prepare = prepare  # nodes that sleep are looked for before anything runs
        assert await engine.nodes("m:M", [1]) == {"10.0.0.1": {"meter": "m:M", "options": [1]}}
        engine.prefer_nodes({"a": 0, "b": 1}, 0.25)
        await eventually(lambda: ordered == [({"a": 0, "b": 1}, 0.25)], "the order")
        await engine.restore()
        await eventually(lambda: len(ordered) == 2, "the order, for an engine server that took another one's place")


async def test_a_lost_engine_server_is_an_error_of_the_call(tmp_path: Path) -> None:
    async with site(tmp_path) as played:
        engine = await played.controller()
        assert engine.link is not None
        await engine.link.close()
        with pytest.raises(ActuationError, match="gone"):
            await engine.apply([SPEC])
        await engine.refresh()
        assert engine.replicas() == ()


def test_every_gateway_charges_as_the_controller_does() -> None:
    table = ChargeTable({"s": {"": 10.0, "v": 20.0}}, {"s": Quality.MODELLED}, 360.0)
    sent = ChargeTable.of(table.as_dict())
    assert sent == table and sent.charge("s", "v", 0.5) == table.charge("s", "v", 0.5)
    share = sent.charge("s", "other", 1.0)
    assert share is not None and share.energy_j == 10.0 and share.carbon_g == pytest.approx(1e-3)
    dark = ChargeTable.of(ChargeTable(table.active_w, table.quality).as_dict()).charge("s", "v", 1.0)
    assert dark is not None and dark.carbon_g is None, "an unknown intensity is not zero"
    assert table.charge("other", "v", 1.0) is None
