"""What a kept plan (``joulery.plan/1``) says to whoever owns a clock."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from joulery.domain.errors import DataError

_HINT = "write one with: joulery plan SITE --preset muserve --out FILE"


def read_hosts(file: Path) -> tuple[tuple[str, int], ...]:
    """Which GPU of a plan, counted from 0, hosts each model.

    Args:
        file: The plan, as ``joulery plan --out`` wrote it.

    Raises:
        DataError: It cannot be read, or a model is on more than one GPU.
    """
    hosts: dict[str, int] = {}
    try:
        for index, gpu in enumerate(_read(file)["gpus"]):
            for instance in gpu["instances"]:
                model = str(instance["model"])
                if hosts.setdefault(model, index) != index:
                    raise DataError(
                        f"the plan has {model} on several GPUs",
                        file=str(file),
                        hint="plan with devices_per_model: 1 and one replica a model, or simulate without the plan",
                    )
    except (KeyError, TypeError):
        raise DataError("not a plan of pipelines", file=str(file), hint=_HINT) from None
    if not hosts:
        raise DataError("the plan hosts no model", file=str(file), hint=_HINT)
    return tuple(hosts.items())


def read_clock_bounds(file: Path, gpu: int) -> tuple[float, float]:
    """Lowest and highest clock that a plan leaves the governor of one of its GPUs, MHz.

    Args:
        file: The plan, as ``joulery plan --out`` wrote it.
        gpu: Which of its GPUs, counted from 1.

    Raises:
        DataError: It cannot be read, has no such GPU, or no clock bounds.
    """
    try:
        gpus = _read(file)["gpus"]
        if not 1 <= gpu <= len(gpus):
            raise DataError(f"the plan has {len(gpus)} GPUs, not a GPU {gpu}", file=str(file), hint="count from 1")
        floor, ceiling = float(gpus[gpu - 1]["clock_floor_mhz"]), float(gpus[gpu - 1]["clock_ceiling_mhz"])
    except (KeyError, TypeError, ValueError):
        raise DataError("the plan bounds no clocks", file=str(file), hint=_HINT) from None
    if not 0 < floor <= ceiling < math.inf:
        raise DataError(f"a clock cannot be kept between {floor} and {ceiling} MHz", file=str(file), hint=_HINT)
    return floor, ceiling


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the plan: {error}", file=str(file), hint=_HINT) from None
