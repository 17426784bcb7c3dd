"""Requests that gateways pass on to the controller: streams in order, withdrawn ones ended, losses said once."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.adapters.engines.shared import messages as m
from joulery.domain.serving.relay import Passed, RelayedPart, RelayedRequest
from joulery.gateway.body import BodyReader, Limits, RefusedError
from joulery.gateway.joined.language_models import RelayedText, answer_relayed
from tests.adapters.engines.shared.test_shared import Site, site
from tests.waiting import eventually

ASKED = RelayedRequest("POST", "/v1/chat/completions", (("x-request-id", "é"),), b"body")


class Controller:
    """Answers with the words it is given, one part at a time."""

    def __init__(self, made: Site) -> None:
        self.asked: list[RelayedRequest] = []
        self.cancelled, self.go = 0, asyncio.Event()
        made.text = self.answer

    async def answer(self, request: RelayedRequest, passed: Passed) -> None:
        self.asked.append(request)
        try:
            passed(RelayedPart(200, (("content-type", "text/plain"),), b"first"))
            await self.go.wait()
            for number in range(50):
                passed(RelayedPart(body=b"%d," % number))
            passed(RelayedPart(more=False))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def test_an_answer_comes_in_order_and_as_it_is_made(tmp_path: Path) -> None:
    async with site(tmp_path) as made:
        controller = Controller(made)
        await made.controller()
        one, two = await made.gateway("one"), await made.gateway("two")
        async with aclosing(one.text(ASKED)) as parts:
            first = await anext(parts)
            assert (first.status, first.body, first.more) == (200, b"first", True), "before the answer is whole"
            other = asyncio.ensure_future(whole(two.text(ASKED)))
            controller.go.set()
            rest = b"".join([part.body async for part in parts])
        expected = b"".join(b"%d," % number for number in range(50))
        assert rest == expected and await other == b"first" + expected
        assert controller.asked == [ASKED, ASKED] and controller.cancelled == 0


async def whole(parts) -> bytes:
    return b"".join([part.body async for part in parts])


@pytest.mark.parametrize("how", ["client", "gateway"])
async def test_a_request_that_is_given_up_is_withdrawn(tmp_path: Path, how: str) -> None:
    async with site(tmp_path) as made:
        controller = Controller(made)
        await made.controller()
        gateway = await made.gateway("one")
        task = asyncio.ensure_future(whole(gateway.text(ASKED)))
        await eventually(lambda: bool(controller.asked), "it has come")
        if how == "client":
            task.cancel()
        else:
            await gateway.close()
        await eventually(lambda: controller.cancelled == 1, "it is withdrawn")
        await asyncio.gather(task, return_exceptions=True)


async def test_a_lost_controller_is_said_at_once(tmp_path: Path) -> None:
    async with site(tmp_path) as made:
        controller = Controller(made)
        await made.controller()
        gateway = await made.gateway("one")
        parts = gateway.text(ASKED)
        assert (await anext(parts)).body == b"first"
        await made.links[0].close()
        last = await anext(parts)
        assert not last.more and "controller was lost" in last.error
        (away,) = [part async for part in gateway.text(ASKED)]
        assert not away.more and "controller is away" in away.error
        assert controller.cancelled == 1


async def test_a_controller_that_fails_leaves_no_request_open(tmp_path: Path) -> None:
    async with site(tmp_path) as made:

        async def fails(request: RelayedRequest, passed: Passed) -> None:
            return

        made.text = fails
        await made.controller()
        gateway = await made.gateway("one")
        (only,) = [part async for part in gateway.text(ASKED)]
        assert only.error and not only.more


TEXTS = st.text(st.characters(codec="latin-1"), max_size=20)
PAIRS = st.lists(st.tuples(TEXTS, TEXTS), max_size=3).map(tuple)


@given(st.builds(RelayedRequest, TEXTS, TEXTS, PAIRS, st.binary(max_size=50)))
def test_a_request_is_the_same_on_the_other_side(request: RelayedRequest) -> None:
    header, tensors = m.text_message(7, request)
    assert m.text_of(orjson.loads(orjson.dumps(header)), tensors) == request


@given(st.builds(RelayedPart, st.integers(0, 599), PAIRS, st.binary(max_size=50), st.booleans(), TEXTS))
def test_a_part_is_the_same_on_the_other_side(part: RelayedPart) -> None:
    header, tensors = m.part_message(7, part)
    assert m.part_of(orjson.loads(orjson.dumps(header)), tensors) == part
    assert tensors["body"].dtype == np.uint8


class Client:
    """One HTTP client of a joined gateway."""

    def __init__(self, body: bytes = b"{}") -> None:
        self.messages: list[dict] = []
        self.body = body

    async def receive(self) -> dict:
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, message: dict) -> None:
        self.messages.append(message)

    async def ask(self, *parts: RelayedPart, limit: int = 100) -> tuple[RelayedRequest | None, bytes]:
        seen: list[RelayedRequest] = []

        async def stream(request: RelayedRequest):
            seen.append(request)
            for part in parts:
                yield part

        routes = RelayedText(stream, BodyReader(Limits.of(limit)), lambda: True)
        headers = [(b"authorization", b"Bearer t"), (b"host", b"h"), (b"x-request-id", b"7")]
        headers.append((b"content-length", b"%d" % len(self.body)))
        await routes({"method": "POST", "path": "/v1/x", "headers": headers}, None, self.receive, self.send)
        return (seen[0] if seen else None), b"".join(one.get("body", b"") for one in self.messages)


async def test_a_gateway_keeps_its_token_and_sends_what_comes() -> None:
    client = Client()
    asked, body = await client.ask(
        RelayedPart(200, (("content-type", "text/plain"),), b"a"), RelayedPart(body=b"b", more=False)
    )
    assert asked == RelayedRequest("POST", "/v1/x", (("x-request-id", "7"),), b"{}") and body == b"ab"
    assert client.messages[0]["status"] == 200 and client.messages[-1]["more_body"] is False


async def test_a_loss_before_the_first_part_is_a_status_and_later_the_end_of_the_stream() -> None:
    client = Client()
    await client.ask(RelayedPart(more=False, error="gone"))
    assert client.messages[0]["status"] == 503 and (b"retry-after", b"1") in client.messages[0]["headers"]
    client = Client()
    events = (("content-type", "text/event-stream; charset=utf-8"),)
    _, body = await client.ask(RelayedPart(200, events, b"data: 1\n\n"), RelayedPart(more=False, error="gone"))
    assert client.messages[0]["status"] == 200
    assert orjson.loads(body.removeprefix(b"data: 1\n\ndata: "))["error"]["message"] == "gone" and b"[DONE]" not in body


async def test_a_long_body_is_refused_by_the_gateway_itself() -> None:
    with pytest.raises(RefusedError, match="longer than 100 bytes"):
        await Client(b"x" * 101).ask()


async def test_a_controller_without_models_says_when_to_come_again() -> None:
    parts: list[RelayedPart] = []
    await answer_relayed(None, ASKED, parts.append)
    (only,) = parts
    assert only.status == 503 and ("retry-after", "1") in only.headers and not only.more
