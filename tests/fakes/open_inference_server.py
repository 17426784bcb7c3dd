"""A model server of the Open Inference Protocol in a process of its own: one model that sleeps, and a log of answers.

``python -m tests.fakes.open_inference_server PORT MODEL SECONDS LOG``: ``x`` FP32[-1, 2] gives ``y`` = 2 ``x`` after
that many seconds, in JSON or with the binary tensor extension. Each answered request is a line of LOG: its first value.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

LENGTH = "Inference-Header-Content-Length"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # With Nagle's algorithm each answer would wait for the acknowledgement of its head.
    disable_nagle_algorithm = True
    model, seconds, log = "net", 0.0, Path()

    def do_GET(self) -> None:
        if self.path in ("/v2/health/live", "/v2/health/ready", f"/v2/models/{self.model}/ready"):
            self.say(200, {})
        elif self.path == f"/v2/models/{self.model}":
            inputs = [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]
            outputs = [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}]
            self.say(200, {"name": self.model, "platform": "fake", "inputs": inputs, "outputs": outputs})
        else:
            self.say(404, {"error": f"unknown {self.path}"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path != f"/v2/models/{self.model}/infer":
            self.say(404, {"error": f"unknown {self.path}"})
            return
        length = int(self.headers.get(LENGTH, len(body)))
        content = json.loads(body[:length])
        (entry,) = content["inputs"]
        size = entry.get("parameters", {}).get("binary_data_size")
        x = np.frombuffer(body[length : length + size], "<f4") if size else np.array(entry["data"], "<f4")
        y = 2 * x.reshape(entry["shape"])
        time.sleep(self.seconds)
        with self.log.open("a") as log:
            log.write(f"{x.ravel()[0]:.0f}\n")
        answer: dict[str, Any] = {"name": "y", "datatype": "FP32", "shape": list(y.shape)}
        if content.get("parameters", {}).get("binary_data_output"):
            answer["parameters"] = {"binary_data_size": y.nbytes}
            self.say(200, {"model_name": self.model, "outputs": [answer]}, y.tobytes())
        else:
            self.say(200, {"model_name": self.model, "outputs": [{**answer, "data": y.ravel().tolist()}]})

    def say(self, status: int, content: dict[str, Any], binary: bytes = b"") -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/octet-stream" if binary else "application/json")
        self.send_header("content-length", str(len(text) + len(binary)))
        if binary:
            self.send_header(LENGTH, str(len(text)))
        self.end_headers()
        self.wfile.write(text + binary)

    def log_message(self, *args: object) -> None:
        pass


def main(port: str, model: str, seconds: str, log: str) -> None:
    Handler.model, Handler.seconds, Handler.log = model, float(seconds), Path(log)
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
