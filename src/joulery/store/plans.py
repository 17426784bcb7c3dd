"""What a kept plan (``joulery.plan/1``) says to whoever owns a clock."""

from __future__ import annotations

import json
import math
from pathlib import Path

from joulery.domain.errors import DataError

_HINT = "write one with: joulery plan SITE --preset muserve --out FILE"


def read_clock_bounds(file: Path, gpu: int) -> tuple[float, float]:
    """Lowest and highest clock that a plan leaves the governor of one of its GPUs, MHz.

    Args:
        file: The plan, as ``joulery plan --out`` wrote it.
        gpu: Which of its GPUs, counted from 1.

    Raises:
        DataError: It cannot be read, has no such GPU, or no clock bounds.
    """
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the plan: {error}", file=str(file), hint=_HINT) from None
    try:
        gpus = plan["gpus"]
        if not 1 <= gpu <= len(gpus):
            raise DataError(f"the plan has {len(gpus)} GPUs, not a GPU {gpu}", file=str(file), hint="count from 1")
        floor, ceiling = float(gpus[gpu - 1]["clock_floor_mhz"]), float(gpus[gpu - 1]["clock_ceiling_mhz"])
    except (KeyError, TypeError, ValueError):
        raise DataError("the plan bounds no clocks", file=str(file), hint=_HINT) from None
    if not 0 < floor <= ceiling < math.inf:
        raise DataError(f"a clock cannot be kept between {floor} and {ceiling} MHz", file=str(file), hint=_HINT)
    return floor, ceiling
