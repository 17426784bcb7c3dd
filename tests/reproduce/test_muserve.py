"""μ-Serve: published kernels against the law that reproduces them."""

import csv
from collections import defaultdict

import numpy as np

from reproduce.muserve import KernelClockLaw
from tests.data_folder import data_folder


def test_measured_kernels_at_other_clocks() -> None:
    rows = defaultdict(dict)
    with (data_folder("muserve") / "v100_dvfs_measured.csv").open() as handle:
        for row in csv.DictReader(handle):
            rows[row["kernel_id"]][float(row["sm_mhz"])] = row
    power_errors, time_errors = [], []
    for clocks in rows.values():
        top = clocks[1380.0]
        law = KernelClockLaw(float(top["DRAMA"]))
        for clock_mhz, row in clocks.items():
            if clock_mhz in {405.0, 1380.0}:  # "405" really ran near 217 MHz
                continue
            power = float(law.power_w(clock_mhz, float(top["power_w"]))[0])
            power_errors.append(abs(power / float(row["power_w"]) - 1))
            measured = float(row["time_ms_per_kernel"]) / float(top["time_ms_per_kernel"])
            time_errors.append(abs(float(law.time_ratio(clock_mhz)[0]) / measured - 1))
    assert np.mean(power_errors) <= 0.06
    assert np.mean(time_errors) <= 0.08
