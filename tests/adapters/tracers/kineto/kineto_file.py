"""Small Kineto traces, written event by event."""

import json
from pathlib import Path
from typing import Any


class KinetoFile:
    """Collects events; times are microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._flow = 0

    def add(self, cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 10, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    def op(
        self, name: str, ts: float, dur: float, tid: int = 1, seq: int | None = None, fwd: int = 0, ext=None
    ) -> None:
        args: dict[str, Any] = {} if seq is None else {"Sequence number": seq, "Fwd thread id": fwd}
        if ext is not None:
            args["External id"] = ext
        self.add("cpu_op", name, ts, dur, tid, **args)

    def module(self, path: str, ts: float, dur: float, tid: int = 1) -> None:
        self.add("user_annotation", f"QTN:{path}", ts, dur, tid)

    def node(self, name: str, ts: float, dur: float, tid: int = 1, seq: int | None = None, fwd: int = 1) -> None:
        """A backward node: autograd's own event and, inside it, the node's."""
        self.op(f"autograd::engine::evaluate_function: {name}", ts, dur, tid, seq, fwd)
        self.op(name, ts + 0.1, dur - 0.2, tid, seq, fwd)

    def arrow(self, tail: tuple[int, float], head: tuple[int, float]) -> None:
        """A forward-backward flow between two (thread, time)."""
        self._flow += 1
        for ph, (tid, ts) in (("s", tail), ("f", head)):
            self.events.append(
                {"ph": ph, "cat": "fwdbwd", "name": "fwdbwd", "id": self._flow, "pid": 10, "tid": tid, "ts": ts}
            )

    def launch(self, name: str, ts: float, dur: float, correlation: int, tid: int = 1) -> None:
        self.add("cuda_runtime", name, ts, dur, tid, correlation=correlation)

    def kernel(
        self, name: str, ts: float, dur: float, correlation: int, cat: str = "kernel", stream: int = 7, **args
    ) -> None:
        self.add(cat, name, ts, dur, stream, device=0, stream=stream, correlation=correlation, **args)

    def write(self, folder: Path, base: int | None = 1_000_000_000, name: str = "trace.json") -> Path:
        path = folder / name
        document: dict[str, Any] = {"schemaVersion": 1, "traceEvents": self.events}
        if base is not None:
            document["baseTimeNanoseconds"] = base
        path.write_text(json.dumps(document))
        return path
