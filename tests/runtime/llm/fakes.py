"""An engine, a predictor and a meter with scripted results."""

import asyncio
import math

import numpy as np

from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import Outcome, RequestError
from joulery.domain.serving.generation import Dialect, GenerationEvent, GenerationKind, GenerationRequest, TokenUsage
from joulery.runtime.llm.length_prediction import Forecaster, LengthScore

CLASS_TOKENS = np.array([10.0, 50.0, 100.0, 300.0, 600.0])


def ask(prompt="p", **fields):
    return GenerationRequest("llm", GenerationKind.CHAT, {"messages": []}, prompt, **fields)


class FakeEngine:
    """Writes three tokens a request when its gate is open; remembers the order."""

    name, variant, pauses = "fake://engine", "fake-1", False

    def __init__(self, dialect=Dialect.PLAIN):
        self.dialect, self.ready = dialect, True
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun, self.ended, self.priorities = [], [], []
        self.deaths = 0
        self.tokens = {}
        self.used_cpu_s = 0.0
        self.closed, self.whole = False, False
        self.on_token = lambda: None
        self.reported = None

    async def start(self):
        return None

    def cpu_s(self):
        return self.used_cpu_s

    async def load(self):
        return self.reported

    async def generate(self, request, priority, /):
        self.begun.append(request.prompt)
        self.priorities.append(priority)
        if self.deaths:
            self.deaths -= 1
            raise RequestError("died", Outcome.CRASHED)
        await self.gate.wait()
        count = self.tokens.get(request.prompt, 3)
        if self.whole:
            yield GenerationEvent({"choices": [{}]}, count, TokenUsage(5, count, reported=True))
            self.ended.append(request.prompt)
            return
        for _ in range(count):
            self.on_token()
            yield GenerationEvent({"choices": [{}]}, 1)
            await asyncio.sleep(0)
        yield GenerationEvent({"choices": []}, 0, TokenUsage(5, count, reported=True))
        self.ended.append(request.prompt)

    async def close(self):
        self.closed = True


class FakePredictor:
    """Scores a prompt by the digit it ends with; the word "boom" makes it throw."""

    class_tokens = CLASS_TOKENS

    def predict(self, prompt):
        if "boom" in prompt:
            raise ZeroDivisionError("a predictor of another package")
        return LengthScore(float(prompt[-1]) if prompt[-1:].isdigit() else 2.0)


def forecaster(predictor=None, cache=None):
    return Forecaster("llm", predictor or FakePredictor(), cache)


class FakeMachine:
    """One CPU counter that a test moves by hand."""

    def __init__(self, idle_w=10.0, device="cpu:0", kind=ReadingKind.COUNTER, update_s=0.0):
        facts = {"idle_w": idle_w, "wrap_j": 1000.0, "update_s": update_s}
        self.channels = (Channel(device, "package", kind, "fake", Quality.MEASURED, **facts),)
        self.value, self.busy_s, self.now_s = 0.0, 0.0, 100.0
        self.shown, self.shown_s, self.reads = 0.0, self.now_s, 0
        self.closed = False

    def read(self):
        self.reads += 1
        return (self.shown if self.channels[0].update_s else self.value,)

    def notes(self):
        return ()

    def close(self):
        self.closed = True

    def spend(self, seconds, watts, busy_s=math.nan):
        self.now_s += seconds
        self.value += seconds * watts
        if self.now_s - self.shown_s >= self.channels[0].update_s:
            self.shown, self.shown_s = self.value, self.now_s
        self.busy_s += 0.0 if math.isnan(busy_s) else busy_s
