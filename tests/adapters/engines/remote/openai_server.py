"""A faithful little OpenAI-compatible server on a free port, which can also misbehave.

``order`` is how it treats ``priority``: "plain" ignores it (llama.cpp), "vllm" serves the smallest first and refuses a
priority without ``--scheduling-policy priority``, "sglang" the largest first.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from joulery.gateway.server import GatewayServer, ServerLimits


class FakeServer:
    def __init__(self, model="fake-1", order="plain", max_num_seqs=1):
        self.model, self.order, self.max_num_seqs = model, order, max_num_seqs
        self.words = {}  # prompt -> words of its answer
        self.asked, self.begun, self.ended, self.headers = [], [], [], []
        self.cancelled = 0
        self.fault, self.metrics = "", ""
        self.probed, self.deaf = 0, False
        self.on_word = lambda: None
        self.gate = asyncio.Event()
        self.gate.set()
        self._waiting, self._running, self._arrived = [], 0, itertools.count()

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/v1/models":
            self.probed += 1
            if self.deaf:
                await self.leaves(receive)
                return
            await answer(send, 200, {"object": "list", "data": [{"id": self.model, "object": "model"}]})
            return
        if scope["path"] == "/metrics":
            await send(start(200 if self.metrics else 404, b"text/plain"))
            await send({"type": "http.response.body", "body": self.metrics.encode(), "more_body": False})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        data = json.loads(body)
        self.asked.append(data)
        refusal = self.refused(scope, data)
        if refusal is not None:
            await answer(send, *refusal)
            return
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        if scope["path"] == "/v1/embeddings":
            usage = {"prompt_tokens": 2, "total_tokens": 2}
            await self.gate.wait()
            vectors = [{"object": "embedding", "index": 0, "embedding": [0.5]}]
            await answer(send, 200, {"object": "list", "model": self.model, "data": vectors, "usage": usage})
            return
        if scope["path"] == "/v1/responses":
            await self.respond(data, send)
            return
        prompt = data["messages"][-1]["content"] if "messages" in data else data["prompt"]
        gone = asyncio.create_task(self.leaves(receive))
        working = asyncio.create_task(self.work(prompt, data, send))
        await asyncio.wait((gone, working), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            self.cancelled += 1
        for task in (gone, working):
            task.cancel()
        await asyncio.gather(gone, working, return_exceptions=True)

    async def respond(self, data, send):
        usage = {"input_tokens": 4, "output_tokens": 2, "total_tokens": 6}
        output = [{"type": "message", "content": [{"type": "output_text", "text": "w0 w1 "}]}]
        whole = {"object": "response", "id": "r", "model": self.model, "output": output, "usage": usage}
        if not data.get("stream"):
            await answer(send, 200, whole)
            return
        await send(start(200, b"text/event-stream"))
        events = [{"type": "response.created", "response": {**whole, "output": [], "usage": None}}]
        events += [{"type": "response.output_text.delta", "delta": f"w{i} "} for i in range(2)]
        last = {"type": "response.completed", "response": whole}
        if self.fault == "failed":
            last = {"type": "response.failed", "response": {**whole, "error": {"code": "x", "message": "no memory"}}}
        for each in (*events, last):
            self.on_word()
            await send(piece(b"event: " + each["type"].encode() + b"\n" + event(each)))
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def refused(self, scope, data):
        if self.fault == "500":
            return 500, {"error": {"message": "out of memory"}}
        if self.fault == "html":
            return 502, b"<html>bad gateway</html>"
        if self.fault == "429":
            return 429, {"error": {"message": "slow down"}}
        if self.order == "plain" and "priority" in data:
            return 400, {"error": {"message": "priority is only for the priority policy"}}
        if data.get("model") != self.model:
            return 404, {"error": {"message": f"no model {data.get('model')}"}}
        return None

    @staticmethod
    async def leaves(receive):
        while (await receive())["type"] != "http.disconnect":
            continue

    async def work(self, prompt, data, send):
        await self.turn(data)
        try:
            self.begun.append(prompt)
            await self.gate.wait()
            if self.fault == "hang":
                await asyncio.Event().wait()
            await self.write(prompt, data, send)
            self.ended.append(prompt)
        finally:
            self._running -= 1
            self.next()

    async def turn(self, data):
        sign = {"plain": 0, "vllm": 1, "sglang": -1}[self.order]
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((sign * data.get("priority", 0), next(self._arrived), turn))
        self.next()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting = [entry for entry in self._waiting if entry[2] is not turn]
            raise

    def next(self):
        while self._waiting and self._running < self.max_num_seqs:
            entry = min(self._waiting, key=lambda entry: entry[:2])
            self._waiting.remove(entry)
            if not entry[2].done():
                self._running += 1
                entry[2].set_result(None)

    async def write(self, prompt, data, send):
        words = [f"w{i} " for i in range(self.words.get(prompt, 3))]
        model = "another-model" if self.fault == "lie" else self.model
        chat = "messages" in data
        usage = {"prompt_tokens": 7, "completion_tokens": len(words), "total_tokens": 7 + len(words)}
        base = {"id": "x1", "created": 1, "model": model}
        if not data.get("stream"):
            choice = {"index": 0, "finish_reason": "stop"}
            choice |= (
                {"message": {"role": "assistant", "content": "".join(words)}} if chat else {"text": "".join(words)}
            )
            await answer(send, 200, {**base, "object": "o", "choices": [choice], "usage": usage})
            return
        await send(start(200, b"text/event-stream"))
        for index, word in enumerate(words):
            if self.fault == "stall" and index == 1:
                await asyncio.Event().wait()
            if self.fault == "break" and index == 1:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            if self.fault == "garbage" and index == 1:
                await send(piece(b"data: {not json\n\n"))
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            choice = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": word}} if chat else {"text": word}
            self.on_word()
            await send(piece(event({**base, "choices": [choice]})))
            await asyncio.sleep(0)
        if data.get("stream_options", {}).get("include_usage") and self.fault != "no-usage":
            await send(piece(event({**base, "choices": [], "usage": usage})))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def event(data):
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def start(status, kind):
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}


def piece(body):
    return {"type": "http.response.body", "body": body, "more_body": True}


async def answer(send, status, data):
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    await send(start(status, b"application/json"))
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def running(fake: FakeServer) -> AsyncIterator[str]:
    server = GatewayServer(fake, "127.0.0.1", 0, limits=ServerLimits(drain_s=0.2))
    await server.start()
    try:
        yield server.url
    finally:
        fake.gate.set()
        await server.stop()
