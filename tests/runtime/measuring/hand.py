"""A window meter on a clock, processors and a program that do what a test states."""

from joulery.adapters.meters.fake import FakeMeter, Script
from joulery.runtime.measuring.windows import WindowMeter, WindowReaders

NS = 1_000_000_000


class Hand:
    """A clock, processors and a program that do what the test says; the meter's own thread is stopped."""

    sockets, cpus = (0,), (4,)

    def __init__(self, *scripts, source=None, **more):
        self.now_s = self.busy_s = self.own_s = self.reading_s = 0.0
        made = scripts or (Script(((0.0, 100.0),), idle_w=40.0),)
        fake = FakeMeter(made, lambda: self.now_s)
        readers = WindowReaders(
            (fake,), _Seconds(self, "busy_s"), _Seconds(self, "own_s"), lambda: round(self.now_s * NS)
        )
        self.meter = WindowMeter(readers, source, **more)
        self.meter._stop.set()
        self.meter._thread.join()
        self.meter._stop.clear()

    def run(self, seconds, own_s=0.0, others_s=0.0):
        self.now_s += seconds
        self.own_s += own_s
        self.busy_s += own_s + others_s


class _Seconds:
    sockets, cpus = (0,), (4,)

    def __init__(self, hand, name):
        self._hand, self._name = hand, name

    def read(self):
        self._hand.now_s += self._hand.reading_s
        return (getattr(self._hand, self._name),)

    def discover(self):
        pass

    def pids(self):
        return frozenset()

    def close(self):
        pass
