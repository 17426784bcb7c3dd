"""Models for tests of a whole service: they burn a known number of CPU seconds."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np


class GpuSum:
    """Adds two numbers on a part of a GPU that is not there: as slowly as the part is small, 200 W for a whole one."""

    inputs = (("x", "FP32", (-1, 2)),)
    outputs = (("y", "FP32", (-1,)),)

    def __init__(self, busy_s: float) -> None:
        from tests.fakes.nvml import STATE, NvmlFake

        self.nvml = NvmlFake(file=Path(os.environ[STATE]))
        percent = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        self.board, self.share = (0, float(percent) / 100) if percent else self.instance()
        self.busy_s = busy_s

    def instance(self) -> tuple[int, float]:
        """The board of the instance this process has to use, and its part of the board."""
        nvml, mine = self.nvml, os.environ["CUDA_VISIBLE_DEVICES"]
        for board, facts in enumerate(nvml.boards):
            for index in range(len(facts["instances"])):
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(("gpu", board), index)
                if nvml.nvmlDeviceGetUUID(handle) == mine:
                    return board, int(nvml.nvmlDeviceGetName(handle).rpartition("MIG ")[2][0]) / 7
        raise RuntimeError(f"there is no instance {mine}")

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        time.sleep(self.busy_s / self.share)
        self.nvml.worked(self.board, 200.0 * self.busy_s)
        return {"y": np.sum(inputs["x"], axis=-1)}


class LimitedSum:
    """Adds two numbers on a CPU whose RAPL files are made up: 10 % slower at half its limit, at the limit's power."""

    inputs = (("x", "FP32", (-1, 2)),)
    outputs = (("y", "FP32", (-1,)),)

    def __init__(self, busy_s: float) -> None:
        self.zone, self.busy_s = Path(os.environ["JOULERY_POWERCAP"]) / "intel-rapl:0", busy_s

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        limit_uw = int((self.zone / "constraint_0_power_limit_uw").read_text())
        full_uw = int((self.zone / "constraint_0_max_power_uw").read_text())
        time.sleep(self.busy_s * (1.2 - 0.2 * limit_uw / full_uw))
        counter = self.zone / "energy_uj"
        with counter.open("r+") as file:
            file.write(str(int(counter.read_text()) + int(self.busy_s * limit_uw)))
        return {"y": np.sum(inputs["x"], axis=-1)}


class Sum:
    """Adds two numbers, slowly."""

    inputs = (("x", "FP32", (-1, 2)),)
    outputs = (("y", "FP32", (-1,)),)

    def __init__(self, busy_s: float) -> None:
        self.busy_s = busy_s

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        end_s = time.process_time() + self.busy_s
        while time.process_time() < end_s:
            pass
        return {"y": np.sum(inputs["x"], axis=-1)}


class Double:
    """Doubles what it gets, as tests.fakes.open_inference_server does, with CPU time of this machine."""

    inputs = (("x", "FP32", (-1, 2)),)
    outputs = (("y", "FP32", (-1, 2)),)

    def __init__(self, busy_s: float) -> None:
        self._sum = Sum(busy_s)

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        self._sum(inputs)
        return {"y": 2 * inputs["x"]}
