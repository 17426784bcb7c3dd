"""Metrics pages as inference engines and NVIDIA's DCGM exporter print them, and a server that shows one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def vllm(prompt=1200.0, output=340.0, answered=7.0, running=0.0, model="Qwen/Qwen3-0.6B", aborted=2.0):
    """vLLM 0.11, V1 engine (abridged: two histograms stand for the others)."""
    who = f'engine="0",model_name="{model}"'
    return f"""\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{{generation="0"}} 11543.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{who}}} {running}
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{{who}}} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{{who}}} 0.01
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{{who}}} {prompt}
# HELP vllm:prompt_tokens_created Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_created gauge
vllm:prompt_tokens_created{{{who}}} 1.7630123456789e+09
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{{who}}} {output}
# HELP vllm:request_success_total Count of successfully processed requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="{model}"}} {answered - 1}
vllm:request_success_total{{engine="0",finished_reason="length",model_name="{model}"}} 1.0
vllm:request_success_total{{engine="0",finished_reason="abort",model_name="{model}"}} {aborted}
vllm:request_success_total{{engine="0",finished_reason="error",model_name="{model}"}} 0.0
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.001",model_name="{model}"}} 0.0
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="{model}"}} {answered}
vllm:time_to_first_token_seconds_count{{{who}}} {answered}
vllm:time_to_first_token_seconds_sum{{{who}}} 0.8
"""


SGLANG = """\
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="meta-llama/Llama-3.1-8B-Instruct"} 8.128902e+06
# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="meta-llama/Llama-3.1-8B-Instruct"} 7.557572e+06
# HELP sglang:num_requests_total Number of requests processed.
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{model_name="meta-llama/Llama-3.1-8B-Instruct"} 11008.0
# HELP sglang:token_usage The token usage
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.28
# HELP sglang:num_running_reqs The number of running requests
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="meta-llama/Llama-3.1-8B-Instruct",tp_rank="0"} 162.0
# HELP sglang:num_queue_reqs The number of requests in the waiting queue
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="meta-llama/Llama-3.1-8B-Instruct",tp_rank="0"} 2826.0
"""

TRITON = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="resnet50",version="1"} 120.000000
nv_inference_request_success{model="bert",version="2"} 30.000000
# HELP nv_inference_request_failure Number of failed inference requests, all batch sizes
# TYPE nv_inference_request_failure counter
nv_inference_request_failure{model="resnet50",reason="OTHER",version="1"} 0.000000
# HELP nv_inference_count Number of inferences performed (does not include cached requests)
# TYPE nv_inference_count counter
nv_inference_count{model="resnet50",version="1"} 480.000000
# HELP nv_inference_compute_infer_duration_us Cumulative compute inference duration in microseconds
# TYPE nv_inference_compute_infer_duration_us counter
nv_inference_compute_infer_duration_us{model="resnet50",version="1"} 3000000.000000
nv_inference_compute_infer_duration_us{model="bert",version="2"} 1000000.000000
# HELP nv_inference_pending_request_count Instantaneous number of pending requests awaiting execution per-model.
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="resnet50",version="1"} 0.000000
nv_inference_pending_request_count{model="bert",version="2"} 0.000000
# HELP nv_gpu_power_usage GPU power usage in watts
# TYPE nv_gpu_power_usage gauge
nv_gpu_power_usage{gpu_uuid="GPU-0e9fdafb-5adb-91cd-26a8-308d34357efc"} 55.137000
# HELP nv_energy_consumption GPU energy consumption in joules since the Triton Server started
# TYPE nv_energy_consumption counter
nv_energy_consumption{gpu_uuid="GPU-0e9fdafb-5adb-91cd-26a8-308d34357efc"} 9380.053000
"""

TRITON_LLM = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="tensorrt_llm",version="1"} 40.000000
# HELP nv_trt_llm_request_metrics TRT LLM request metrics
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 1.000000
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512.000000
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 3.000000
# HELP nv_llm_output_token_len TRT LLM response metrics
# TYPE nv_llm_output_token_len histogram
nv_llm_output_token_len_count{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1"} 40
nv_llm_output_token_len_sum{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1"} 5120
nv_llm_output_token_len_bucket{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1",le="+Inf"} 40
# HELP nv_llm_input_token_len TRT LLM response metrics
# TYPE nv_llm_input_token_len histogram
nv_llm_input_token_len_sum{model="tensorrt_llm",response_metric_type="total_input_tokens",version="1"} 20480
"""

TENSORRT_LLM = """\
# HELP trtllm_request_success_total Count of successfully processed requests.
# TYPE trtllm_request_success_total counter
trtllm_request_success_total{model_name="Qwen/Qwen3-0.6B",engine_type="trtllm",finished_reason="stop"} 150.0
trtllm_request_success_total{model_name="Qwen/Qwen3-0.6B",engine_type="trtllm",finished_reason="length"} 5.0
# HELP trtllm_prompt_tokens_total Number of prompt tokens.
# TYPE trtllm_prompt_tokens_total counter
trtllm_prompt_tokens_total{model_name="Qwen/Qwen3-0.6B",engine_type="trtllm"} 90000.0
# HELP trtllm_generation_tokens_total Number of generated tokens.
# TYPE trtllm_generation_tokens_total counter
trtllm_generation_tokens_total{model_name="Qwen/Qwen3-0.6B",engine_type="trtllm"} 31000.0
# HELP trtllm_kv_cache_utilization KV cache utilization
# TYPE trtllm_kv_cache_utilization gauge
trtllm_kv_cache_utilization{model_name="Qwen/Qwen3-0.6B",engine_type="trtllm"} 0.05
"""

LLAMA_CPP = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 800
# HELP llamacpp:tokens_predicted_total Number of generation tokens processed.
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 39080
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# HELP llamacpp:requests_deferred Number of requests deferred.
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 0
"""


def dcgm(energies_mj=(48287135,), power_w=14.512):
    """dcgm-exporter 4; board 0 has two MIG instances, each with the whole board's values."""
    board = 'gpu="{0}",UUID="GPU-{0}",pci_bus_id="00000000:00:1E.0",device="nvidia{0}",modelName="Tesla T4"'
    lines = ["# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).", "# TYPE DCGM_FI_DEV_POWER_USAGE gauge"]
    lines += [f"DCGM_FI_DEV_POWER_USAGE{{{board.format(gpu)}}} {power_w}" for gpu in range(len(energies_mj))]
    lines += [
        "# HELP DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION Total energy consumption since boot (in mJ).",
        "# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter",
    ]
    for gpu, energy_mj in enumerate(energies_mj):
        if energy_mj is not None:
            for instance in (3, 5) if gpu == 0 else (None,):
                mig = f',GPU_I_PROFILE="2g.20gb",GPU_I_ID="{instance}"' if instance else ""
                name = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
                lines.append(f'{name}{{{board.format(gpu)}{mig},Hostname="node-1"}} {energy_mj}')
    return "\n".join([*lines, ""])


class Page:
    """A page that a server shows.

    Attributes:
        text: The page; empty for an answer of 503.
        posts: Bodies that were posted.
        path: Where it is.
        url: Address of the server, once it runs.
    """

    def __init__(self, text: str, path: str = "/metrics") -> None:
        self.text, self.path, self.url = text, path, ""
        self.posts: list[bytes] = []


@contextmanager
def shown(page: Page) -> Iterator[Page]:
    """A server of the page on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            found = self.path == page.path and page.text
            self.reply(200 if found else 503, page.text.encode() if found else b"")

        def do_POST(self):
            page.posts.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(200 if page.text else 503, b"{}")

        def reply(self, status, body):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    page.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield page
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
