"""GPUs in Slurm's GRES and TRES strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.adapters.clusters.tres import parse_gpus


@pytest.mark.parametrize(
    ("text", "total", "types"),
    [
        # requests: sbatch --gres and --gpus, squeue's tres-per-* of 20.11 to 25.05
        ("gpu", 1, {}),
        ("gpu:2", 2, {}),
        ("gres:gpu", 1, {}),
        ("gres:gpu:2", 2, {}),
        ("gres/gpu:3", 3, {}),
        ("gres/gpu=8", 8, {}),
        ("gres:gpu:a100:4", 4, {"a100": 4}),
        ("gpu:a100", 1, {"a100": 1}),
        ("gres:gpu:3090:2", 2, {"3090": 2}),
        ("gpu:2080ti", 1, {"2080ti": 1}),
        ("gpu:2080ti:4", 4, {"2080ti": 4}),
        ("gpu:1g.10gb:7", 7, {"1g.10gb": 7}),
        ("gpu:1g.10gb", 1, {"1g.10gb": 1}),
        ("gres/gpu:h100_80gb_hbm3:8", 8, {"h100_80gb_hbm3": 8}),
        ("gres/gpu:nvidia_a100-sxm4-80gb=8", 8, {"nvidia_a100-sxm4-80gb": 8}),
        ("gres:gpu:2,gres:mps:100", 2, {}),
        ("gpu:a:1,gpu:b:2", 3, {"a": 1, "b": 2}),
        ("gpu:1K", 1024, {}),
        # nodes: sinfo -O gres and gresused
        ("gpu:fake:2", 2, {"fake": 2}),
        ("gpu:a100:4(S:0-1),mps:100", 4, {"a100": 4}),
        ("gpu:a100:4(S:0-1,3),shard:16(S:0-1)", 4, {"a100": 4}),
        ("gpu:3090:2(IDX:0-1)", 2, {"3090": 2}),
        ("gpu:3090:0(IDX:N/A)", 0, {"3090": 0}),
        ("gpu:(null):2(IDX:0,3)", 2, {}),
        ("gpu:tesla:no_consume:2", 2, {"tesla": 2}),
        # totals: CfgTRES, AllocTRES, sacct
        ("cpu=64,mem=500G,node=1,billing=64,gres/gpu=4,gres/gpu:a100=4", 4, {"a100": 4}),
        ("billing=8,cpu=8,gres/gpu:1g.10gb=2,gres/gpu:3g.40gb=1,gres/gpu=3,mem=1M", 3, {"1g.10gb": 2, "3g.40gb": 1}),
        ("cpu=4,gres/gpu:v100=2,mem=8G", 2, {"v100": 2}),
        ("cpu=4,gres/gpumem=16G,gres/gpuutil=80,gres/gpu=1", 1, {}),
        # none
        ("", 0, {}),
        ("(null)", 0, {}),
        ("N/A", 0, {}),
        ("gres:mps:100,license:gpu_tool:3", 0, {}),
        ("shard:8", 0, {}),
    ],
)
def test_real_strings(text: str, total: int, types: dict[str, int]) -> None:
    found = parse_gpus(text)
    assert (found.total, dict(found.by_type)) == (total, types)


TYPES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True).filter(
    lambda text: not text.rstrip("kmgtpKMGTP").isdigit() and text != "no_consume"
)
COUNTS = st.integers(0, 4096)
SUFFIXES = st.sampled_from(["", "(S:0-1)", "(S:0,2-3)", "(IDX:0-7)", "(IDX:N/A)", "(CNT:2)"])
OTHERS = st.sampled_from(["mps:100", "gres:mps:100(S:0)", "shard:8", "license:x:2", "craynetwork:4"])


@given(TYPES, COUNTS, SUFFIXES, st.sampled_from(["", "gres:", "gres/"]), st.lists(OTHERS, max_size=3))
def test_a_type_and_a_count_in_any_list(kind: str, count: int, suffix: str, prefix: str, others: list[str]) -> None:
    text = ",".join([*others[:1], f"{prefix}gpu:{kind}:{count}{suffix}", *others[1:]])
    found = parse_gpus(text)
    assert (found.total, found.by_type, found.type) == (count, ((kind, count),), kind)


@given(st.dictionaries(TYPES, COUNTS, min_size=1, max_size=4), st.integers(1, 64), st.randoms())
def test_a_total_beside_its_types_counts_once(types: dict[str, int], cpus: int, order) -> None:
    entries = [f"cpu={cpus}", f"gres/gpu={sum(types.values())}", *(f"gres/gpu:{k}={n}" for k, n in types.items())]
    order.shuffle(entries)
    found = parse_gpus(",".join(entries))
    assert found.total == sum(types.values()) and dict(found.by_type) == types


@given(TYPES)
def test_a_type_alone_is_one_gpu(kind: str) -> None:
    assert parse_gpus(f"gpu:{kind}").total == 1
    assert parse_gpus(f"gres:gpu:{kind}").type == kind


@given(st.text(max_size=60))
def test_any_text_is_some_count_and_never_an_error(text: str) -> None:
    assert parse_gpus(text).total >= 0
