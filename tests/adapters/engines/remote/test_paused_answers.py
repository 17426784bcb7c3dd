"""Answers that are interrupted and continued look to clients like one answer."""

from contextlib import aclosing

import pytest

from joulery.adapters.engines.remote.llama import LlamaEngine, LlamaSettings
from joulery.adapters.engines.remote.paused_answers import interruptible, interruptible_answer
from joulery.adapters.models import smollm2
from joulery.domain.serving.engine import RequestError
from joulery.domain.serving.generation import GenerationEvent, GenerationKind, GenerationRequest, TokenUsage

WORDS = tuple("abcdefghij")


def chat(stream=True, **body):
    messages = [{"role": "user", "content": "Letters, please."}]
    return GenerationRequest("m", GenerationKind.CHAT, {"messages": messages, "max_tokens": 10, **body}, "p", stream)


def completion(stream=True, **body):
    body = {"prompt": "Letters: ", "max_tokens": 10, **body}
    return GenerationRequest("m", GenerationKind.COMPLETION, body, "p", stream)


class Server:
    """Continues the letters of what it is given; keeps the requests, and how many streams are open."""

    def __init__(self):
        self.bodies, self.open = [], 0

    async def generate(self, request):
        number, body = len(self.bodies), request.body
        self.bodies.append(body)
        self.open += 1
        chats = request.kind is GenerationKind.CHAT
        try:
            if chats:
                last = body["messages"][-1]
                said = last["content"] if last["role"] == "assistant" else ""
                yield GenerationEvent(self.chunk(number, chats, {"role": "assistant", "content": None}))
            else:
                said = body["prompt"].removeprefix("Letters: ")
            written = 0
            for word in WORDS[len(said) :][: body["max_tokens"]]:
                written += 1
                yield GenerationEvent(self.chunk(number, chats, {"content": word}), 1)
            yield GenerationEvent(self.chunk(number, chats, {}, "length"))
            usage = {"prompt_tokens": 5 + len(said), "completion_tokens": written}
            usage["total_tokens"] = sum(usage.values())
            data = {"id": f"id-{number}", "created": number, "choices": [], "usage": usage}
            yield GenerationEvent(data, 0, TokenUsage(5 + len(said), written, reported=True))
        finally:
            self.open -= 1

    @staticmethod
    def chunk(number, chats, delta, finish=None):
        choice = {"index": 0, "finish_reason": finish}
        choice |= {"delta": delta} if chats else {"text": delta.get("content") or ""}
        return {"id": f"id-{number}", "created": number, "model": "m", "choices": [choice]}


async def played(request, pauses_at=()):
    """Every event, and the server; a pause after so many questions."""
    server, asked = Server(), [0]

    def pause():
        asked[0] += 1
        return asked[0] in pauses_at

    events = []
    async with aclosing(interruptible_answer(request, server.generate, pause)) as answer:
        async for event in answer:
            if event.paused:
                assert server.open == 0, "nothing runs while it is paused"
            events.append(event)
    return events, server


def deltas(events):
    return [choice.get("delta", choice) for event in events for choice in event.data.get("choices", ())]


@pytest.mark.parametrize("pauses_at", [(), (1,), (3,), (2, 4), (1, 2, 3)])
@pytest.mark.parametrize("make", [chat, completion])
async def test_a_stream_is_one_answer_however_often_it_is_paused(make, pauses_at) -> None:
    events, server = await played(make(), pauses_at)
    assert sum(event.paused for event in events) == len(pauses_at) == len(server.bodies) - 1
    key = "content" if make is chat else "text"
    assert "".join(each.get(key) or "" for each in deltas(events)) == "abcdefghij"
    assert {event.data["id"] for event in events if event.data} == {"id-0"}
    assert sum("role" in each for each in deltas(events)) == (make is chat)
    assert sum(event.tokens for event in events) == 10
    assert events[-1].usage == (5, 10, True)
    assert events[-1].data["usage"] == {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15}


