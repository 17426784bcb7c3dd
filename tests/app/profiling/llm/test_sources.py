"""Readers of measured runs: true-to-form samples of each tool, and what is wrong with bad ones."""

import json

import pytest

from joulery.app.profiling.llm.sources import read_runs
from joulery.app.profiling.llm.tables import Given
from joulery.domain.errors import DataError

OWN = "model_id,gpu_model,num_gpus,weight_precision,avg_batch_size,output_throughput_tokens_per_sec"
VLLM = {
    "date": "20261120-101500",
    "endpoint_type": "vllm",
    "label": None,
    "model_id": "meta-llama/Llama-3.1-8B-Instruct",
    "tokenizer_id": "meta-llama/Llama-3.1-8B-Instruct",
    "num_prompts": 1000,
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": 64,
    "duration": 80.0,
    "completed": 1000,
    "total_input_tokens": 512000,
    "total_output_tokens": 256000,
    "request_throughput": 12.5,
    "request_goodput": None,
    "output_throughput": 3200.0,
    "total_token_throughput": 9600.0,
    "mean_ttft_ms": 120.0,
    "median_ttft_ms": 90.0,
    "std_ttft_ms": 60.0,
    "p99_ttft_ms": 400.0,
    "mean_tpot_ms": 19.0,
    "median_tpot_ms": 18.8,
    "p99_tpot_ms": 24.0,
    "mean_itl_ms": 19.0,
    "median_itl_ms": 16.0,
    "p99_itl_ms": 55.0,
}
AIPERF = {
    "request_throughput": {"unit": "requests/sec", "avg": 2.0},
    "request_latency": {"unit": "ms", "avg": 5000.0, "p50": 4900.0, "p99": 6000.0},
    "request_count": {"unit": "requests", "avg": 200},
    "time_to_first_token": {"unit": "ms", "avg": 80.0, "p50": 75.0, "p99": 130.0},
    "inter_token_latency": {"unit": "ms", "avg": 12.0, "p50": 11.0, "p99": 21.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 800.0},
    "output_sequence_length": {"unit": "tokens", "avg": 400.0},
    "input_sequence_length": {"unit": "tokens", "avg": 550.0},
    "input_config": {
        "endpoint": {"model_names": ["Qwen/Qwen3-8B"], "type": "chat", "streaming": True},
        "loadgen": {"concurrency": 10, "request_count": 200},
    },
    "telemetry_data": {
        "endpoints": {
            "localhost:9400": {
                "gpus": {
                    f"gpu_{i}": {
                        "gpu_name": "NVIDIA H100 80GB HBM3",
                        "metrics": {"gpu_power_usage": {"unit": "W", "avg": 450.0 + i}},
                    }
                    for i in range(2)
                }
            }
        }
    },
}
ANALYZER = (
    "Model,Batch,Concurrency,Model Config Path,Instance Group,Satisfies Constraints,Throughput (infer/sec),"
    "p99 Latency (ms),Avg Time To First Token (ms),p99 Inter Token Latency (ms),Output Token Throughput (tokens/sec),"
    "GPU Power Usage (W)\n"
    "llama-8b,1,8,llama-8b_config_0,1:GPU,Yes,2.1,3900,60,14,840,420\n"
    "llama-8b,1,64,llama-8b_config_0,1:GPU,Yes,9.5,7100,180,32,3800,610\n"
)
H100 = Given(gpu="H100", precision="bf16")


def kept(folder, text, name="runs.csv"):
    file = folder / name
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    return file


def test_ones_own_table(tmp_path):
    table = f"{OWN},energy_per_token_joules,p99_itl_ms,task\nQwen/Qwen3-8B,H100,1,bf16,16,1000,0.5,20,chat\n"
    (run,) = read_runs([kept(tmp_path, table)])
    assert (run.power_w, run.itl_p99_s, run.point.task, run.point.precision) == (500.0, 0.02, "chat", "bfloat16")
    assert run.energy_per_token_j == 0.5
    assert run.ttft_s is None


def test_a_result_of_vllm(tmp_path):
    (run,) = read_runs([kept(tmp_path, VLLM, "r.json")], H100)
    assert run.throughput_tps == 3200.0
    # Little: 12.5 requests a second times 0.12 s + 255 tokens of 19 ms.
    assert run.point.batch == pytest.approx(12.5 * (0.120 + 255 * 0.019))
    assert (run.point.input_tokens, run.point.output_tokens, run.point.max_num_seqs) == (512, 256, 64)
    assert (run.itl_p50_s, run.itl_p99_s, run.ttft_s, run.tpot_s) == (0.016, 0.055, 0.12, 0.019)
    assert run.power_w is None


