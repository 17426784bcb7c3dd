"""Lines of progress over a UNIX socket, distinguished by their sender."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from joulery.adapters.clusters.progress import Progress, open_progress_socket, output_pattern, read_output
from joulery.adapters.clusters.slurm_node import job_of
from joulery.domain.errors import CapabilityError, ConfigError
from tests.waiting import wait_until


def send(path: Path, text: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.sendto(text.encode(), str(path))


def test_the_kernel_says_whose_line_it_is(tmp_path: Path) -> None:
    owners = {os.getpid(): 7}
    listener = open_progress_socket(tmp_path / "s", tmp_path / "progress", lambda pid: owners.get(pid, 0))
    try:
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o666, "anybody's job may write"
        send(tmp_path / "s", "epoch 1/4")
        send(tmp_path / "s", "epoch 2/4\n")
        wait_until(lambda: Progress(tmp_path / "progress").of(7) == 0.5)
        owners.clear()
        send(tmp_path / "s", "epoch 4/4\n")
        wait_until(lambda: listener.strangers == 1)
    finally:
        listener.close()
    assert (tmp_path / "progress" / "7").read_text() == "epoch 1/4\nepoch 2/4\n"
    assert not (tmp_path / "s").exists()


def test_a_folder_that_is_away_for_a_while_gets_the_last_word_of_each_job(tmp_path: Path) -> None:
    listener = open_progress_socket(tmp_path / "s", tmp_path / "progress", lambda pid: 7)
    try:
        (tmp_path / "progress").rmdir()
        send(tmp_path / "s", "epoch 1/4")
        send(tmp_path / "s", "epoch 2/4")
        wait_until(lambda: listener._kept.get(7) == b"epoch 2/4\n")
        (tmp_path / "progress").mkdir()
        wait_until(lambda: Progress(tmp_path / "progress").of(7) == 0.5)
    finally:
        listener.close()
    assert (tmp_path / "progress" / "7").read_text() == "epoch 2/4\n", "the first line is gone, the last is not"


def test_a_socket_left_behind_is_replaced_and_an_impossible_place_is_said(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(str(tmp_path / "s"))
    listener = open_progress_socket(tmp_path / "s", tmp_path, lambda pid: 3)
    send(tmp_path / "s", "1/2")
    wait_until(lambda: Progress(tmp_path).of(3) == 0.5)
    listener.close()
    with pytest.raises(CapabilityError, match="cannot listen"):
        open_progress_socket(tmp_path / "none" / "s", tmp_path, lambda pid: 3)


def test_a_file_or_a_listener_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(ConfigError, match="is not a socket"):
        open_progress_socket(tmp_path / "precious", tmp_path, lambda pid: 3)
    assert (tmp_path / "precious").read_text() == "mine"
    listener = open_progress_socket(tmp_path / "s", tmp_path, lambda pid: 3)
    try:
        with pytest.raises(ConfigError, match="another process listens there"):
            open_progress_socket(tmp_path / "s", tmp_path, lambda pid: 4)
        send(tmp_path / "s", "1/2")
        wait_until(lambda: Progress(tmp_path).of(3) == 0.5)
    finally:
        listener.close()


def test_the_job_of_a_process_is_that_of_its_cgroup_whatever_it_says_itself(tmp_path: Path) -> None:
    for pid, cgroup, environ in (
        (10, "0::/system.slice/slurmstepd.scope/job_7/step_batch/user/task_0\n", b"SLURM_JOB_ID=9\0"),
        (11, "4:devices:/slurm/uid_1000/job_8/step_0\n1:name=systemd:/x\n", b""),
        (12, "0::/user.slice\n", b"SLURM_JOB_ID=9\0"),
        (13, "0::/user.slice/job_x\n", b"HOME=/\0"),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(cgroup)
        (tmp_path / str(pid) / "environ").write_bytes(environ)
    assert [job_of(pid, tmp_path) for pid in (10, 11, 12, 13, 14)] == [7, 8, 9, 0, 0]


@pytest.mark.parametrize(
    ("pattern", "output", "expected"),
    [
        (r"Epoch (\d+)/(\d+)", "Epoch 1/10 loss 3\nEpoch 2/10 loss 2\nsaved\n", 0.2),
        (r"Epoch (\d+)/(\d+)", "Epoch 1/10\rEpoch 3/10\rEpo", 0.3),
        (r"(\d+)%\|", " 10%|#  \r 45%|####\r", float("nan")),
        (r"(\d+%)\|", " 10%|#  \r 45%|####\r", 0.45),
        (r"step=(\d+) of=(\d+)", "nothing\n", float("nan")),
        (r"done (0\.\d+)", "done 0.25\ndone\n", 0.25),
    ],
)
def test_progress_is_found_in_what_a_job_prints(tmp_path: Path, pattern: str, output: str, expected: float) -> None:
    file = tmp_path / "slurm-7.out"
    file.write_text("x" * 100_000 + "\n" + output)
    found = Progress(tmp_path / "none", output_pattern(pattern)).of(7, str(file))
    assert found == pytest.approx(expected, nan_ok=True)
    assert read_output(tmp_path / "missing", output_pattern(pattern)) != 0


def test_its_own_word_counts_before_its_output(tmp_path: Path) -> None:
    (tmp_path / "7").write_text("0.9\n")
    (tmp_path / "out").write_text("Epoch 1/10\n")
    progress = Progress(tmp_path, output_pattern(r"Epoch (\d+)/(\d+)"))
    assert progress.of(7, str(tmp_path / "out")) == 0.9 and progress.of(8, str(tmp_path / "out")) == 0.1
    assert progress.of(8) != progress.of(8), "without an output, progress is unknown"
    for bad in ("(", "no groups", "(a)(b)(c)"):
        with pytest.raises(ConfigError):
            output_pattern(bad)