@pytest.mark.parametrize("make", [chat, completion])
async def test_a_whole_answer_is_put_together_from_its_parts(make) -> None:
    events, server = await played(make(stream=False), (2, 4))
    assert len(server.bodies) == 3
    *progress, last = events
    assert all(not event.data for event in progress)
    (choice,) = last.data["choices"]
    assert (choice["message"]["content"] if make is chat else choice["text"]) == "abcdefghij"
    assert (choice["finish_reason"], last.usage) == ("length", (5, 10, True))
    assert sum(event.tokens for event in events) == 10


async def test_the_rest_is_asked_for_with_the_text_so_far_and_what_is_left_of_the_limit() -> None:
    _, server = await played(chat(temperature=0.5), (4,))
    first, second = server.bodies
    assert first["max_tokens"] == 10 and len(first["messages"]) == 1
    assert second["messages"][1:] == [{"role": "assistant", "content": "abc"}]
    assert (second["max_tokens"], second["temperature"]) == (7, 0.5)


async def test_an_answer_that_is_about_to_end_is_left_to_end() -> None:
    events, server = await played(chat(), range(7, 100))
    assert len(server.bodies) == 1 and not any(event.paused for event in events)


async def test_reasoning_and_tool_calls_are_not_interrupted() -> None:
    class Thinks(Server):
        async def generate(self, request):
            yield GenerationEvent(self.chunk(0, True, {"reasoning_content": "hm"}), 1)
            async for event in super().generate(request):
                yield event

    server = Thinks()
    events = [event async for event in interruptible_answer(chat(), server.generate, lambda: True)]
    assert len(server.bodies) == 1 and not any(event.paused for event in events)


async def test_an_answer_of_nothing_is_an_error_and_a_whole_one_passes() -> None:
    async def empty(request):
        yield GenerationEvent({"choices": []})

    async def whole(request):
        yield GenerationEvent({"choices": [{"message": {"content": "x"}}]}, 1, TokenUsage(1, 1, reported=True))

    with pytest.raises(RequestError, match="without choices"):
        _ = [event async for event in interruptible_answer(chat(stream=False), empty, lambda: False)]
    (event,) = [event async for event in interruptible_answer(chat(stream=False), whole, lambda: True)]
    assert event.data["choices"][0]["message"]["content"] == "x"


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{}]},
        {"response_format": {"type": "json_object"}},
        {"seed": 0},
        {"n": 2},
        {"logprobs": True},
        {"grammar": "root ::= x"},
        {"messages": []},
        {"messages": [{"role": "assistant", "content": "I"}]},
        {"messages": "x"},
    ],
)
def test_what_the_text_does_not_hold_is_never_interrupted(body) -> None:
    assert not interruptible(chat(**body))


def test_plain_requests_may_be_interrupted() -> None:
    assert (
        interruptible(chat()) and interruptible(chat(n=1, temperature=1.0, stop=["x"])) and interruptible(completion())
    )
    assert not interruptible(completion(prompt=[1, 2, 3])) and not interruptible(completion(echo=True))
    assert not interruptible(chat()._replace(kind=GenerationKind.EMBEDDING))


async def test_the_real_one_goes_on_where_it_was() -> None:
    pytest.importorskip("xllamacpp", reason="joulery[llm] is not installed")
    if not smollm2.installed():
        pytest.skip(f"the small language model is not installed: {smollm2.HOW}")
    engine = LlamaEngine(LlamaSettings(smollm2.weights(), smollm2.NAME, context_tokens=512))
    await engine.start()
    body = {"messages": [{"role": "user", "content": "Count to nine."}], "max_tokens": 24, "temperature": 0}
    request = chat()._replace(body=body)
    other = chat()._replace(body={**body, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4})
    asked = [0]

    def pause():
        asked[0] += 1
        return asked[0] == 10

    try:
        events, cached = [], None
        async with aclosing(engine.generate(request, None, pause)) as answer:
            async for event in answer:
                events.append(event)
                if event.paused:
                    assert [one async for one in engine.generate(other, None)]
                if event.usage is not None:
                    cached = event.data["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert sum(event.paused for event in events) == 1
        assert sum(event.tokens for event in events) == events[-1].usage.completion <= 24
        assert len({event.data["id"] for event in events if event.data}) == 1
        # Its state was kept although another request has run since: of 30 tokens and more only the last are read again.
        assert cached >= events[-1].usage.prompt, events[-1].data
    finally:
        await engine.close()
