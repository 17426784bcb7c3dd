"""``python -m reproduce muserve``: request order and clocks of mu-Serve (Qiu et al., USENIX ATC 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from joulery.domain.arrays import FloatArray
from joulery.perf.power.clock_curves import V100, ClockModel
from reproduce.claim import FAILS, PARTLY, Claim, json_option, print_claims, verdict
from reproduce.product import EXAMPLES, joulery_json


@click.command("muserve")
@click.option("--requests", metavar="FILE", help="Parquet log of the released lengths (generated lengths without it).")
@click.option("--seeds", type=click.IntRange(1, 100), default=6, help="Seeds of the request orders (6).")
@json_option
def command(requests: str | None, seeds: int, as_json: bool) -> None:
    """Simulate mu-Serve's request order (section 3.3) and clock control (section 3.4).

    Queues are simulated; power is that of an emulated V100.
    """
    orders = joulery_json(
        "simulate", str(EXAMPLES / "ssjf.yaml"), "--seeds", str(seeds), *(("--requests", requests) if requests else ())
    )
    clocks = joulery_json("simulate", str(EXAMPLES / "muserve-8gpu.yaml"), "--seeds", "1")
    found = [*_orders(orders), *_clocks(clocks)]
    lengths = f"lengths: {orders['requests']}, {seeds} seeds"
    notes = (lengths, "Queues are simulated, clocks and power are those of an emulated V100.")
    document = {"paper": "muserve", "quality": "simulated", "ordering": orders, "clocks": clocks}
    print_claims(found, document, as_json=as_json, notes=notes)


def _orders(document: dict[str, Any]) -> list[Claim]:
    rows = {row["policy"]: row for row in document["results"]}
    first = rows["fcfs"]

    def change(policy: str, key: str) -> float:
        return float(rows[policy][key] / first[key] - 1)

    found = []
    for policy, name, paper in (("ssjf", "predicted", -0.41), ("oracle", "known", -0.50)):
        ours = change(policy, "mean_jct_s")
        what = f"mean completion time, shortest job first by {name} length"
        judged = verdict(True) if ours <= paper + 0.03 else PARTLY if ours <= 0.5 * paper else FAILS
        found.append(Claim("3.3", what, _percent(paper), _percent(ours), judged))
    throughput = rows["ssjf"]["throughput_rps"] / first["throughput_rps"]
    graced = f"{_percent(change('ssjf', 'max_wait_s'))}; {_percent(change('ssjf-delayed', 'max_wait_s'))} with a grace"
    return [
        *found,
        Claim("3.3", "aging bounds the longest wait", "no figure", graced, ""),
        Claim("3.3", "throughput", "2.5 to 3.6 times", f"{throughput:.2f} times", verdict(throughput >= 2.5)),
    ]


def _clocks(document: dict[str, Any]) -> list[Claim]:
    rows = document["results"]
    saved = [row["saving_ratio"] for row in rows if row["scheme"] == "predictive"]
    miad = [row["attainment_ratio"] for row in rows if row["scheme"] == "miad"]
    full = [row["attainment_ratio"] for row in rows if row["scheme"] == "fixed"]
    text = " and ".join(f"{ratio:.2f}" for ratio in saved)
    kept = f"{_each(miad)}; {_each(full)}"
    within = min(miad) >= min(full) - 0.005
    return [
        Claim("3.4", "power, times less (predictive governor)", "1.2 to 2.6", text, verdict(min(saved) >= 1.2)),
        Claim("3.4", "SLO attainment under MIAD; at full clock", "kept", kept, verdict(within)),
    ]


def _percent(ratio: float) -> str:
    return f"{100 * ratio:+.1f} %"


def _each(ratios: list[float]) -> str:
    return " and ".join(f"{100 * ratio:.2f} %" for ratio in ratios)


@dataclass(frozen=True, slots=True)
class KernelClockLaw:
    """Power and time of one measured kernel by clock, from its DRAM activity alone (fit to the data of ``V100``).

    Attributes:
        dram_active_ratio: Share of cycles the memory interface is busy, 0 to 1 (DCGM ``DRAMA``).
        knee_mhz: Clock up to which the voltage is flat in this fit.
        flat_voltage_ratio: That voltage, as a ratio of the voltage at the highest clock.
    """

    dram_active_ratio: float
    knee_mhz: float = 955.0
    flat_voltage_ratio: float = 0.819

    def time_ratio(self, clock_mhz: npt.ArrayLike, model: ClockModel = V100) -> FloatArray:
        """Time at each clock, as a ratio of that at the highest clock."""
        clock = np.atleast_1d(np.asarray(clock_mhz, np.float64))
        memory = min(max(-0.08 + 0.93 * self.dram_active_ratio, 0.0), 1.0)
        bandwidth = np.interp(clock, model.bandwidth_mhz, model.bandwidth_ratio)
        return np.asarray((1.0 - memory) * model.max_mhz / clock + memory / bandwidth, np.float64)

    def power_w(self, clock_mhz: npt.ArrayLike, power_at_max_w: float, model: ClockModel = V100) -> FloatArray:
        """Board power at each clock, W, given the power at the highest clock."""
        clock = np.atleast_1d(np.asarray(clock_mhz, np.float64))
        static_w = 21.6 + 16.2 * self.dram_active_ratio
        slope = (1.0 - self.flat_voltage_ratio) / (model.max_mhz - self.knee_mhz)
        voltage = self.flat_voltage_ratio + slope * np.maximum(clock - self.knee_mhz, 0.0)
        return np.asarray(static_w + (power_at_max_w - static_w) * clock / model.max_mhz * voltage**2, np.float64)
