import asyncio
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from joulery import __version__
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import EnergyShare, InferRequest, Outcome, ReplicaState, RequestError
from joulery.gateway.admin import admin_app
from joulery.gateway.body import Limits
from joulery.gateway.metrics import Metrics
from tests.adapters.engines.support import until
from tests.gateway.support import INFER, FakeEngine, X, body, serving, view


async def test_an_inference_answers_with_its_variant_and_leaves_a_record() -> None:
    engine = FakeEngine()
    async with serving(engine) as gateway:
        answer = await gateway.post(body(id="7"))
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-joulery-variant"] == "small"
        assert answer.json() == {"model_name": "toy", "model_version": "small", "id": "7", "outputs": [X]}
        (record,) = gateway.records
        assert (record.service, record.variant, record.replica) == ("toy", "small", "r0")
        assert (record.start_s, record.end_s) == (10.5, 11.0)
        assert (record.outcome, record.service_s, record.cpu_s, record.attempts) == (Outcome.OK, 0.4, 0.3, 1)
        assert record.energy is None
        ((service, request),) = engine.asked
        assert (service, request.variant, request.timeout_s, request.outputs) == ("toy", "", None, ())


async def test_binary_tensors_both_ways() -> None:
    async with serving(FakeEngine()) as gateway:
        header = body(
            {"name": "x", "datatype": "FP16", "shape": [2], "parameters": {"binary_data_size": 4}},
            parameters={"binary_data_output": True},
        )
        raw = np.array([1.5, -2.0], np.float16).tobytes()
        answer = await gateway.post(header + raw, inference_header_content_length=str(len(header)))
        assert answer.headers["content-type"] == "application/octet-stream"
        end = int(answer.headers["inference-header-content-length"])
        (output,) = json.loads(answer.content[:end])["outputs"]
        assert output == {"name": "x", "datatype": "FP16", "shape": [2], "parameters": {"binary_data_size": 4}}
        assert answer.content[end:] == raw


async def test_energy_and_carbon_headers_carry_what_is_known() -> None:
    asked: list[tuple[str, str, float, float, float]] = []
    shares = iter([EnergyShare(0.25, 0.0001234567, Quality.MODELLED), EnergyShare(2.0, None, Quality.MEASURED), None])

    def attribute(service: str, variant: str, cpu_s: float, service_s: float, end_s: float) -> EnergyShare | None:
        asked.append((service, variant, cpu_s, service_s, end_s))
        return next(shares)

    async with serving(FakeEngine(), attribute=attribute) as gateway:
        both, no_carbon, nothing = [await gateway.post() for _ in range(3)]
    cost = {name: value for name, value in both.headers.items() if name.startswith("x-joulery-")}
    assert cost == {
        "x-joulery-variant": "small",
        "x-joulery-energy-j": "0.25",
        "x-joulery-carbon-g": "0.000123457",
        "x-joulery-quality": "modelled",
    }
    assert no_carbon.headers["x-joulery-quality"] == "measured"
    assert "x-joulery-carbon-g" not in no_carbon.headers
    assert [name for name in nothing.headers if name.startswith("x-joulery-")] == ["x-joulery-variant"]
    assert asked == [("toy", "small", 0.3, 0.4, 11.0)] * 3
    assert [record.energy and record.energy.energy_j for record in gateway.records] == [0.25, 2.0, None]


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (RequestError("no", Outcome.INVALID), 400, None),
        (RequestError("no", Outcome.UNKNOWN), 404, None),
        (RequestError("no", Outcome.OVERLOADED, retry_after_s=1.2), 429, "2"),
        (RequestError("no", Outcome.OVERLOADED, retry_after_s=0.0), 429, "1"),
        (RequestError("no", Outcome.FAILED, variant="big", cpu_s=0.2, service_s=0.3), 500, None),
        (RequestError("no", Outcome.CRASHED, variant="big", attempts=2), 502, None),
        (RequestError("no", Outcome.UNAVAILABLE), 503, "1"),
        (RequestError("no", Outcome.DEADLINE, variant="big"), 504, None),
    ],
)
async def test_every_failure_has_its_status_and_its_record(error: RequestError, status: int, retry: str | None) -> None:
    engine = FakeEngine()

    def fail(request: InferRequest) -> Any:
        raise error

    engine.reply = fail
    share = EnergyShare(1.0, None, Quality.MODELLED)
    async with serving(engine, attribute=lambda *args: share) as gateway:
        answer = await gateway.post()
        assert answer.status_code == status
        assert answer.json() == {"error": "no"}
        assert answer.headers.get("retry-after") == retry
        assert answer.headers.get("x-joulery-variant") == (error.variant or None)
        charged = error.cpu_s > 0
        assert answer.headers.get("x-joulery-energy-j") == ("1" if charged else None)
        (record,) = gateway.records
        assert (record.outcome, record.variant, record.attempts) == (error.outcome, error.variant, error.attempts)
        assert (record.cpu_s, record.service_s) == (error.cpu_s, error.service_s)
        assert record.service == ("" if error.outcome is Outcome.UNKNOWN else "toy")
        assert math.isnan(record.start_s)
        assert record.energy == (share if charged else None)


