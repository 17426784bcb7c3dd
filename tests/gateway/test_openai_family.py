"""Several language models behind one name: who answers, and who does when one cannot."""

import asyncio
import json
import math
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from joulery.adapters.engines.remote.openai import OpenAiEngine, Upstream
from joulery.app.wiring.engine import local_engine
from joulery.domain.decisions import Decision
from joulery.domain.serving.engine import Outcome
from joulery.domain.serving.service import Slo
from joulery.gateway.app import Gateway
from joulery.gateway.openai import OpenAIRoutes
from joulery.gateway.server import GatewayServer
from joulery.policies.serving.objective import ServiceObjectives
from joulery.policies.serving.variants.language_family import SET_SHARES, LanguageFamilyPolicy
from joulery.runtime.llm.family import LanguageFamily
from joulery.runtime.llm.request_meter import RequestMeter
from joulery.runtime.llm.service import LLMService, LLMSettings
from tests.adapters.engines.remote.openai_server import FakeServer, running
from tests.gateway.test_openai import CHAT
from tests.runtime.llm.fakes import FakeMachine, forecaster
from tests.waiting import PATIENCE_S, eventually

ACCURACY = {"large": 0.8, "small": 0.7}


class Served:
    def __init__(self, fakes, family, client, records):
        self.fakes, self.family, self.client, self.records = fakes, family, client, records

    async def ask(self, model="chat", **fields):
        asked = {"model": model, "messages": [{"role": "user", "content": "hi 1"}], **fields}
        return await self.client.post(CHAT, json=asked)

    async def share(self, **shares):
        await self.family._act(Decision(SET_SHARES, "chat", shares, "language-family", "a test", "objective"))


@asynccontextmanager
async def serving(*, acts=True, ttft=None, floor=0.0, clock=time.monotonic, **settings):
    fakes, llms, records, machine = {}, {}, [], FakeMachine()
    async with AsyncExitStack() as stack:
        meter = RequestMeter([machine], lambda: machine.busy_s, lambda t_s: 360.0, clock=lambda: machine.now_s)
        for name in ACCURACY:
            fakes[name] = FakeServer()
            url = await stack.enter_async_context(running(fakes[name]))
            engine = OpenAiEngine(Upstream(url, "fake-1"))
            meter.join(name, engine.cpu_s)
            llms[name] = LLMService(
                name, engine, forecaster(), LLMSettings(**settings), meter, owner="ada", clock=clock
            )
            stack.push_async_callback(llms[name].close)
        policy = LanguageFamilyPolicy("chat", ACCURACY, ServiceObjectives(0.5, Slo(8.0), floor), 250.0, ttft)
        family = LanguageFamily(policy, llms, lambda t_s: 360.0, acts=acts, clock=clock)
        gateway = Gateway(local_engine())
        gateway.text = OpenAIRoutes(llms, gateway.bodies, [records.append], [], {}, [family])
        server = GatewayServer(gateway, "127.0.0.1", 0)
        await server.start()
        stack.push_async_callback(server.stop)
        client = httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False)
        yield Served(fakes, family, await stack.enter_async_context(client), records)


async def test_the_most_accurate_answers_until_shares_are_decided_and_then_they_are_kept() -> None:
    async with serving() as served:
        assert (await served.ask()).json()["model"] == "large"
        await served.share(small=0.75, large=0.25)
        answered = Counter([(await served.ask()).json()["model"] for _ in range(40)])
        assert answered == {"small": 30, "large": 10}
        assert served.family.summary()["variants"] == {"large": 11 / 41, "small": 30 / 41}
        assert served.family.accuracy_ratio == pytest.approx((11 * 0.8 + 30 * 0.7) / 41)
        assert (await served.ask("small")).json()["model"] == "small", "by its own name it is always asked itself"
        assert served.family.answered.total() == 41, "which is no request for the family"


async def test_in_other_modes_than_act_the_most_accurate_model_answers() -> None:
    async with serving(acts=False) as served:
        await served.share(small=1.0)
        assert [(await served.ask()).json()["model"] for _ in range(3)] == ["large"] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_where_one_model_cannot_answer_the_other_does_and_the_client_does_not_notice(stream) -> None:
    async with serving() as served:
        served.fakes["large"].fault = "500"
        for _ in range(3):
            answer = await served.ask(stream=stream)
            assert answer.status_code == 200 and "w0" in answer.text
            assert answer.headers["x-joulery-variant"] == "fake-1"
        assert len(served.fakes["large"].asked) == 1, "and it is left alone for a while"
        assert [record.service for record in served.records if record.outcome is Outcome.OK] == ["small"] * 3
        assert served.family.answered == {"small": 3}
        seen = {one.name: one.ready for one in served.family.observe(0.0).models}
        assert seen == {"large": False, "small": True}


