"""Workloads of a node from a made-up /proc and control groups of both versions."""

import os
import socket

import pytest

from joulery.adapters.processes import ProcessTable, listener
from joulery.domain.energy.workload import NodeWorkload

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SLICE = "kubepods-burstable-pod3f0c2a11_9a4e_4b6c_8c1d_0123456789ab.slice"
HEX = "4f" * 32


class Node:
    """A /proc and a /sys/fs/cgroup on disk."""

    def __init__(self, root):
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.proc.mkdir()
        self.cgroups.mkdir()

    def process(self, pid, ticks, cgroup="0::/", command="sh", parent=1, start=5, flags=0):
        folder = self.proc / str(pid)
        folder.mkdir(exist_ok=True)
        rest = [b"S", str(parent).encode(), *[b"0"] * 4, str(flags).encode(), *[b"0"] * 4]
        rest += [str(ticks).encode(), b"0", b"0", b"0", *[b"0"] * 4, str(start).encode(), b"0"]
        (folder / "stat").write_bytes(b"%d (%b) " % (pid, command.encode()) + b" ".join(rest))
        (folder / "cgroup").write_text(cgroup + "\n")

    def end(self, pid):
        for file in (self.proc / str(pid)).iterdir():
            file.unlink()
        (self.proc / str(pid)).rmdir()

    def v2(self, path, used_s):
        folder = self.cgroups / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.stat").write_text(f"usage_usec {round(used_s * 1e6)}\nuser_usec 1\n")

    def v1(self, path, used_s):
        folder = self.cgroups / "cpu,cpuacct" / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpuacct.usage").write_text(f"{round(used_s * 1e9)}\n")

    def table(self):
        return ProcessTable(self.proc, self.cgroups)


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("cgroup", "workload"),
    [
        ("0::/system.slice/slurmstepd.scope/job_71/step_0/user/task_0", NodeWorkload("slurm", "71")),
        ("4:cpu,cpuacct:/slurm/uid_1000/job_9/step_batch\n0::/", NodeWorkload("slurm", "9")),
        (f"0::/kubepods.slice/kubepods-burstable.slice/{SLICE}/cri-containerd-{HEX}.scope",
         NodeWorkload("pod", "3f0c2a11-9a4e-4b6c-8c1d-0123456789ab")),
        (f"0::/system.slice/docker-{HEX}.scope", NodeWorkload("container", HEX[:12])),
        (f"2:cpuacct:/docker/{HEX}", NodeWorkload("container", HEX[:12])),
        ("0::/system.slice/nginx.service", NodeWorkload("service", "nginx.service")),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/x.scope", NodeWorkload("user", "1000")),
        ("0::/", NodeWorkload("process", "sh")),
        ("no such line", NodeWorkload("process", "sh")),
    ],
)  # fmt: skip
def test_the_workload_of_a_control_group(node, cgroup, workload):
    node.process(10, 0, cgroup)
    assert node.table().read().workload_of == {10: workload}


def test_times_count_from_the_first_reading_and_new_processes_from_their_start(node):
    node.process(10, 500, command="old one) (")
    table = node.table()
    assert table.read().cpu_s == {NodeWorkload("process", "old one) ("): 0.0}
    node.process(10, 520, command="old one) (")
    node.process(11, 30, command="new")
    found = table.read()
    assert found.cpu_s == pytest.approx(
        {NodeWorkload("process", "old one) ("): 20 * TICK_S, NodeWorkload("process", "new"): 30 * TICK_S}
    )
    assert found.process_cpu_s[11] == pytest.approx(30 * TICK_S)


def test_a_process_number_that_is_used_again_is_another_process(node):
    node.process(10, 500, command="a")
    table = node.table()
    table.read()
    node.process(10, 7, command="b", start=99)
    assert table.read().cpu_s == pytest.approx({NodeWorkload("process", "b"): 7 * TICK_S})


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_counts_processes_that_came_and_went(node, version):
    path = "/system.slice/slurmstepd.scope/job_71"
    line = f"4:cpu,cpuacct:{path}/step_0" if version == 1 else f"0::{path}/step_0"
    used = node.v1 if version == 1 else node.v2
    used(path, 100.0)
    node.process(10, 0, line)
    table = node.table()
    table.read()
    used(path, 103.5)
    node.process(10, 10, line)
    assert table.read().cpu_s == pytest.approx({NodeWorkload("slurm", "71"): 3.5})


def test_a_workload_that_vanishes_takes_nothing_back(node):
    node.v2("/system.slice/a.service", 5.0)
    node.process(10, 0, "0::/system.slice/a.service")
    table = node.table()
    table.read()
    node.end(10)
    (node.cgroups / "system.slice/a.service/cpu.stat").unlink()
    assert table.read().cpu_s == {}


def test_threads_of_the_kernel_are_one_workload(node):
    node.process(2, 0, command="kthreadd", flags=0x00208040)
    node.process(30, 0, command="kworker/0:1", flags=0x04208060, parent=2)
    assert set(node.table().read().workload_of.values()) == {NodeWorkload("process", "[kernel]")}


def test_a_family_is_a_process_and_its_descendants(node):
    for pid, parent in ((10, 1), (11, 10), (12, 11), (20, 1)):
        node.process(pid, 0, parent=parent)
    table = node.table()
    table.read()
    assert table.family(10) == {10, 11, 12}
    assert table.family(99) == frozenset()


def test_no_environment_argument_or_open_file_is_read(node):
    """A process whose environment is a trap is read all the same."""
    node.process(10, 0)
    for name in ("environ", "cmdline", "fd"):
        (node.proc / "10" / name).symlink_to(node.proc / "trap")
    assert node.table().read().workload_of == {10: NodeWorkload("process", "sh")}


def test_what_is_hidden(node):
    assert node.table().hidden
    node.process(1, 0)
    assert not node.table().hidden


def test_the_process_behind_a_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert listener(port) == 0
        listening.listen()
        assert listener(port) == os.getpid()