async def test_an_output_the_protocol_cannot_carry_is_the_model_s_fault() -> None:
    engine = FakeEngine()
    engine.reply = lambda request: {"y": np.array([1j])}
    async with serving(engine) as gateway:
        answer = await gateway.post()
        assert answer.status_code == 500
        assert "complex128" in answer.json()["error"]
        assert gateway.records[0].outcome is Outcome.FAILED


async def test_a_version_is_a_variant_and_a_timeout_is_passed_on() -> None:
    engine = FakeEngine(view("small"), view("large"))
    async with serving(engine) as gateway:
        answer = await gateway.post(path="/v2/models/toy/versions/large/infer", x_joulery_timeout_s="0.25")
        assert answer.status_code == 200
        ((_, request),) = engine.asked
        assert (request.variant, request.timeout_s) == ("large", 0.25)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-joulery-timeout-s": "soon"},
        {"x-joulery-timeout-s": "0"},
        {"x-joulery-timeout-s": "-1"},
        {"x-joulery-timeout-s": "inf"},
        {"x-joulery-timeout-s": "nan"},
        {"inference-header-content-length": "x"},
        {"inference-header-content-length": "-1"},
        {"inference-header-content-length": "9" * 30},
    ],
)
async def test_headers_that_make_no_sense_are_refused(headers: dict[str, str]) -> None:
    async with serving(FakeEngine()) as gateway:
        answer = await gateway.client.post(INFER, content=body(), headers=headers)
        assert answer.status_code == 400
        assert list(answer.json()) == ["error"]
        assert gateway.records[0].outcome is Outcome.INVALID


async def test_what_the_protocol_says_of_server_and_models() -> None:
    restarting = view("large", ReplicaState.RESTARTING)
    engine = FakeEngine(view("small"), restarting, view("only", ReplicaState.RESTARTING, service="down"))
    async with serving(engine) as gateway:

        async def get(path: str) -> tuple[int, Any]:
            answer = await gateway.client.get(path)
            return answer.status_code, answer.json()

        server = {"name": "joulery", "version": __version__, "extensions": ["binary_tensor_data"]}
        assert await get("/v2") == (200, server)
        assert await get("/v2/") == (200, server)
        assert await get("/v2/health/live") == (200, {"live": True})
        assert await get("/v2/health/ready") == (503, {"live": True, "ready": False})
        tensors = [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]
        model = {"name": "toy", "platform": "python", "inputs": tensors, "outputs": tensors}
        assert await get("/v2/models/toy") == (200, {**model, "versions": ["large", "small"]})
        assert await get("/v2/models/toy/versions/small") == (200, {**model, "versions": ["small"]})
        assert await get("/v2/models/toy/ready") == (200, {"name": "toy", "ready": True})
        assert await get("/v2/models/toy/versions/large/ready") == (503, {"name": "toy", "ready": False})
        assert await get("/v2/models/down/ready") == (503, {"name": "down", "ready": False})
        assert (await get("/v2/models/none"))[0] == 404
        assert (await get("/v2/models/toy/versions/none"))[0] == 404
        assert (await get("/v2/models/toy/versions/none/ready"))[0] == 404
        engine.views = (view("small"),)
        assert await get("/v2/health/ready") == (200, {"live": True, "ready": True})
        engine.views = ()
        assert (await get("/v2/health/ready"))[0] == 503
        assert (await gateway.client.head("/v2/health/live")).status_code == 200


