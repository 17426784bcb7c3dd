"""A stand-in for the llama.cpp process: the same command line and first line, a few words for an answer.

The model file says how it behaves: ``ok``; ``broken`` cannot be loaded; ``silent`` never comes up. A prompt "die" ends
the process before it answers, "die once" the first time; "refuse" is answered 501, "fail" 500.
"""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    name = ""

    def do_POST(self):
        data = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if data["prompt"] == "die" or (data["prompt"] == "die once" and not Path(f"{self.name}.died").exists()):
            Path(f"{self.name}.died").touch()
            os._exit(3)
        status = {"refuse": 501, "fail": 500}.get(str(data["prompt"]), 200)
        usage = {"prompt_tokens": 1, "completion_tokens": 2}
        body = json.dumps({"model": Path(self.name).stem, "choices": [{"text": "a b"}], "usage": usage}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        return None


def main():
    options = json.loads(sys.argv[2])
    behaviour = Path(options["path"]).read_text()
    if behaviour == "broken":
        print(json.dumps({"error": "RuntimeError: no model", "missing": False}), flush=True)
        return
    if behaviour == "silent":
        sys.stdin.read()
        return
    Handler.name = options["path"]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps({"url": f"http://127.0.0.1:{server.server_port}"}), flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
