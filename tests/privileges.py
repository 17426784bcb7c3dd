"""What a test needs to be allowed to do."""

import os

import pytest

SETS_GPUS = pytest.mark.skipif(os.geteuid() != 0, reason="setting a GPU, even an invented one, needs root")
"""For tests that set clocks, power limits or partitions: joulery asks the kernel for CAP_SYS_ADMIN first."""