async def test_the_metadata_of_a_model_is_what_a_ready_replica_declares() -> None:
    silent = replace(view("small", ReplicaState.RESTARTING), inputs=(), platform="")
    async with serving(FakeEngine(silent, view("small"))) as gateway:
        assert (await gateway.client.get("/v2/models/toy")).json()["platform"] == "python"
        gateway.server._app.engine.views = (silent,)  # type: ignore[attr-defined]
        assert (await gateway.client.get("/v2/models/toy")).json()["inputs"] == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", INFER, 405),
        ("POST", "/v2/models/toy", 405),
        ("DELETE", "/v2", 405),
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/health", 404),
        ("GET", "/v2/models", 404),
        ("GET", "/v2/models/", 404),
        ("POST", "/v2/models//infer", 404),
        ("POST", "/v2/infer", 404),
        ("POST", "/v2/models/toy/versions//infer", 404),
        ("POST", "/v2/models/toy/infer/infer", 404),
        ("GET", "/v2/models/toy/versions/small/ready/ready", 404),
        ("POST", "/v2/repository/index", 405),
        ("GET", "/v20", 404),
        ("GET", "/", 404),
        ("GET", "/anything", 404),
    ],
)
async def test_everything_else_is_404_or_405_in_json(method: str, path: str, status: int) -> None:
    async with serving(FakeEngine()) as gateway:
        answer = await gateway.client.request(method, path)
        assert answer.status_code == status
        assert list(answer.json()) == ["error"]
        if status == 405:
            assert answer.headers["allow"] in {"POST", "GET, HEAD"}


async def test_metrics_and_other_routes_are_mounted_beside() -> None:
    metrics = Metrics(["toy"])
    engine = FakeEngine()
    async with serving(engine, admin=admin_app(metrics)) as gateway:
        metrics.request((await gateway.post()) and gateway.records[0])
        answer = await gateway.client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        assert 'joulery_requests_total{outcome="ok",workload="toy"} 1.0' in answer.text
        missing = await gateway.client.get("/nothing")
        assert (missing.status_code, missing.json()) == (404, {"error": "Not Found"})


async def test_a_token_is_asked_for_everywhere_but_where_there_is_no_data() -> None:
    async with serving(FakeEngine(), token="correct horse", protected=True) as gateway:
        for path in ("/v2", "/v2/health/ready", "/v2/models/toy", "/metrics", "/api/now", "/staticx"):
            answer = await gateway.client.get(path)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await gateway.client.get("/v2/health/live")).status_code == 200
        for path in ("/", "/dashboard", "/static/x.js"):
            assert (await gateway.client.get(path)).status_code == 404, "open, but nothing is mounted here"
        for wrong in (b"", b"Bearer", b"Bearer correct horsE", b"bearer correct horse", b"Bearer \xe9\xff"):
            answer = await gateway.client.post(INFER, content=body(), headers={b"authorization": wrong})
            assert answer.status_code == 401, wrong
        assert gateway.records == []
        assert (await gateway.post(authorization="Bearer correct horse")).status_code == 200


async def test_monitoring_may_be_open_and_nothing_else_is() -> None:
    async with serving(FakeEngine(), token="correct horse", open_monitoring=True, protected=True) as gateway:
        assert (await gateway.client.get("/v2/health/ready")).status_code != 401
        assert (await gateway.client.get("/metrics")).status_code != 401
        for path in ("/v2", "/metrics/", "/metricsx", "/v2/models/toy", "/v2/health/ready/x", "/api/now"):
            assert (await gateway.client.get(path)).status_code == 401, path


async def test_bodies_are_bounded_one_by_one_and_together() -> None:
    engine = FakeEngine()
    async with serving(engine, limits=Limits(body_bytes=1000, held_bytes=1500)) as gateway:
        fits = body() + b" " * (1000 - len(body()))
        assert (await gateway.post(fits)).status_code == 200
        for excess, connection in ((1, None), (20_000_000, "close")):
            answer = await gateway.post(fits + b" " * excess)
            assert (answer.status_code, answer.headers.get("connection")) == (413, connection)
            assert answer.json() == {"error": "the body is longer than 1000 bytes"}

        async def chunks() -> Any:
            for _ in range(11):
                yield b" " * 100

        assert (await gateway.client.post(INFER, content=chunks())).status_code == 413
        assert gateway.records[-1].outcome is Outcome.INVALID
        release = asyncio.Event()

        async def wait() -> dict[str, Any]:
            await release.wait()
            return {}

        engine.reply = lambda request: wait()
        held = asyncio.ensure_future(gateway.post(fits))
        await until(lambda: len(engine.asked) == 2)
        crowded = await gateway.client.post(INFER, content=halves(fits))
        assert (crowded.status_code, crowded.headers["retry-after"]) == (503, "1")
        release.set()
        assert (await held).status_code == 200
        assert (await gateway.client.post(INFER, content=halves(fits))).status_code == 200, "all was given back"


async def halves(content: bytes) -> Any:
    """In two chunks with a pause between, so that the server sees them apart."""
    yield content[:500]
    await asyncio.sleep(0.02)
    yield content[500:]


async def test_a_compressed_body_is_not_taken() -> None:
    async with serving(FakeEngine()) as gateway:
        assert (await gateway.post(content_encoding="gzip")).status_code == 415
        assert (await gateway.post(content_encoding="identity")).status_code == 200
