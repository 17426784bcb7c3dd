"""The process that runs a GGUF model with llama.cpp (package xllamacpp) and answers over HTTP on this machine alone.

Started as ``python -m joulery.adapters.engines.remote.llama_worker PARENT OPTIONS``; OPTIONS is a JSON object. It
prints one line of JSON, with ``url`` or ``error``, then serves until its standard input ends. The kernel ends it when
its parent dies first.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from joulery.adapters.engines.embedded.worker import die_with

_CACHE_MIB = 2048
"""Maximum memory for the states of interrupted and earlier prompts."""


def main(arguments: list[str]) -> int:
    """Serve until standard input ends."""
    die_with(int(arguments[0]))
    options = json.loads(arguments[1])
    # llama.cpp prints to standard output: keep that for the one line, give it standard error instead.
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    try:
        server = _serve(options)
        line = {"url": server.listening_address}
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        line = {"error": f"{type(error).__name__}: {error}", "missing": isinstance(error, ImportError)}
    os.write(answer_fd, json.dumps(line).encode() + b"\n")
    os.close(answer_fd)
    if "error" in line:
        return 1
    while os.read(0, 4096):
        pass
    # The engine's own threads hold requests without a waiting client; there is nothing to save.
    os._exit(0)


def _serve(options: dict[str, Any]) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options["path"]
    params.model_alias = {options["name"]}
    params.n_parallel = options["max_num_seqs"]
    params.n_ctx = options["context_tokens"] * options["max_num_seqs"]
    params.kv_unified = False
    params.slot_prompt_similarity = 0.0  # else a slot that shares the system prompt is taken, and its state is lost
    params.cache_ram_mib = _CACHE_MIB
    params.endpoint_metrics = True  # tokens read and generated, for benchmarks
    params.verbosity = -1
    params.n_threads_http = options["max_num_seqs"] + 2
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads = options["threads"]
        threads.poll = 0  # a waiting thread sleeps: what it burns otherwise would be charged to requests
    if not Path(options["path"]).is_file():
        raise FileNotFoundError(f"there is no model {options['path']}")
    return xllamacpp.Server(params)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
