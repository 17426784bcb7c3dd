"""``pynvml`` for processes a test starts: put this folder first on ``PYTHONPATH``, name the boards in a file."""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[3]))

from tests.fakes.nvml import STATE, NvmlFake

_fake = NvmlFake(file=Path(os.environ[STATE]))


def __getattr__(name: str) -> Any:
    return getattr(_fake, name)