async def test_where_none_can_answer_there_is_one_error() -> None:
    async with serving() as served:
        for fake in served.fakes.values():
            fake.fault = "500"
        answer = await served.ask()
        assert answer.status_code == 502 and set(answer.json()) == {"error"}


async def test_a_full_queue_sends_requests_to_the_other_model() -> None:
    async with serving(queue=1, max_num_seqs=1) as served:
        large = served.family.models["large"]
        large.settings = LLMSettings(queue=0)
        assert (await served.ask()).json()["model"] == "small"
        assert all(one.ready for one in served.family.observe(0.0).models), "a full queue is no fault"


async def test_the_family_is_listed_and_named_where_a_model_is_unknown() -> None:
    async with serving() as served:
        models = (await served.client.get("/v1/models")).json()["data"]
        assert {one["id"] for one in models} == {"large", "small", "chat"}
        assert (await served.client.get("/v1/models/chat")).json()["owned_by"] == "ada"
        missing = await served.ask("chart")
        assert missing.status_code == 404 and "chat, large, small" in json.loads(missing.text)["error"]["message"]


async def test_joules_are_known_after_thirty_answers_and_measured_again_after_an_hour() -> None:
    async with serving() as served:
        traffic = served.family.models["small"].traffic
        for k in range(40):
            traffic.answered(1000.0 + k, 0.1, 0.1, 5.0 if k % 2 else None)
        assert math.isnan(served.family.observe(1040.0).models[1].energy_j), "of twenty answers"
        for k in range(20):
            traffic.answered(1041.0 + k, 0.1, 0.1, 11.0)
        assert served.family.observe(1061.0).models[1].energy_j == pytest.approx((20 * 5.0 + 20 * 11.0) / 40)
        assert math.isnan(served.family.observe(1060.0 + 3700.0).models[1].energy_j)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_no_model_begins_in_time_is_refused_at_once(stream) -> None:
    """One slot each, and a clock that stands still: what runs keeps running."""
    async with serving(ttft=Slo(0.001), clock=lambda: 100.0, max_num_seqs=1) as served:
        for fake in served.fakes.values():
            fake.gate.clear()
        first, second = (asyncio.create_task(served.ask(stream=stream)) for _ in range(2))
        await eventually(lambda: all(fake.begun for fake in served.fakes.values()), "one at each model")
        refused = await served.ask(stream=stream)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert "within its SLO of 0.001 s" in refused.json()["error"]["message"]
        assert [len(fake.begun) for fake in served.fakes.values()] == [1, 1], "no engine got it"
        for fake in served.fakes.values():
            fake.gate.set()
        assert {(await one).status_code for one in (first, second)} == {200}
        assert (await served.ask(stream=stream)).status_code == 200, "an idle model takes the next one"
        summary = served.family.summary()
        assert (summary["refused"], summary["answered"]) == (1, 3)
        assert summary["ttft_slo_s"] == 0.001 and 0 <= summary["ttft_attainment_ratio"] <= 1
        outcomes = Counter((record.service, record.outcome) for record in served.records)
        assert outcomes["large", Outcome.OVERLOADED] == 1, "counted at the most accurate model"


async def test_the_accuracy_floor_comes_before_the_slo_of_the_first_token() -> None:
    async with serving(ttft=Slo(0.001), clock=lambda: 100.0, floor=0.8, max_num_seqs=1) as served:
        served.fakes["large"].gate.clear()
        first = asyncio.create_task(served.ask())
        await eventually(lambda: bool(served.fakes["large"].begun), "it runs")
        assert (await served.ask()).status_code == 429, "the small model would be in time, and not accurate enough"
        assert not served.fakes["small"].begun
        served.fakes["large"].gate.set()
        assert (await first).json()["model"] == "large"


async def test_in_mode_advise_and_without_an_slo_of_the_first_token_nothing_is_refused() -> None:
    for options in ({"ttft": Slo(0.001), "acts": False}, {}):
        async with serving(clock=lambda: 100.0, max_num_seqs=1, **options) as served:
            served.fakes["large"].gate.clear()
            asked = [asyncio.create_task(served.ask()) for _ in range(3)]
            await eventually(lambda served=served: served.family.models["large"].waiting == 2, "two wait")
            served.fakes["large"].gate.set()
            assert {(await one).status_code for one in asked} == {200}
            assert served.family.refused == 0
