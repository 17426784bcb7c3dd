"""The calibrated stand-in profile of the data set, as instances of the simulator."""

import csv
import json
from dataclasses import dataclass

from joulery.sim.queues.fifo_pull import PullInstance
from tests.data_folder import data_folder


@dataclass(frozen=True)
class Service:
    """One service of synth_v1: its noise and what each (variant code, slice) costs."""

    kappa: float
    size_cv: float
    jitter_s: float
    idle_w_per_gpu: float
    cells: dict[tuple[str, str], PullInstance]
    partitions: dict[str, tuple[str, ...]]

    def instances(self, code: str, models: str, gpus: int = 2) -> list[PullInstance]:
        """The same partition and models on each GPU."""
        slices = self.partitions[code]
        return [self.cells[char, piece] for _ in range(gpus) for char, piece in zip(models, slices, strict=True)]


def rows(path):
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def load_service(name: str) -> Service:
    """Read one service; skips the test where the data set is absent."""
    folder = data_folder("clover")
    model = json.loads((folder / "synth_v1" / "model.json").read_text())
    noise = model["per_service"][name]
    accuracy = {(r["service"], r["char"]): float(r["accuracy_pct"]) / 100 for r in rows(folder / "variants.csv")}
    profile = [r for r in rows(folder / "synth_v1" / "profile.csv") if r["service"] == name]
    whole = {r["char"]: float(r["gpu_s"]) for r in profile if r["slice"] == "7g"}
    cells = {
        (r["char"], r["slice"]): PullInstance(
            name=f"{r['char']} on {r['slice']}",
            host_s=float(r["host_s"]),
            gpu_s=float(r["gpu_s"]),
            floor_s=0.5 * (float(r["host_s"]) + whole[r["char"]]),
            dynamic_j=float(r["dynamic_energy_j_per_request"]),
            accuracy_ratio=accuracy[name, r["char"]],
        )
        for r in profile
    }
    partitions = {
        r["code"]: tuple(r["slices_in_creation_order"].split()) for r in rows(folder / "mig_a100_partitions.csv")
    }
    return Service(noise["kappa"], noise["cv"], noise["sd_s"], model["p_idle_w_per_gpu"], cells, partitions)
