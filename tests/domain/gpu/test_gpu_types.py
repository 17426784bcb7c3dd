"""The catalog of GPU types: names, sources, and the laws that published figures obey."""

import pytest

from joulery.domain.errors import ConfigError
from joulery.domain.gpu.gpu_types import GPU_TYPES, gpu_facts
from joulery.perf.catalog import clock_models


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("h100_sxm", "H100-80GB"),
        ("B200", "B200-180GB"),
        ("b300_sxm", "B300-288GB"),
        ("gb200", "GB200"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("A100", "A100-80GB"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_gpu_type_is_found_by_the_names_it_goes_by(name, found):
    assert gpu_facts(name).name == found


def test_an_unknown_gpu_type_is_answered_with_the_nearest_ones():
    with pytest.raises(ConfigError) as raised:
        gpu_facts("H1000")
    assert "H100-80GB" in raised.value.hint
    assert "MI300X" in raised.value.expected


@pytest.mark.parametrize("facts", GPU_TYPES, ids=lambda facts: facts.name)
def test_every_fact_has_a_source_and_a_plausible_size(facts):
    assert facts.source
    assert (facts.idle_w is None) == (not facts.idle_source)
    assert 15e9 <= facts.memory_bytes <= 300e9
    assert 0.3e12 <= facts.bandwidth_bytes_s <= 8e12
    # One step of arithmetic a byte is far below any of these boards, a thousand far above.
    assert 50 < facts.flops["bf16"] / facts.bandwidth_bytes_s < 500
    assert facts.flops["fp32"] < facts.flops["bf16"]
    assert 0 < (facts.idle_w or 1.0) < facts.tdp_w <= 1200


def test_names_are_unique():
    names = [name.lower() for facts in GPU_TYPES for name in {facts.name, *facts.aliases}]
    assert len(names) == len(set(names))


def test_arithmetic_that_the_hardware_lacks_runs_at_the_next_wider_precision():
    assert gpu_facts("A100").peak_flops("fp8") == gpu_facts("A100").flops["bf16"]
    assert gpu_facts("H100").peak_flops("fp4") == gpu_facts("H100").flops["fp8"]
    assert gpu_facts("T4").peak_flops("tf32") == gpu_facts("T4").flops["fp32"]


def test_the_menu_of_slices_is_that_of_the_gpu_type():
    cut = {facts.name: facts.mig.gpu for facts in GPU_TYPES if facts.mig is not None}
    assert cut == {name: name for name in ("A100-40GB", "A100-80GB", "H100-80GB", "H200-141GB", "B200-180GB")}


def test_emulated_gpus_take_their_facts_from_the_catalog():
    h100 = clock_models.clock_model("h100")
    assert (h100.cap_w, h100.max_mhz, h100.peak_flops) == (700.0, 1980.0, 67e12)
