"""NVML as the driver behaves: the real module's constants, structures and error classes around invented boards.

Everything that a program under test may call is a method of the same name. State is JSON, in memory or in a file, so
that other processes see the same boards: ``tests/fakes/path/pynvml.py`` puts this in the real module's place for them.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

STATE = "JOULERY_FAKE_NVML"
"""The variable that names the file the fake module keeps its boards in."""


def real_module() -> ModuleType:
    """``nvidia-ml-py`` itself, also where a module of its name hides it."""
    if "_real_pynvml" not in sys.modules:
        file = next(f for f in importlib.metadata.files("nvidia-ml-py") or () if f.name == "pynvml.py").locate()
        spec = importlib.util.spec_from_file_location("_real_pynvml", str(file))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["_real_pynvml"] = module
        spec.loader.exec_module(module)
    return sys.modules["_real_pynvml"]


def as_administrator(monkeypatch: pytest.MonkeyPatch, *, may: bool = True) -> None:
    """Give this process CAP_SYS_ADMIN, as far as the devices see, or take it away."""
    for device in ("nvidia_clock", "nvidia_mig", "power.nvidia_power"):
        monkeypatch.setattr(f"joulery.adapters.devices.{device}.may_administer", lambda: may)


# constant of the profile, its id, name, compute slices, MB, starts, memory slices (nvidia-smi mig -lgip, -lgipp)
_A100_40 = [
    (0, 19, "1g.5gb", 1, 4864, [0, 1, 2, 3, 4, 5, 6], 1),
    (7, 20, "1g.5gb+me", 1, 4864, [0, 1, 2, 3, 4, 5, 6], 1),
    (9, 15, "1g.10gb", 1, 9856, [0, 2, 4, 6], 2),
    (1, 14, "2g.10gb", 2, 9856, [0, 2, 4], 2),
    (2, 9, "3g.20gb", 3, 19968, [0, 4], 4),
    (3, 5, "4g.20gb", 4, 19968, [0], 4),
    (4, 0, "7g.40gb", 7, 40192, [0], 8),
]
_A30 = [
    (0, 14, "1g.6gb", 1, 5952, [0, 1, 2, 3], 1),
    (1, 5, "2g.12gb", 2, 11968, [0, 2], 2),
    (3, 0, "4g.24gb", 4, 24125, [0], 4),
]


def _renamed(names: dict[str, str]) -> list[tuple[Any, ...]]:
    return [(*row[:2], names[row[2]], *row[3:]) for row in _A100_40 if row[2] in names]


MENUS: dict[str, list[tuple[Any, ...]]] = {
    "NVIDIA A100-SXM4-40GB": _A100_40,
    "NVIDIA A30": _A30,
    "NVIDIA H100 80GB HBM3": _renamed(
        {
            "1g.5gb": "1g.10gb",
            "1g.5gb+me": "1g.10gb+me",
            "1g.10gb": "1g.20gb",
            "2g.10gb": "2g.20gb",
            "3g.20gb": "3g.40gb",
            "4g.20gb": "4g.40gb",
            "7g.40gb": "7g.80gb",
        }
    ),
    "NVIDIA H200": _renamed(
        {
            "1g.5gb": "1g.18gb",
            "1g.5gb+me": "1g.18gb+me",
            "1g.10gb": "1g.35gb",
            "2g.10gb": "2g.35gb",
            "3g.20gb": "3g.71gb",
            "4g.20gb": "4g.71gb",
            "7g.40gb": "7g.141gb",
        }
    ),
}
_CLOCKS = {
    "Tesla V100-SXM2-16GB": ([877], list(range(135, 1531, 15))),
    "NVIDIA A100-SXM4-40GB": ([1215], list(range(210, 1411, 15))),
    "NVIDIA A30": ([1215], list(range(210, 1441, 15))),
    "NVIDIA H100 80GB HBM3": ([2619, 1593], list(range(345, 1981, 15))),
    "NVIDIA H200": ([3201, 2619], list(range(345, 1981, 15))),
}
_LIMITS_W = {
    "Tesla V100-SXM2-16GB": (150, 300, 300),
    "NVIDIA A100-SXM4-40GB": (100, 400, 400),
    "NVIDIA A30": (100, 165, 165),
    "NVIDIA H100 80GB HBM3": (200, 700, 700),
    "NVIDIA H200": (200, 700, 700),
}
"""Lowest, highest and default power limit (nvidia-smi -q -d POWER), W."""
_COMPUTE = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}
"""Constant and id of the compute instance profile of so many slices."""


def gpu(name: str = "NVIDIA A100-SXM4-40GB", index: int = 0, **changes: Any) -> dict[str, Any]:
    """A board at rest, not cut."""
    memory, graphics = _CLOCKS[name]
    return {
        "name": name,
        "uuid": f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'{name} {index}')}",
        "memory_mhz": memory,
        "graphics_mhz": graphics,
        "locked": None,
        "running_mhz": graphics[-1],
        "persistence": 1,
        "power_mw": 60_000,
        "busy": 0,
        "demand_mw": 0,
        "limits_mw": [1000 * watts for watts in _LIMITS_W[name][:2]],
        "default_mw": 1000 * _LIMITS_W[name][2],
        "limit_mw": 1000 * _LIMITS_W[name][2],
        "energy_mj": 0,
        "compute_mode": 0,
        "mig": [0, 0],
        "instances": [],
        "processes": [],
        **changes,
    }


def call(method: Callable[..., Any]) -> Callable[..., Any]:
    """A call of the driver: counted, perhaps failing, seeing the newest state and leaving it behind."""

    @functools.wraps(method)
    def counted(self: NvmlFake, *arguments: Any, **named: Any) -> Any:
        with self.state():
            due = self.due(method.__name__)
            if due and not self.late:
                raise self.error(self.code)
            result = method(self, *arguments, **named)
        if due:
            raise self.error(self.code)
        return result

    return counted


class NvmlFake:
    """The module.

    Args:
        boards: Its boards; see :func:`gpu`.
        root: Whether the caller is root as the driver sees it.
        file: Where the state is kept; in memory when None. Boards given are written there.

    Attributes:
        calls: Names of all calls so far.
        fail_at, fail_from: Numbers of calls (from 0) that fail with ``code``; ``late``: they take effect, then fail.
    """

    def __init__(self, *boards: dict[str, Any], root: bool = True, file: Path | None = None) -> None:
        self.real = real_module()
        self.file = file
        self.opened = 0
        self.calls: list[str] = []
        self.fail_at: frozenset[int] = frozenset()
        self.fail_from: int | None = None
        self.code: int = self.real.NVML_ERROR_UNKNOWN
        self.late = False
        self._state: dict[str, Any] = {"root": root, "boards": list(boards)}
        if file is not None and boards:
            file.write_text(json.dumps(self._state))

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("NVML", "c_nvml", "nvmlStruct")):
            return getattr(self.real, name)
        raise AttributeError(name)

    @contextmanager
    def state(self) -> Iterator[dict[str, Any]]:
        """The boards, to look at and to change."""
        if self.file is None:
            yield self._state
            return
        with self.file.open("r+") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            text = opened.read()
            self._state = json.loads(text)
            before = json.dumps(self._state)
            yield self._state
            if (after := json.dumps(self._state)) != before:
                # In one call, never shorter than what was there: a process killed meanwhile leaves a whole state.
                os.pwrite(opened.fileno(), after.ljust(len(text)).encode(), 0)

    def worked(self, index: int, joules: float) -> None:
        """Something ran on a board: its energy counter moves on."""
        with self.state() as state:
            state["boards"][index]["energy_mj"] += 1e3 * joules

    @property
    def boards(self) -> list[dict[str, Any]]:
        """The boards as they are."""
        with self.state() as state:
            boards: list[dict[str, Any]] = state["boards"]
            return boards

    def due(self, name: str) -> bool:
        number = len(self.calls)
        self.calls.append(name)
        return number in self.fail_at or (self.fail_from is not None and number >= self.fail_from)

    def error(self, code: int) -> Exception:
        made: Exception = self.real.NVMLError(code)
        return made

    def layout(self, index: int = 0) -> tuple[bool, tuple[tuple[str, int, tuple[int, ...]], ...]]:
        """Whether a board is in MIG mode, and its instances: name, start, sizes of compute instances."""
        board = self.boards[index]
        names = {row[1]: row[2] for row in MENUS.get(board["name"], [])}
        instances = (
            (names[i["profile"]], i["start"], tuple(sorted(c["slices"] for c in i["compute"])))
            for i in board["instances"]
        )
        return bool(board["mig"][0]), tuple(sorted(instances))

    # -- the library

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        if self.opened == 0:
            raise self.error(self.real.NVML_ERROR_UNINITIALIZED)
        self.opened -= 1

    @call
    def nvmlDeviceGetCount(self) -> int:
        return len(self._state["boards"])

    @call
    def nvmlDeviceGetHandleByIndex(self, index: int) -> tuple[Any, ...]:
        if not 0 <= index < len(self._state["boards"]):
            raise self.error(self.real.NVML_ERROR_INVALID_ARGUMENT)
        return ("gpu", index)

    @call
    def nvmlDeviceGetHandleByUUID(self, text: str) -> tuple[Any, ...]:
        for index, board in enumerate(self._state["boards"]):
            if board["uuid"] == text:
                return ("gpu", index)
        raise self.error(self.real.NVML_ERROR_NOT_FOUND)

    @call
    def nvmlDeviceGetIndex(self, handle: tuple[Any, ...]) -> int:
        index: int = handle[1]
        return index

    @call
    def nvmlDeviceGetName(self, handle: tuple[Any, ...]) -> str:
        board = self._board(handle)
        if handle[0] == "mig":
            row = self._row(board, self._instance(board, handle[2])["profile"])
            return f"{board['name']} MIG {row[2]}"
        return str(board["name"])

    @call
    def nvmlDeviceGetUUID(self, handle: tuple[Any, ...]) -> str:
        board = self._board(handle)
        if handle[0] == "mig":
            return "MIG-" + str(uuid.uuid5(uuid.NAMESPACE_OID, f"{board['uuid']} {handle[2]} {handle[3]}"))
        return str(board["uuid"])

    # -- clocks, power, modes

    @call
    def nvmlDeviceGetPersistenceMode(self, handle: Any) -> int:
        return int(self._board(handle)["persistence"])

    @call
    def nvmlDeviceGetSupportedMemoryClocks(self, handle: Any) -> list[int]:
        return list(self._board(handle)["memory_mhz"])

    @call
    def nvmlDeviceGetSupportedGraphicsClocks(self, handle: Any, memory_mhz: int) -> list[int]:
        board = self._board(handle)
        if memory_mhz not in board["memory_mhz"]:
            raise self.error(self.real.NVML_ERROR_NOT_FOUND)
        return sorted(board["graphics_mhz"], reverse=True)

    @call
    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:
        board = self._board(handle)
        if kind == self.real.NVML_CLOCK_MEM:
            return int(board["memory_mhz"][0])
        clock_mhz = board["running_mhz"] if board["locked"] is None else min(board["running_mhz"], board["locked"][1])
        if board["demand_mw"]:  # a limit below the demand lowers the clock: power rises with its square about there
            clock_mhz *= (self._draw_mw(board) / board["demand_mw"]) ** 0.5
        return int(clock_mhz)

    @call
    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int) -> int:
        board = self._board(handle)
        return int(max(board["memory_mhz"] if kind == self.real.NVML_CLOCK_MEM else board["graphics_mhz"]))

    @call
    def nvmlDeviceSetGpuLockedClocks(self, handle: Any, low: int, high: int) -> None:
        self._root()
        board = self._board(handle)
        if low > high or high < min(board["graphics_mhz"]):
            raise self.error(self.real.NVML_ERROR_INVALID_ARGUMENT)
        board["locked"] = [low, high]

    @call
    def nvmlDeviceResetGpuLockedClocks(self, handle: Any) -> None:
        self._root()
        self._board(handle)["locked"] = None

    @call
    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return int(self._draw_mw(self._board(handle)))

    @call
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        rates = self.real.c_nvmlUtilization_t()
        rates.gpu = self._board(handle)["busy"]
        return rates

    @call
    def nvmlDeviceGetFieldValues(self, handle: Any, fields: list[tuple[int, int]]) -> list[Any]:
        assert fields == [(self.real.NVML_FI_DEV_POWER_INSTANT, self.real.NVML_POWER_SCOPE_GPU)]
        watts = SimpleNamespace(uiVal=self._board(handle)["power_mw"])
        return [SimpleNamespace(nvmlReturn=self.real.NVML_SUCCESS, value=watts)]

    @call
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:
        board = self._board(handle)
        self._drawn(board)
        return int(board["energy_mj"] + board.get("idle_w", 0.0) * 1e3 * time.monotonic())

    @call
    def nvmlDeviceGetSamples(self, handle: Any, kind: int, since_us: int) -> tuple[int, list[Any]]:
        """One reading every 20 ms of the last 2.4 s, all of the board's present power, where ``samples`` says so."""
        assert kind == self.real.NVML_TOTAL_POWER_SAMPLES
        board = self._board(handle)
        if not board.get("samples"):
            raise self.real.NVMLError(self.real.NVML_ERROR_NOT_SUPPORTED)
        now_us = time.time_ns() // 1000
        first_us = max(since_us, now_us - 2_400_000) // 20_000 * 20_000 + 20_000
        mw = SimpleNamespace(uiVal=board["power_mw"])
        found = [SimpleNamespace(timeStamp=at, sampleValue=mw) for at in range(first_us, now_us + 1, 20_000)]
        if not found:
            raise self.real.NVMLError(self.real.NVML_ERROR_NOT_FOUND)
        return self.real.NVML_VALUE_TYPE_UNSIGNED_INT, found

    @call
    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        board = self._board(handle)
        return int(min(board["limit_mw"], board.get("other_limit_mw", board["limit_mw"])))

    @call
    def nvmlDeviceGetPowerManagementLimit(self, handle: Any) -> int:
        return int(self._limited(handle)["limit_mw"])

    @call
    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: Any) -> int:
        return int(self._limited(handle)["default_mw"])

    @call
    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: Any) -> list[int]:
        return list(self._limited(handle)["limits_mw"])

    @call
    def nvmlDeviceSetPowerManagementLimit(self, handle: Any, limit_mw: int) -> None:
        self._root()
        board = self._limited(handle)
        low, high = board["limits_mw"]
        if not low <= limit_mw <= high:
            raise self.error(self.real.NVML_ERROR_INVALID_ARGUMENT)
        self._drawn(board)
        board["limit_mw"] = limit_mw

    @call
    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any) -> int:
        return int(self._board(handle).get("pcie", 3))

    @call
    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any) -> int:
        return 16

    @call
    def nvmlDeviceGetArchitecture(self, handle: Any) -> int:
        architecture: int = self.real.NVML_DEVICE_ARCH_AMPERE
        return architecture

    @call
    def nvmlDeviceGetComputeMode(self, handle: Any) -> int:
        return int(self._board(handle)["compute_mode"])

    # -- MIG

    @call
    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        board = self._board(handle)
        self._menu(board)
        return list(board["mig"])

    @call
    def nvmlDeviceSetMigMode(self, handle: Any, mode: int) -> int:
        self._root()
        board = self._board(handle)
        self._menu(board)
        if mode == 0 and board["instances"]:
            raise self.error(self.real.NVML_ERROR_IN_USE)
        board["mig"][1] = mode
        if board["processes"] and mode != board["mig"][0]:
            return int(self.real.NVML_ERROR_IN_USE)
        board["mig"][0] = mode
        return 0

    @call
    def nvmlDeviceGetGpuInstanceProfileInfo(self, handle: Any, profile: int, version: int = 2) -> Any:
        board = self._board(handle)
        for row in self._menu(board):
            if row[0] == profile:
                info = self.real.c_nvmlGpuInstanceProfileInfo_v2_t()
                info.id, info.sliceCount, info.instanceCount = row[1], row[3], len(row[5])
                info.memorySizeMB, info.name = row[4], f"MIG {row[2]}".encode()
                return info
        raise self.error(self.real.NVML_ERROR_NOT_SUPPORTED)

    @call
    def nvmlDeviceGetGpuInstancePossiblePlacements(self, handle: Any, profile_id: int, places: Any, count: Any) -> int:
        board = self._enabled(handle)
        row = self._row(board, profile_id)
        if places is not None:
            for at, start in enumerate(row[5][: count._obj.value]):
                places[at].start, places[at].size = start, row[6]
        count._obj.value = len(row[5])
        return 0

    @call
    def nvmlDeviceCreateGpuInstanceWithPlacement(self, handle: Any, profile_id: int, placement: Any) -> Any:
        self._root()
        board = self._enabled(handle)
        row = self._row(board, profile_id)
        place = getattr(placement, "_obj", placement)
        if place.start not in row[5] or place.size != row[6]:
            raise self.error(self.real.NVML_ERROR_INVALID_ARGUMENT)
        wanted = range(place.start, place.start + row[6])
        slices = sum(self._row(board, i["profile"])[3] for i in board["instances"])
        taken = [i for i in board["instances"] if set(wanted) & set(range(i["start"], i["start"] + i["size"]))]
        most = max(r[3] for r in self._menu(board))
        if taken or slices + row[3] > most:
            raise self.error(self.real.NVML_ERROR_INSUFFICIENT_RESOURCES)
        used = {i["id"] for i in board["instances"]}
        number = next(n for n in range(1, 99) if n not in used)
        made = {"id": number, "profile": profile_id, "start": place.start, "size": row[6], "compute": []}
        board["instances"].append(made)
        return self._pointer(self.real.c_nvmlGpuInstance_t, handle[1], number, 0)

    @call
    def nvmlGpuInstanceDestroy(self, instance: Any) -> int:
        self._root()
        board, found = self._by_pointer(instance)
        if found["compute"]:
            raise self.error(self.real.NVML_ERROR_IN_USE)
        board["instances"].remove(found)
        return 0

    @call
    def nvmlDeviceGetGpuInstances(self, handle: Any, profile_id: int, array: Any, count: Any) -> int:
        self._root()
        board = self._enabled(handle)
        self._row(board, profile_id)
        found = [i for i in board["instances"] if i["profile"] == profile_id]
        for at, item in enumerate(found):
            array[at] = self._pointer(self.real.c_nvmlGpuInstance_t, handle[1], item["id"], 0)
        count._obj.value = len(found)
        return 0

    @call
    def nvmlDeviceGetGpuInstanceById(self, handle: Any, number: int) -> Any:
        self._root()
        self._instance(self._enabled(handle), number)
        return self._pointer(self.real.c_nvmlGpuInstance_t, handle[1], number, 0)

    @call
    def nvmlGpuInstanceGetInfo(self, instance: Any) -> Any:
        _, found = self._by_pointer(instance)
        info = self.real.c_nvmlGpuInstanceInfo_t()
        info.id, info.profileId = found["id"], found["profile"]
        info.placement.start, info.placement.size = found["start"], found["size"]
        return info

    @call
    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, instance: Any, profile: int, engine: int, version: int = 2
    ) -> Any:
        board, found = self._by_pointer(instance)
        most = self._row(board, found["profile"])[3]
        slices = next((s for s, constant in _COMPUTE.items() if constant == profile), 99)
        if slices > most or engine != self.real.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
            raise self.error(self.real.NVML_ERROR_NOT_SUPPORTED)
        info = self.real.c_nvmlComputeInstanceProfileInfo_v2_t()
        info.id, info.sliceCount, info.instanceCount = profile, slices, most // slices
        return info

    @call
    def nvmlGpuInstanceCreateComputeInstance(self, instance: Any, profile_id: int) -> Any:
        self._root()
        board, found = self._by_pointer(instance)
        slices = next(s for s, constant in _COMPUTE.items() if constant == profile_id)
        if slices + sum(c["slices"] for c in found["compute"]) > self._row(board, found["profile"])[3]:
            raise self.error(self.real.NVML_ERROR_INSUFFICIENT_RESOURCES)
        number = len(found["compute"])
        found["compute"].append({"id": number, "slices": slices})
        index = self._state["boards"].index(board)
        return self._pointer(self.real.c_nvmlComputeInstance_t, index, found["id"], number + 1)

    @call
    def nvmlGpuInstanceGetComputeInstances(self, instance: Any, profile_id: int, array: Any, count: Any) -> int:
        self._root()
        board, found = self._by_pointer(instance)
        slices = next(s for s, constant in _COMPUTE.items() if constant == profile_id)
        index = self._state["boards"].index(board)
        matching = [c for c in found["compute"] if c["slices"] == slices]
        for at, item in enumerate(matching):
            array[at] = self._pointer(self.real.c_nvmlComputeInstance_t, index, found["id"], item["id"] + 1)
        count._obj.value = len(matching)
        return 0

    @call
    def nvmlComputeInstanceDestroy(self, compute: Any) -> int:
        self._root()
        board, found, item = self._compute(compute)
        if any(p["gi"] == found["id"] for p in board["processes"]):
            raise self.error(self.real.NVML_ERROR_IN_USE)
        found["compute"].remove(item)
        return 0

    @call
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return 7 if MENUS.get(self._board(handle)["name"]) else 0

    @call
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> tuple[Any, ...]:
        board = self._board(handle)
        devices = [(i["id"], c["id"]) for i in board["instances"] for c in i["compute"]]
        if not board["mig"][0] or index >= len(devices):
            raise self.error(self.real.NVML_ERROR_NOT_FOUND)
        return ("mig", handle[1], *devices[index])

    @call
    def nvmlDeviceGetGpuInstanceId(self, handle: tuple[Any, ...]) -> int:
        number: int = handle[2]
        return number

    @call
    def nvmlDeviceGetComputeInstanceId(self, handle: tuple[Any, ...]) -> int:
        number: int = handle[3]
        return number

    @call
    def nvmlDeviceGetComputeRunningProcesses(self, handle: tuple[Any, ...]) -> list[Any]:
        board = self._board(handle)
        mine = [p for p in board["processes"] if handle[0] == "gpu" or p["gi"] == handle[2]]
        return [SimpleNamespace(pid=p["pid"], usedGpuMemory=None, gpuInstanceId=p["gi"] or 0xFFFFFFFF) for p in mine]

    @call
    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: tuple[Any, ...]) -> list[Any]:
        return []

    # -- inside

    def _root(self) -> None:
        if not self._state["root"]:
            raise self.error(self.real.NVML_ERROR_NO_PERMISSION)

    def _board(self, handle: tuple[Any, ...]) -> dict[str, Any]:
        board: dict[str, Any] = self._state["boards"][handle[1]]
        if board.get("lost"):
            raise self.error(self.real.NVML_ERROR_GPU_IS_LOST)
        return board

    @staticmethod
    def _draw_mw(board: dict[str, Any]) -> float:
        """What a board draws: the demand of what runs there, held at its limit."""
        return float(min(board["demand_mw"], board["limit_mw"]) if board["demand_mw"] else board["power_mw"])

    def _drawn(self, board: dict[str, Any]) -> None:
        """Move the energy counter on to now, where something runs."""
        now_s = time.monotonic()
        if board["demand_mw"]:
            board["energy_mj"] += self._draw_mw(board) * (now_s - board.get("drawn_s", now_s))
        board["drawn_s"] = now_s

    def _limited(self, handle: tuple[Any, ...]) -> dict[str, Any]:
        board = self._board(handle)
        if handle[0] == "mig" or not board["limits_mw"]:
            raise self.error(self.real.NVML_ERROR_NOT_SUPPORTED)
        return board

    def _enabled(self, handle: tuple[Any, ...]) -> dict[str, Any]:
        board = self._board(handle)
        if not board["mig"][0]:
            raise self.error(self.real.NVML_ERROR_NOT_SUPPORTED)
        return board

    def _menu(self, board: dict[str, Any]) -> list[tuple[Any, ...]]:
        if board["name"] not in MENUS:
            raise self.error(self.real.NVML_ERROR_NOT_SUPPORTED)
        return MENUS[board["name"]]

    def _row(self, board: dict[str, Any], profile_id: int) -> tuple[Any, ...]:
        for row in self._menu(board):
            if row[1] == profile_id:
                return row
        raise self.error(self.real.NVML_ERROR_INVALID_ARGUMENT)

    def _instance(self, board: dict[str, Any], number: int) -> dict[str, Any]:
        for item in board["instances"]:
            if item["id"] == number:
                found: dict[str, Any] = item
                return found
        raise self.error(self.real.NVML_ERROR_NOT_FOUND)

    def _pointer(self, kind: Any, board: int, instance: int, compute: int) -> Any:
        """An address that is none: it holds what it points to."""
        return ctypes.cast(ctypes.c_void_p((board + 1) << 24 | instance << 8 | compute), kind)

    def _by_pointer(self, pointer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        address = ctypes.cast(pointer, ctypes.c_void_p).value or 0
        board = self._board(("gpu", (address >> 24) - 1))
        return board, self._instance(board, address >> 8 & 0xFFFF)

    def _compute(self, pointer: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        board, found = self._by_pointer(pointer)
        number = ((ctypes.cast(pointer, ctypes.c_void_p).value or 0) & 0xFF) - 1
        for item in found["compute"]:
            if item["id"] == number:
                return board, found, item
        raise self.error(self.real.NVML_ERROR_NOT_FOUND)
