"""The worker process: loads a model, or several variants of one, and answers one request at a time over a pipe.

Started as ``python -m joulery.adapters.engines.embedded.worker FD PARENT CORES THREADS``. It reads a frame that names
the models, answers with declarations, then answers every frame with one frame. A frame whose header has ``use`` names
the variant that runs from then on, and has no answer. The worker ends with its pipe; the kernel kills it when its
parent dies first.

Header of an answer: ``s`` seconds and ``c`` CPU seconds (all threads) from the request's arrival to its answer; ``e``
and ``o`` an error and its outcome.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

_PR_SET_PDEATHSIG = 1
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_RECEIVE_BYTES = 65536


def main(arguments: list[str]) -> int:
    """Run a worker until its pipe ends."""
    descriptor, parent = int(arguments[0]), int(arguments[1])
    cores = {int(core) for core in arguments[2].split(",")}
    threads = int(arguments[3])
    die_with(parent)
    os.sched_setaffinity(0, cores)
    # Before numpy and the model's packages are imported: their thread pools are sized at import.
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    os.set_inheritable(descriptor, False)
    # A pipe that breaks under an answer has ended, as one that ends under a read: the engine is gone.
    with socket.socket(fileno=descriptor) as pipe, suppress(BrokenPipeError, ConnectionResetError):
        _Worker(pipe, threads).serve()
    return 0


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, also from SIGKILL."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(0)  # it died before the line above


class _Worker:
    """The worker's loop. Heavy modules are imported only after the thread counts are set."""

    def __init__(self, pipe: socket.socket, threads: int) -> None:
        import numpy

        from joulery.adapters.engines.embedded import wire

        self.as_array = numpy.asarray
        self.pipe = pipe
        self.threads = threads
        self.wire = wire
        self.reader = wire.FrameReader()
        self.frames: list[wire.Frame] = []
        self.models: dict[str, Any] = {}

    def serve(self) -> None:
        """Load the models, then answer requests until the pipe ends."""
        from joulery.adapters.engines.embedded.wire import pack_error
        from joulery.domain.errors import JouleryError

        request = self.receive()
        if request is None:
            return
        try:
            self.load(request.header)
        except JouleryError as error:
            self.send({"error": pack_error(error)})
            return
        while (request := self.receive()) is not None:
            if "use" in request.header:
                self.model = self.models[request.header["use"]]
            else:
                self.answer(request)

    def load(self, header: dict[str, Any]) -> None:
        """Load and warm up the models; send declarations, the variants kept warm, and what loading cost."""
        from joulery.adapters.engines.embedded import models

        start_s = time.perf_counter()
        self.model = models.load(models.reference(header["model"]), self.threads)
        self.models = {header["variant"]: self.model}
        notes = [models.warm_up(self.model)]
        for name, entry in header["warm"]:
            notes.append(models.keep_warm(self.models, name, entry, self.threads, header["memory"]))
            if notes[-1]:
                break
        self.send(
            {
                "inputs": [tuple(spec) for spec in self.model.inputs],
                "outputs": [tuple(spec) for spec in self.model.outputs],
                "platform": self.model.platform,
                "warm": [name for name in self.models if name != header["variant"]],
                "note": "; ".join(note for note in notes if note),
                "load_s": time.perf_counter() - start_s,
                "cpu_s": time.process_time(),
            }
        )

    def answer(self, request: Any) -> None:
        """Run the model on one request and send its outputs, or the error."""
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        header: dict[str, Any] = {}
        try:
            results = self.model.run(request.tensors, tuple(request.header.get("w", ())))
            outputs = {str(name): self.as_array(value) for name, value in results.items()}
            header["s"], header["c"] = time.perf_counter() - start_s, time.process_time() - start_cpu_s
            pieces = self.wire.encode(header, outputs)
        except Exception as error:  # noqa: BLE001 - an error of the model is the client's answer; the loop goes on
            header = self.failure(error)
            header["s"], header["c"] = time.perf_counter() - start_s, time.process_time() - start_cpu_s
            pieces = self.wire.encode(header, {})
        self.write(pieces)

    def failure(self, error: Exception) -> dict[str, Any]:
        """An error as the header of an answer."""
        from joulery.adapters.engines.embedded.models import failure

        message, outcome = failure(error)
        return {"e": message, "o": outcome}

    def receive(self) -> Any:
        """The next frame; None at the end of the pipe."""
        while not self.frames:
            chunk = self.pipe.recv(max(_RECEIVE_BYTES, self.reader.missing))
            if not chunk:
                return None
            self.frames = self.reader.feed(chunk)
        return self.frames.pop(0)

    def send(self, header: dict[str, Any]) -> None:
        """Send one frame without tensors."""
        self.write(self.wire.encode(header, {}))

    def write(self, pieces: list[Any]) -> None:
        """Write all pieces of a frame."""
        for piece in pieces:
            self.pipe.sendall(piece)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
