"""Whether a board has room for a process: its compute mode, and who has it."""

from __future__ import annotations

import pynvml
import pytest

from joulery.adapters.devices.nvidia_board import open_board
from joulery.domain.errors import CapabilityError
from tests.fakes.nvml import NvmlFake, gpu

EXCLUSIVE, PROHIBITED = pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, pynvml.NVML_COMPUTEMODE_PROHIBITED
HELD = [{"pid": 4242, "gi": None}]


@pytest.mark.parametrize(
    ("mode", "processes", "shared", "alone"),
    [
        (pynvml.NVML_COMPUTEMODE_DEFAULT, HELD, False, False),
        (EXCLUSIVE, [], False, True),
        (pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD, [], False, True),
        (EXCLUSIVE, HELD, True, False),
    ],
)
def test_whether_a_board_takes_one_process_at_a_time(
    mode: int, processes: list[object], shared: bool, alone: bool
) -> None:
    board = open_board(0, NvmlFake(gpu(compute_mode=mode, processes=processes)))
    assert board.require_room(shared=shared) is alone


def test_a_board_that_another_process_has_to_itself_is_refused_with_its_number() -> None:
    board = open_board(0, NvmlFake(gpu(compute_mode=EXCLUSIVE, processes=HELD)))
    with pytest.raises(CapabilityError, match="process 4242") as caught:
        board.require_room(shared=False)
    assert caught.value.grant == "sudo nvidia-smi -i 0 -c DEFAULT"
    assert "mode: mps" in str(caught.value.hint)


@pytest.mark.parametrize("shared", [False, True])
def test_a_board_that_prohibits_computing_is_refused(shared: bool) -> None:
    board = open_board(0, NvmlFake(gpu(compute_mode=PROHIBITED)))
    with pytest.raises(CapabilityError, match="prohibited compute mode"):
        board.require_room(shared=shared)