def test_a_result_of_vllm_with_its_metadata_and_several_on_lines(tmp_path):
    said = {**VLLM, "gpu_model": "B200", "num_gpus": "2", "weight_precision": "fp8", "avg_power_watts": 900.0}
    file = kept(tmp_path, "\n".join(json.dumps(each) for each in (said, said)), "r.jsonl")
    runs = read_runs([file])
    assert [(run.point.gpu.name, run.point.num_gpus, run.point.precision) for run in runs] == [
        ("B200-180GB", 2, "fp8")
    ] * 2
    assert runs[0].energy_per_token_j == 900 / 3200


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_result_of_aiperf_with_gpu_telemetry(tmp_path, wrapped):
    document = AIPERF
    if wrapped:
        records = {key: value for key, value in AIPERF.items() if key not in ("input_config", "telemetry_data")}
        document = {**{key: AIPERF[key] for key in ("input_config", "telemetry_data")}, "records": records}
    (run,) = read_runs([kept(tmp_path, document, "profile_export_aiperf.json")])
    assert (run.point.model_id, run.point.num_gpus, run.point.gpu.name) == ("Qwen/Qwen3-8B", 2, "H100-80GB")
    assert (run.throughput_tps, run.power_w, run.point.batch) == (800.0, 901.0, 10.0)
    assert (run.itl_p50_s, run.itl_p99_s, run.ttft_s) == (0.011, 0.021, 0.08)


def test_a_table_of_model_analyzer(tmp_path):
    runs = read_runs([kept(tmp_path, ANALYZER)], Given(gpu="H100", model="meta-llama/Llama-3.1-8B-Instruct"))
    assert [(run.point.batch, run.throughput_tps, run.power_w, run.itl_p99_s) for run in runs] == [
        (8, 840, 420, 0.014),
        (64, 3800, 610, 0.032),
    ]


ROW = "Qwen/Qwen3-8B,H100,1,bf16,16,1000"


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("", "empty", "vLLM"),
        (OWN, "no rows", "header only"),
        ("a,b\n1,2\n", "no known form", "vLLM"),
        (f"{OWN.replace('gpu_model', 'gpu_modle')}\n{ROW}\n", "no column gpu_model", "gpu_modle"),
        (f"{OWN}\n{ROW.replace('1000', 'nan')}\n", "output_throughput_tokens_per_sec is 'nan'", ""),
        (f"{OWN}\n{ROW.replace(',16,', ',-16,')}\n", "avg_batch_size is '-16'", ""),
        (f"{OWN}\n{ROW.replace(',16,', ',,')}\n", "max_num_seqs is empty", ""),
        (f"{OWN}\n{ROW.replace('H100,1', 'H100,1.5')}\n", "expected a whole number", ""),
        (f"{OWN}\n{ROW.replace('H100', 'H1000')}\n", "no GPU type 'H1000'", "H100-80GB"),
        (
            f"{OWN}\n{ROW.replace('Qwen/Qwen3-8B', 'gpt-oss')}\n",
            "does not state its number of parameters",
            "gpt-oss-20b",
        ),
        (f"{OWN}\n{ROW.replace('bf16', 'bf61')}\n", "no such precision", "bf16"),
        (ANALYZER.replace("Output Token Throughput (tokens/sec)", "x"), "no output tokens a second", "model_type"),
    ],
)
def test_a_bad_table_is_one_error_that_says_where_and_how_to_mend_it(tmp_path, text, says, hint):
    with pytest.raises(DataError) as raised:
        read_runs([kept(tmp_path, text)], Given(gpu="H100") if text.startswith("Model") else None)
    assert says in str(raised.value)
    assert hint in raised.value.hint
    assert "runs.csv" in str(raised.value)


@pytest.mark.parametrize(
    ("document", "given", "says"),
    [
        ({}, H100, "no known form"),
        ([], H100, "no results"),
        ("{", H100, "not JSON"),
        (VLLM, None, "the GPU type"),
        (VLLM, Given(gpu="H10O"), "no GPU type"),
        ({**VLLM, "output_throughput": -1.0}, H100, "output_throughput is -1.0"),
        ({**VLLM, "mean_ttft_ms": float("nan")}, H100, "mean_ttft_ms is nan"),
        ({**VLLM, "model_id": None}, H100, "no model_id"),
        ({**AIPERF, "input_config": {}}, H100, "no model name"),
        ({**AIPERF, "output_token_throughput": {"avg": 0}}, H100, "avg is 0"),
    ],
)
def test_a_bad_result_is_one_error(tmp_path, document, given, says):
    with pytest.raises(DataError, match=says):
        read_runs([kept(tmp_path, document, "r.json")], given)


def test_a_file_that_is_not_there(tmp_path):
    for name in ("none.csv", "none.json"):
        with pytest.raises(DataError, match="cannot be read"):
            read_runs([tmp_path / name])
