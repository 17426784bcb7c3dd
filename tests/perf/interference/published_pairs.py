"""The published solo and co-location latencies as the calibration takes them (data/igniter)."""

import csv

from joulery.perf.interference.calibration import PairLatency, SoloLatency
from tests.data_folder import data_folder


def rows(name):
    with (data_folder("igniter") / name).open() as file:
        return list(csv.DictReader(file))


def published_solo():
    return [
        SoloLatency(row["model"], int(row["batch"]), float(row["r_pct"]), float(row["latency_ms"]))
        for row in rows("solo_grid_v100.csv")
    ]


def published_pairs(name="pair_colocation_v100.csv"):
    return [
        PairLatency(
            row["model1"],
            int(row["batch1"]),
            float(row["r1_pct"]),
            float(row["latency1_ms"]),
            row["model2"],
            int(row["batch2"]),
            float(row["r2_pct"]),
            float(row["latency2_ms"]),
        )
        for row in rows(name)
    ]
