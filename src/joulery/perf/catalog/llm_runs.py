"""Measured runs of three language models on H100 and B200, for plans of sites that name no runs of their own.

Source: The ML.ENERGY Benchmark v3 (Chung et al., NeurIPS Datasets and Benchmarks 2025), leaderboard data of
2026-02-27, Apache-2.0; task lm-arena-chat, vLLM, BF16 weights, power of all GPUs of the replica without the host.
Rounded to four digits. `joulery profile --from` and `plan.language.runs` read the whole table, or your own.
"""

from __future__ import annotations

from joulery.perf.llm.runs import LlmRun, llm_point

SOURCE = "The ML.ENERGY Benchmark v3 (NeurIPS D&B 2025, Apache-2.0), lm-arena-chat, vLLM"
_MEASURED = {
    ("Qwen/Qwen3-32B", "B200", 1): (
        (8, 7.973, 645.7, 859.6, 556.4, 14.13, 27.1),
        (16, 15.97, 628.7, 836.4, 1025, 15.11, 31.63),
        (32, 31.9, 633.7, 848.8, 1793, 16.81, 40.08),
        (64, 63.91, 630.9, 945.4, 3024, 19.58, 48.93),
        (96, 95.8, 628.6, 970.5, 4102, 21.34, 50.92),
        (128, 127.8, 634.1, 975.6, 4676, 24.72, 65.61),
        (256, 255.6, 627.5, 971.3, 6444, 36.02, 97.61),
        (384, 383.3, 635, 971.7, 6912, 50.25, 131.6),
        (512, 455.7, 627.4, 968.9, 6426, 57.58, 250),
    ),
    ("Qwen/Qwen3-32B", "H100", 1): ((32, 29.26, 629.3, 599.4, 960.5, 28.81, 67.19),),
    ("Qwen/Qwen3-32B", "H100", 2): (
        (32, 31.94, 641.7, 944.5, 1706, 17.91, 33.89),
        (64, 63.86, 635.1, 974.1, 2654, 22.45, 65),
        (96, 95.81, 634.9, 1022, 3356, 26.1, 78.12),
        (256, 255.6, 634.5, 1178, 5155, 44.45, 148.2),
        (384, 340.2, 627.6, 1180, 5071, 54.9, 240.2),
    ),
    ("meta-llama/Llama-3.1-70B-Instruct", "B200", 2): (
        (8, 7.981, 352, 1698, 475.7, 16.36, 22.18),
        (16, 15.94, 359.7, 1733, 910.8, 16.78, 31.26),
        (64, 63.77, 345.7, 1811, 2598, 21.75, 80.06),
        (256, 255.3, 361.1, 1942, 5372, 35.84, 179.9),
        (1536, 1407, 349.5, 1919, 8682, 134.8, 536.4),
        (2048, 2042, 350.8, 1907, 1.011e04, 140.5, 558.6),
    ),
    ("meta-llama/Llama-3.1-70B-Instruct", "H100", 4): (
        (8, 7.987, 350, 1765, 469.7, 16.57, 21.12),
        (32, 31.88, 350.6, 1794, 1487, 20.05, 56.29),
        (64, 63.79, 352, 2002, 2511, 22.43, 90.54),
        (96, 95.73, 357.5, 2102, 3244, 25.36, 114.1),
        (128, 127.6, 358.9, 2184, 3876, 27.87, 121.3),
        (192, 191.6, 357.2, 2293, 4461, 33.7, 161.5),
        (256, 255.3, 349, 2354, 4915, 39.84, 240.4),
        (384, 383, 363.9, 2344, 5319, 55.12, 436.5),
        (768, 766.3, 351.4, 2535, 6507, 103.6, 561.7),
        (1024, 898.5, 350.8, 2548, 6827, 105.6, 592.9),
    ),
    ("meta-llama/Llama-3.1-8B-Instruct", "B200", 1): (
        (8, 7.958, 387.9, 639.4, 1637, 4.574, 14.8),
        (16, 15.9, 409, 666.7, 2751, 5.083, 18.04),
        (32, 31.77, 397.8, 575.6, 3810, 6.345, 25.09),
        (64, 63.8, 389.7, 616.5, 5589, 8.997, 34.19),
        (128, 127.5, 395.6, 449.3, 4570, 26.66, 58.44),
        (256, 255.2, 399.5, 540.2, 7664, 31.69, 65.51),
        (512, 510.6, 396.1, 576.5, 9571, 50.23, 93.56),
        (1024, 1021, 395.6, 599.9, 1.092e04, 87.12, 153.5),
    ),
    ("meta-llama/Llama-3.1-8B-Instruct", "H100", 1): (
        (8, 7.978, 388.7, 486.4, 1070, 7.316, 10.87),
        (32, 31.91, 390.3, 559.7, 3391, 8.907, 18.42),
        (64, 63.92, 395.5, 610.3, 5147, 11.5, 25.68),
        (96, 95.7, 392.8, 644, 6260, 14.08, 35.4),
        (192, 191.7, 396.8, 688.3, 8223, 20.91, 59.02),
        (256, 255.2, 404.2, 690.5, 9010, 26.13, 59.66),
        (512, 510.9, 396.7, 688.3, 9806, 47.41, 106.8),
        (768, 690.9, 397.4, 685.1, 9603, 62.93, 192),
    ),
}
"""By model, GPU type and GPUs of the replica: max_num_seqs, requests in flight, tokens an answer, power in W, output
tokens a second, and the median and 99th percentile of the time between tokens in ms."""


def published_runs() -> tuple[LlmRun, ...]:
    """The published runs as :class:`LlmRun` objects."""
    return tuple(
        LlmRun(
            llm_point(
                model, gpu, gpus, "bfloat16", batch, task="lm-arena-chat", max_num_seqs=limit, output_tokens=answer
            ),
            tps,
            power_w,
            p50_ms / 1e3,
            p99_ms / 1e3,
        )
        for (model, gpu, gpus), rows in _MEASURED.items()
        for limit, batch, answer, power_w, tps, p50_ms, p99_ms in rows
    )
