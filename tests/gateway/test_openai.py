"""The OpenAI API through the gateway, in front of an engine on a real connection."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import orjson
import pytest

from joulery.adapters.engines.remote.openai import OpenAiEngine, Upstream
from joulery.app.wiring.engine import local_engine
from joulery.domain.serving.engine import Outcome
from joulery.domain.serving.generation import Dialect
from joulery.gateway.admin import admin_app
from joulery.gateway.app import Gateway
from joulery.gateway.body import BodyReader, Limits
from joulery.gateway.llm_metrics import LLMMetrics
from joulery.gateway.metrics import Metrics
from joulery.gateway.openai import OpenAIRoutes
from joulery.gateway.server import GatewayServer, ServerLimits
from joulery.runtime.llm.request_meter import RequestMeter
from joulery.runtime.llm.service import LLMService, LLMSettings
from tests.adapters.engines.remote.openai_server import FakeServer, running
from tests.adapters.engines.support import until
from tests.runtime.llm.fakes import FakeMachine, forecaster
from tests.waiting import PATIENCE_S

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Served:
    def __init__(self, fake, llm, server, client, records, machine, gateway):
        self.fake, self.llm, self.server, self.client, self.gateway = fake, llm, server, client, gateway
        self.records, self.machine = records, machine

    async def ask(self, prompt="hi 1", path=CHAT, **fields):
        asked = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
        return await self.client.post(path, json={"model": "llm", **asked, **fields})


@asynccontextmanager
async def serving(dialect=Dialect.PLAIN, token=None, upstream=None, **settings):
    fake, records, machine = FakeServer(order=dialect.value), [], FakeMachine()
    async with running(fake) as url:
        meter = RequestMeter([machine], lambda: machine.busy_s, lambda t_s: 360.0, clock=lambda: machine.now_s)
        engine = OpenAiEngine(
            Upstream(url, "fake-1", dialect=dialect, **(upstream or {})), cpu_s=lambda: machine.busy_s / 2
        )
        meter.join("llm", engine.cpu_s)
        llm = LLMService("llm", engine, forecaster(), LLMSettings(**settings), meter, owner="ada")
        metrics = Metrics(["llm"])
        gateway = Gateway(local_engine(), token=token, admin=admin_app(metrics))
        watch = LLMMetrics(metrics.registry, {"llm": llm}, meter)
        gateway.text = OpenAIRoutes(
            {"llm": llm}, gateway.bodies, [metrics.request, records.append], [watch.ended], {"gpt": "llm"}
        )
        server = GatewayServer(gateway, "127.0.0.1", 0, limits=ServerLimits(drain_s=5.0), protected=token is not None)
        await server.start()
        try:
            async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as client:
                yield Served(fake, llm, server, client, records, machine, gateway)
        finally:
            fake.gate.set()
            await server.stop()
            await llm.close()


def chunks(text):
    """The data of the events of a stream, and its comments."""
    events = [part for part in text.split("\n\n") if part]
    data = [part.removeprefix("data: ") for part in events if part.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in data], [p for p in events if p[0] == ":"]


async def test_a_chat_is_answered_with_what_it_cost() -> None:
    async with serving() as served:
        served.fake.gate.clear()
        asking = asyncio.create_task(served.ask())
        await until(lambda: served.fake.begun == ["hi 1"])
        served.machine.spend(1.0, 30.0, busy_s=0.5)
        served.fake.gate.set()
        answer = await asking
        assert answer.status_code == 200
        body = answer.json()
        assert body["model"] == "llm"
        assert body["choices"][0]["message"]["content"] == "w0 w1 w2 "
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 3, 10)
        assert usage["joulery"] == {
            "predicted_tokens": 50,
            "predicted_by": "predictor",
            "energy_j": 10.0,
            "quality": "measured",
            "energy_per_token_j": 3.33333,
            "carbon_g": 0.001,
            "carbon_per_token_g": 0.000333333,
        }
        cost = {name: value for name, value in answer.headers.items() if name.startswith("x-joulery")}
        assert cost == {
            "x-joulery-variant": "fake-1",
            "x-joulery-predicted-tokens": "50",
            "x-joulery-energy-j": "10",
            "x-joulery-quality": "measured",
            "x-joulery-energy-per-token-j": "3.33333",
            "x-joulery-carbon-g": "0.001",
            "x-joulery-carbon-per-token-g": "0.000333333",
        }
        (record,) = served.records
        assert (record.service, record.variant, record.outcome, record.attempts) == ("llm", "fake-1", Outcome.OK, 1)
        assert record.energy is not None and record.energy.energy_j == pytest.approx(10.0)


async def test_metrics_add_up_and_count_tokens() -> None:
    async with serving() as served:
        served.fake.gate.clear()
        asking = asyncio.create_task(served.ask())
        await until(lambda: bool(served.fake.begun))
        served.machine.spend(2.0, 30.0, busy_s=1.0)
        served.fake.gate.set()
        await asking
        text = (await served.client.get("/metrics")).text
        rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        parts = {
            part: float(rows[f'joulery_llm_machine_joules_total{{part="{part}"}}'])
            for part in ("requests", "idle", "unattributed")
        }
        assert parts == {"requests": 20.0, "idle": 20.0, "unattributed": 20.0}
        assert float(rows['joulery_llm_tokens_total{kind="completion",workload="llm"}']) == 3
        assert float(rows['joulery_llm_tokens_total{kind="prompt",workload="llm"}']) == 7
        assert float(rows['joulery_llm_token_energy_joules_sum{workload="llm"}']) == pytest.approx(20 / 3)
        assert float(rows['joulery_llm_request_carbon_grams_sum{workload="llm"}']) == pytest.approx(0.002)
        assert float(rows['joulery_request_energy_joules_sum{variant="fake-1",workload="llm"}']) == 20.0
        assert float(rows['joulery_llm_predictions_total{source="predictor",workload="llm"}']) == 1
        assert float(rows['joulery_llm_running_requests{workload="llm"}']) == 0
        assert float(rows['joulery_text_working_requests{workload="llm"}']) == 0  # its old name, for one release
        assert float(rows['joulery_llm_time_to_first_token_seconds_count{workload="llm"}']) == 1


async def test_metrics_have_the_names_of_opentelemetry_too() -> None:
    async with serving() as served:
        await served.ask()
        await served.ask("once", TEXT)
        served.fake.fault = "500"
        assert (await served.ask("late", CHAT)).status_code == 502
        text = (await served.client.get("/metrics")).text
        rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        model = 'gen_ai_provider_name="joulery",gen_ai_request_model="llm",gen_ai_response_model="fake-1"'
        chat = f'gen_ai_operation_name="chat",{model}'
        duration = "gen_ai_server_request_duration_seconds_count"
        assert rows[f'{duration}{{error_type="",{chat}}}'] == "1.0"
        assert rows[f'{duration}{{error_type="crashed",{chat}}}'] == "1.0"
        assert rows[f'{duration}{{error_type="",gen_ai_operation_name="text_completion",{model}}}'] == "1.0"
        assert rows[f"gen_ai_server_time_to_first_token_seconds_count{{{chat}}}"] == "1.0"
        assert rows[f"gen_ai_server_time_per_output_token_seconds_count{{{chat}}}"] == "1.0"
        usage = f'gen_ai_client_token_usage_sum{{{chat},gen_ai_token_type="'
        assert (rows[usage + 'output"}'], rows[usage + 'input"}']) == ("3.0", "7.0")


async def test_a_stream_holds_its_usage_when_asked_and_its_cost_as_a_comment_always() -> None:
    async with serving() as served:
        plain = await served.ask(stream=True)
        asked = await served.ask(stream=True, stream_options={"include_usage": True})
        text = await served.ask(path=TEXT, stream=True)
    assert plain.headers["content-type"].startswith("text/event-stream")
    assert plain.headers["x-joulery-predicted-tokens"] == "50"
    data, comments = chunks(plain.text)
    assert data[-1] == "[DONE]" and all("usage" not in each for each in data[:-1])
    assert [each["choices"][0]["delta"]["content"] for each in data[:-1]] == ["w0 ", "w1 ", "w2 "]
    assert {each["model"] for each in data[:-1]} == {"llm"}
    assert comments == [": joulery energy_j=0 quality=measured carbon_g=0"]
    data, _ = chunks(asked.text)
    assert (data[-1], data[-2]["choices"]) == ("[DONE]", [])
    assert data[-2]["usage"]["completion_tokens"] == 3 and data[-2]["usage"]["joulery"]["energy_j"] == 0
    assert chunks(text.text)[0][0]["choices"][0]["text"] == "w0 "


async def test_an_engine_without_usage_is_counted_and_says_so() -> None:
    async with serving() as served:
        served.fake.fault = "no-usage"
        answer = await served.ask(stream=True, stream_options={"include_usage": True})
    usage = chunks(answer.text)[0][-2]["usage"]
    assert (usage["completion_tokens"], usage["counted_by"]) == (3, "joulery")


async def test_the_models_there_are() -> None:
    async with serving() as served:
        listed = (await served.client.get("/v1/models")).json()
        model, alias = listed["data"]
        assert (alias["id"], alias["owned_by"]) == ("gpt", "ada")
        assert (listed["object"], model["id"], model["object"], model["owned_by"]) == ("list", "llm", "model", "ada")
        assert (await served.client.get("/v1/models/llm")).json() == model
        for path, status in (("/v1/models/other", 404), ("/v1/nothing", 404)):
            answer = await served.client.get(path)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
        assert (await served.client.get(CHAT)).status_code == 405
        assert (await served.client.get("/v2/health/ready")).json()["ready"] is True


NONSENSE = [
    (b"{", 400, "not JSON"),
    (b'{"model": "llm", "prompt": "\xff"}', 400, "UTF-8"),
    (b'{"model": "llm", "prompt": "\\ud800"}', 400, "not JSON"),
    (b"[]", 400, "must be a JSON object"),
    (b"{}", 400, "model must be"),
    (b'{"model": "other", "prompt": ""}', 404, "no model 'other'; available: gpt, llm"),
    (b'{"model": "llm", "prompt": 7}', 400, "prompt must be"),
    (b'{"model": "llm", "stream": 1}', 400, "stream must be true or false"),
    (b'{"model": "llm", "max_tokens": -1}', 400, "max_tokens must be"),
    (b'{"model": "llm", "max_tokens": true}', 400, "max_tokens must be"),
    (b'{"model": "llm", "stream_options": []}', 400, "stream_options must be"),
]
NO_MESSAGES = [
    None,
    [],
    ["x"],
    [{"content": "no role"}],
    [{"role": "user", "content": 7}],
    [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": [{"type": "text", "text": 1}]}],
]


async def test_what_makes_no_sense_is_refused_with_what_and_where() -> None:
    async with serving() as served:
        for body, status, said in NONSENSE:
            answer = await served.client.post(TEXT, content=body)
            assert answer.status_code == status, body
            assert said in answer.json()["error"]["message"]
            assert answer.json()["error"]["type"] == "invalid_request_error"
        for messages in NO_MESSAGES:
            answer = await served.client.post(CHAT, json={"model": "llm", "messages": messages})
            assert answer.status_code == 400, messages
            assert "messages" in answer.json()["error"]["message"]
        assert served.fake.asked == []
        assert (await served.ask()).status_code == 200


async def test_prompts_of_no_character_and_of_a_million_reach_the_engine_whole() -> None:
    async with serving() as served:
        for prompt in ("", "x" * 1_000_000):
            assert (await served.ask(prompt, TEXT)).status_code == 200
            assert served.fake.asked[-1]["prompt"] == prompt
        for prompt in (["a", "b"], [1, 2, 3]):
            served.fake.words.clear()
            answer = await served.client.post(TEXT, json={"model": "llm", "prompt": prompt, "stream": False})
            assert served.fake.asked[-1]["prompt"] == prompt
            assert answer.status_code in (200, 502)
        parts = [{"type": "text", "text": "1"}, {"type": "image_url", "image_url": {"url": "data:"}}]
        served.fake.words = {}
        await served.client.post(CHAT, json={"model": "llm", "messages": [{"role": "user", "content": "a 1"}]})
        body = {"model": "llm", "messages": [{"role": "system", "content": None}, {"role": "user", "content": parts}]}
        await served.client.post(CHAT, json=body)
        assert served.fake.asked[-1]["messages"] == body["messages"]


@pytest.mark.parametrize(
    ("fault", "status", "kind"),
    [("500", 502, "server_error"), ("lie", 502, "server_error"), ("429", 429, "rate_limit_error")],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstream_that_fails_before_it_begins_has_a_status(fault, status, kind, stream) -> None:
    async with serving() as served:
        served.fake.fault = fault
        answer = await served.ask(stream=stream)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        if status == 429:
            assert answer.headers["retry-after"] == "1"
        served.fake.fault = ""
        assert (await served.ask()).status_code == 200
        assert len(served.fake.asked) == 2  # nothing was sent twice


@pytest.mark.parametrize(("fault", "said"), [("stall", "does not answer"), ("break", "ended its stream")])
async def test_an_upstream_that_fails_in_the_middle_ends_the_stream_with_an_error(fault, said) -> None:
    async with serving(upstream={"stall_s": 1.0}) as served:
        served.fake.fault = fault
        data, _ = chunks((await served.ask(stream=True)).text)
        assert data[0]["choices"][0]["delta"]["content"] == "w0 "
        assert said in data[-1]["error"]["message"]
        assert "[DONE]" not in data
        await until(lambda: len(served.records) == 1)
        assert served.records[0].outcome in (Outcome.DEADLINE, Outcome.CRASHED)


async def test_a_request_that_takes_too_long_is_answered_504() -> None:
    async with serving() as served:
        served.fake.fault = "hang"
        answer = await served.client.post(
            TEXT, json={"model": "llm", "prompt": "p"}, headers={"x-joulery-timeout-s": "0.5"}
        )
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
        await until(lambda: served.fake.cancelled == len(served.fake.asked))


async def test_clients_that_vanish_free_the_engine_wherever_their_request_is() -> None:
    async with serving() as served:
        served.fake.fault = "stall"
        async with served.client.stream(
            "POST", CHAT, json={"model": "llm", "messages": [{"role": "user", "content": "streams"}], "stream": True}
        ) as answer:
            await anext(answer.aiter_raw())
        await until(lambda: served.fake.cancelled == 1)
        served.fake.fault = "hang"
        reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
        body = json.dumps({"model": "llm", "prompt": "whole"}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: served.fake.begun[-1:] == ["whole"])
        waiting = asyncio.create_task(served.ask("waits"))
        await until(lambda: served.llm.waiting == 1)
        waiting.cancel()
        await until(lambda: served.llm.waiting == 0)
        writer.close()
        await writer.wait_closed()
        await until(lambda: served.fake.cancelled == 2)
        await until(lambda: served.llm.running == 0)
        assert [record.outcome for record in served.records] == [Outcome.CANCELLED] * 3
        served.fake.fault = ""
        assert (await served.ask("next")).status_code == 200
        assert served.fake.begun == ["streams", "whole", "next"]
        del reader


@pytest.mark.parametrize("dialect", [Dialect.VLLM, Dialect.SGLANG])
async def test_an_engines_own_queue_serves_the_shortest_predicted_first(dialect) -> None:
    async with serving(dialect) as served:
        served.fake.gate.clear()
        tasks = [asyncio.create_task(served.ask("first 4"))]
        await until(lambda: served.fake.begun == ["first 4"])
        for index, prompt in enumerate(("a 3", "b 0", "c 1", "d 0")):
            tasks.append(asyncio.create_task(served.ask(prompt)))
            await until(lambda index=index: len(served.fake.asked) == index + 2)
        assert served.llm.waiting == 0
        served.fake.gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
        assert served.fake.begun == ["first 4", "b 0", "d 0", "c 1", "a 3"]


async def test_a_token_is_asked_for() -> None:
    async with serving(token="s3cret-s3cret") as served:
        assert (await served.ask()).status_code == 401
        served.client.headers["authorization"] = "Bearer s3cret-s3cret"
        assert (await served.ask()).status_code == 200
        assert served.fake.asked[0].get("authorization") is None


async def test_bodies_count_as_held_while_their_requests_wait() -> None:
    async with serving() as served:
        bodies = served.gateway.bodies
        served.fake.gate.clear()
        tasks = [asyncio.create_task(served.ask("x" * 1000)) for _ in range(3)]
        await until(lambda: served.llm.waiting == 2)
        assert 3000 < bodies.held_bytes < 4000
        served.fake.gate.set()
        await asyncio.gather(*tasks)
        await until(lambda: bodies.held_bytes == 0)


@pytest.mark.parametrize(("last", "tokens"), [("b 0", "10"), ("b 3", "300")])
async def test_the_predicted_length_of_a_conversation_is_that_of_its_last_message(last, tokens) -> None:
    async with serving() as served:
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": last}]
        kept = []
        served.llm.keep = lambda request, count: kept.append(request.prompt)
        predict = served.llm.forecaster.predictor.predict
        served.llm.forecaster.predictor.predict = lambda prompt: predict(prompt.split("\n")[0])
        answer = await served.client.post(CHAT, json={"model": "llm", "messages": messages})
        assert answer.headers["x-joulery-predicted-tokens"] == tokens
        assert kept == [f"{last}\ns"]


async def test_a_full_queue_says_when_to_come_again() -> None:
    async with serving(queue=1) as served:
        served.fake.gate.clear()
        tasks = [asyncio.create_task(served.ask(f"p{i}")) for i in range(2)]
        await until(lambda: served.llm.waiting == 1)
        answer = await served.ask("one too many")
        assert (answer.status_code, int(answer.headers["retry-after"]) >= 1) == (429, True)
        served.fake.gate.set()
        assert {each.status_code for each in await asyncio.gather(*tasks)} == {200}


async def test_a_hundred_requests_under_faults_are_each_answered_exactly_once() -> None:
    async with serving(max_num_seqs=4) as served:

        async def one(index):
            return await served.ask(f"q{index} {index % 5}", stream=index % 2 == 0)

        tasks = [asyncio.create_task(one(index)) for index in range(100)]
        await until(lambda: len(served.fake.ended) >= 20)
        served.fake.fault = "500"
        await until(lambda: sum(task.done() for task in tasks) >= 40)
        served.fake.fault = ""
        for index in (97, 98, 99):
            tasks[index].cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: len(served.records) == 100)
        answers = [each for each in ended if isinstance(each, httpx.Response)]
        assert {each.status_code for each in answers} <= {200, 502}
        prompts = [asked["messages"][0]["content"] for asked in served.fake.asked]
        assert len(prompts) == len(set(prompts))
        assert (served.llm.waiting, served.llm.running) == (0, 0)


async def test_embeddings_are_passed_through_under_the_models_name_with_their_cost() -> None:
    async with serving() as served:
        answer = await served.client.post("/v1/embeddings", json={"model": "llm", "input": ["a", "b"]})
        assert answer.status_code == 200
        document = answer.json()
        assert (document["object"], document["model"], document["data"][0]["embedding"]) == ("list", "llm", [0.5])
        assert document["usage"]["prompt_tokens"] == 2
        assert "joulery" in document["usage"]
        assert served.fake.asked[0] == {"model": "fake-1", "input": ["a", "b"]}
        wrong = await served.client.post("/v1/embeddings", json={"model": "llm"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input")
        assert [record.outcome for record in served.records] == ["ok", "invalid"]
        text = (await served.client.get("/metrics")).text
        assert 'joulery_llm_queue_seconds_count{workload="llm"} 1.0' in text
        assert 'joulery_llm_time_to_first_token_seconds_count{workload="llm"}' not in text, "they have no tokens"


async def test_responses_are_passed_through_whole_and_as_typed_events() -> None:
    async with serving() as served:
        asked = {"model": "llm", "input": [{"role": "user", "content": "Say hello."}]}
        whole = (await served.client.post("/v1/responses", json=asked)).json()
        assert (whole["model"], whole["output"][0]["content"][0]["text"]) == ("llm", "w0 w1 ")
        assert whole["usage"]["output_tokens"] == 2
        stream = await served.client.post("/v1/responses", json={**asked, "stream": True})
        events = [part for part in stream.text.split("\n\n") if part.startswith("event: ")]
        kinds = [part.split("\n")[0].removeprefix("event: ") for part in events]
        assert kinds == ["response.created", *["response.output_text.delta"] * 2, "response.completed"]
        last = json.loads(events[-1].split("data: ", 1)[1])
        assert last["response"]["model"] == "llm"
        assert "[DONE]" not in stream.text
        assert [record.outcome for record in served.records] == ["ok", "ok"]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_unknown_route_is_a_404_in_openais_form(method: str) -> None:
    async with serving() as served:
        answer = await served.client.request(method, "/v1/nothing")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("invalid_request_error", "unknown_url")
        for path in ("/v1", "/chat/completions", "/models"):  # a base_url without its last part
            answer = await served.client.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
            assert "/v1" in answer.json()["error"]["message"]
        served.gateway.text = None
        answer = await served.client.request(method, "/v1/models")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


async def test_errors_have_openais_form_with_the_parameter_and_a_missing_token_too() -> None:
    async with serving(token="a-long-token") as served:
        answer = await served.ask()
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        headers = {"authorization": "Bearer a-long-token"}
        answer = await served.client.post(CHAT, headers=headers, json={"model": "llm", "messages": [], "max_tokens": 1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


async def test_an_alias_is_the_model_and_tracing_headers_reach_the_engine() -> None:
    async with serving() as served:
        headers = {"traceparent": "00-ab-cd-01", "x-request-id": "req-7", "x-secret": "no"}
        body = {"model": "gpt", "messages": [{"role": "user", "content": "hi 1"}]}
        answer = await served.client.post(CHAT, json=body, headers=headers)
        assert (answer.status_code, answer.json()["model"]) == (200, "llm")
        assert answer.headers["x-request-id"] == "req-7"
        sent = served.fake.headers[-1]
        assert (sent["traceparent"], sent["x-request-id"]) == ("00-ab-cd-01", "req-7")
        assert "x-secret" not in sent
        names = {each["id"] for each in (await served.client.get("/v1/models")).json()["data"]}
        assert names == {"llm", "gpt"}


async def test_no_error_of_a_server_shows_its_address_to_a_client() -> None:
    async with serving() as served:
        for fault in ("500", "html", "429", "lie", "garbage"):
            served.fake.fault = fault
            answer = await served.ask()
            assert answer.status_code >= 400
            assert "127.0.0.1" not in answer.text
            assert "http://" not in answer.text


async def test_pieces_that_arrive_together_are_sent_together_and_those_of_an_engine_that_fails_are_not() -> None:
    """A stream of 40 tokens that comes in two reads takes two writes and the end, whatever the tokens."""

    def piece(word):
        return b"data: " + orjson.dumps({"model": "m", "choices": [{"index": 0, "delta": {"content": word}}]}) + b"\n\n"

    class Reads(httpx.AsyncByteStream):
        def __init__(self, *reads):
            self.reads = reads

        async def __aiter__(self):
            for each in self.reads:
                yield each

    halves = [b"".join(piece(f"w{at} ") for at in range(begin, begin + 20)) for begin in (0, 20)]
    answers = [Reads(*halves, b"data: [DONE]\n\n"), Reads(halves[0] + b'data: {"error": "out of memory"}\n\n')]
    headers = {"content-type": "text/event-stream"}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=answers.pop(0), headers=headers))
    llm = LLMService("llm", OpenAiEngine(Upstream("http://far", "m"), transport=transport), forecaster())
    routes = OpenAIRoutes({"llm": llm}, BodyReader(Limits()), [], [])

    async def asked():
        body = orjson.dumps({"model": "llm", "messages": [{"role": "user", "content": "hi"}], "stream": True})
        sent = []

        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            sent.append(message)

        await routes({"type": "http", "method": "POST", "path": CHAT, "headers": []}, None, receive, send)
        return [message["body"] for message in sent if message["type"] == "http.response.body"]

    pieces = await asked()
    assert len(pieces) == 3
    data, _ = chunks(b"".join(pieces).decode())
    assert [each["choices"][0]["delta"]["content"] for each in data[:-1]] == [f"w{at} " for at in range(40)]
    assert data[-1] == "[DONE]"
    (refused,) = await asked()
    assert "out of memory" in refused.decode() and "w0" not in refused.decode(), "nothing was sent before"
    await llm.close()
