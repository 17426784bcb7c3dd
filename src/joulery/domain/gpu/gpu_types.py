"""GPU types by name: memory, bandwidth, arithmetic, board power and clocks, each with its source.

Every figure is published by a manufacturer (dense arithmetic, no sparsity; bytes of 10^9 as on the data sheet for
memory and bandwidth) or comes from a named measurement. An unpublished figure is None: *unknown*, never zero.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from joulery.domain.errors import ConfigError
from joulery.domain.gpu.mig import MigMenu, menu_for

GB = 10**9
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuTypeFacts:
    """Published facts of a GPU type.

    Attributes:
        name: Name in this catalog, such as ``A100-80GB``.
        vendor: NVIDIA or AMD.
        form: Board or module.
        memory_bytes: Memory of the board.
        bandwidth_bytes_s: Peak bandwidth of that memory, bytes/s.
        flops: Dense peak by precision (``fp32``, ``tf32``, ``bf16``, ``fp8``, ``int8``, ``fp4``), operations/s; a
            precision that the hardware lacks has no entry.
        tdp_w: Board power limit as shipped, W.
        max_mhz: Highest SM (or engine) clock, MHz; None where unknown.
        min_mhz: Lowest clock that can be set, MHz; None where unknown.
        idle_w: Power of an idle board, W; None where unknown.
        source: Where memory, bandwidth, arithmetic, power and clock come from.
        idle_source: Where ``idle_w`` comes from; empty where unknown.
        aliases: Other names of the type.
    """

    name: str
    vendor: str
    form: str
    memory_bytes: float
    bandwidth_bytes_s: float
    flops: Mapping[str, float]
    tdp_w: float
    max_mhz: float | None
    source: str
    min_mhz: float | None = None
    idle_w: float | None = None
    idle_source: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def mig(self) -> MigMenu | None:
        """MIG menu of the type; None where it cannot be partitioned, or where that is unknown."""
        return menu_for(self.name)

    def peak_flops(self, precision: str) -> float:
        """Dense peak at a precision, operations/s: that of the next wider one where the hardware lacks it."""
        for name in _WIDER[_WIDER.index(precision) :] if precision in _WIDER else ("bf16", "fp32"):
            if name in self.flops:
                return self.flops[name]
        return self.flops["fp32"]


_WIDER = ("fp4", "fp8", "bf16", "tf32", "fp32")
"""Precisions from the narrowest: arithmetic that the hardware lacks runs at the next one."""


def _teraflops(**tera: float) -> Mapping[str, float]:
    return MappingProxyType({name: value * 1e12 for name, value in tera.items()})


V100 = GpuTypeFacts(
    *("V100", "NVIDIA", "SXM2, 16 GB", 16 * GIB, 900e9, _teraflops(fp32=15.7, bf16=125), 300.0, 1530.0),
    source="NVIDIA V100 data sheet (SXM2; bf16 stands for FP16, BF16 is not in the hardware)",
    min_mhz=200.0,
    idle_w=53.5,
    idle_source="Xu et al., iGniter, TPDS 34(3), section 5.1 (p3.2xlarge, with a CUDA context)",
    aliases=("V100-SXM2-16GB",),
)
T4 = GpuTypeFacts(
    *("T4", "NVIDIA", "PCIe, 16 GB", 16 * GB, 320e9, _teraflops(fp32=8.1, bf16=65, int8=130), 70.0, 1590.0),
    source="NVIDIA T4 data sheet (bf16 stands for FP16, BF16 is not in the hardware)",
    aliases=("Tesla-T4",),
)
A10 = GpuTypeFacts(
    "A10",
    *("NVIDIA", "PCIe, 24 GB", 24 * GB, 600e9, _teraflops(fp32=31.2, tf32=62.5, bf16=125, int8=250), 150.0, 1695.0),
    source="NVIDIA A10 data sheet",
    aliases=("A10G",),
)
_A100 = _teraflops(fp32=19.5, tf32=156, bf16=312, int8=624)
A100_40GB = GpuTypeFacts(
    *("A100-40GB", "NVIDIA", "SXM4, 40 GB", 40 * GIB, 1555e9, _A100, 400.0, 1410.0),
    source="NVIDIA A100 data sheet (SXM4, 40 GB)",
    min_mhz=210.0,
    aliases=("A100-SXM4-40GB",),
)
A100_80GB = GpuTypeFacts(
    *("A100-80GB", "NVIDIA", "SXM4, 80 GB", 80 * GIB, 2039e9, _A100, 400.0, 1410.0),
    source="NVIDIA A100 data sheet (SXM4, 80 GB)",
    min_mhz=210.0,
    aliases=("A100-SXM4-80GB", "A100", "a100_sxm"),
)
L4 = GpuTypeFacts(
    *("L4", "NVIDIA", "PCIe, 24 GB", 24 * GB, 300e9),
    *(_teraflops(fp32=30.3, tf32=60, bf16=121, fp8=242.5, int8=242.5), 72.0, 2040.0),
    source="NVIDIA L4 data sheet (published with sparsity; halved here)",
)
L40S = GpuTypeFacts(
    *("L40S", "NVIDIA", "PCIe, 48 GB", 48 * GB, 864e9),
    *(_teraflops(fp32=91.6, tf32=183, bf16=362.05, fp8=733, int8=733), 350.0, 2520.0),
    source="NVIDIA L40S data sheet",
)
_HOPPER = _teraflops(fp32=67, tf32=494.7, bf16=989.4, fp8=1978.9, int8=1978.9)
H100 = GpuTypeFacts(
    *("H100-80GB", "NVIDIA", "SXM5, 80 GB", 80 * GIB, 3350e9, _HOPPER, 700.0, 1980.0),
    source="NVIDIA H100 data sheet (SXM5, 80 GB; published with sparsity, halved here)",
    min_mhz=210.0,
    aliases=("H100", "H100-SXM", "H100-SXM5-80GB", "H100-80GB-HBM3"),
)
H200 = GpuTypeFacts(
    *("H200-141GB", "NVIDIA", "SXM, 141 GB", 141 * GB, 4800e9, _HOPPER, 700.0, 1980.0),
    source="NVIDIA H200 data sheet (SXM; published with sparsity, halved here)",
    aliases=("H200", "H200-SXM"),
)
B200 = GpuTypeFacts(
    *("B200-180GB", "NVIDIA", "SXM, 180 GB", 180 * GB, 8000e9),
    *(_teraflops(fp32=80, tf32=1100, bf16=2250, fp8=4500, int8=4500, fp4=9000), 1000.0, None),
    source="NVIDIA HGX B200 at 1,000 W (NVIDIA Blackwell architecture brief, dense); highest clock not published",
    aliases=("B200", "B200-SXM"),
)
B300 = GpuTypeFacts(
    *("B300-288GB", "NVIDIA", "SXM, 288 GB", 288 * GB, 8000e9),
    *(_teraflops(fp32=75, tf32=1100, bf16=2250, fp8=4500, fp4=13500), 1100.0, None),
    source="NVIDIA HGX B300 product page (dense); highest clock not published",
    aliases=("B300", "B300-SXM"),
)
GB200 = GpuTypeFacts(
    *("GB200", "NVIDIA", "one GPU of an NVL72, 186 GB", 186 * GB, 8000e9),
    *(_teraflops(fp32=80, tf32=1250, bf16=2500, fp8=5000, int8=5000, fp4=10000), 1200.0, None),
    source="NVIDIA GB200 NVL72 data sheet (a 72nd of the rack, dense); highest clock not published",
)
MI250X = GpuTypeFacts(
    *("MI250X", "AMD", "OAM, 128 GB, two dies", 128 * GB, 3276.8e9),
    *(_teraflops(fp32=95.7, bf16=383, int8=383), 560.0, 1700.0),
    source="AMD Instinct MI250X data sheet (matrix arithmetic of both dies; peak board power)",
    aliases=("AMD-Instinct-MI250X",),
)
MI300X = GpuTypeFacts(
    *("MI300X", "AMD", "OAM, 192 GB", 192 * GB, 5300e9),
    *(_teraflops(fp32=163.4, tf32=653.7, bf16=1307.4, fp8=2614.9, int8=2614.9), 750.0, 2100.0),
    source="AMD Instinct MI300X data sheet (matrix arithmetic, dense; peak board power)",
    aliases=("AMD-Instinct-MI300X",),
)
GPU_TYPES = (
    *(V100, T4, A10, A100_40GB, A100_80GB, L4, L40S, H100, H200, B200, B300, GB200),
    *(MI250X, MI300X),
)
"""Every GPU type known here, oldest first within a manufacturer."""


def gpu_facts(name: str) -> GpuTypeFacts:
    """Find a GPU type by a driver's, cloud's or benchmark's name: ``NVIDIA H100 80GB HBM3``, ``h100_sxm``, ``H100``.

    Raises:
        ConfigError: The catalog has no GPU type of that name; the hint names the nearest ones.
    """
    wanted = _plain(name)
    for facts in GPU_TYPES:
        if wanted in {_plain(each) for each in (facts.name, *facts.aliases)}:
            return facts
    nearest = difflib.get_close_matches(wanted, [_plain(facts.name) for facts in GPU_TYPES], n=3, cutoff=0.5)
    offered = [facts.name for facts in GPU_TYPES if _plain(facts.name) in nearest]
    raise ConfigError(
        f"the catalog has no GPU type {name!r}",
        got=name,
        expected=", ".join(facts.name for facts in GPU_TYPES),
        hint=f"did you mean {' or '.join(offered)}?" if offered else "name one of the catalog's GPU types",
    )


def _plain(name: str) -> str:
    """A name without its manufacturer, case and punctuation."""
    return re.sub(r"nvidia|amdinstinct|instinct|[^a-z0-9]", "", re.sub(r"[^a-z0-9]", "", name.lower()))
