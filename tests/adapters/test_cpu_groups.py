import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from joulery.adapters.cgroups import ROOT, CpuGroups, GroupFiles
from joulery.domain.errors import CapabilityError
from joulery.domain.serving.service import Slice, SliceKind
from tests.adapters.engines.embedded.fake_cgroups import FakeGroups
from tests.skips import allowed_as
from tests.waiting import wait_until


def cpu(cores: int, share_ratio: float) -> Slice:
    return Slice(SliceKind.CPU, cores=cores, share_ratio=share_ratio)


def v1_tree(root: Path, own: str = "") -> tuple[CpuGroups, FakeGroups]:
    (root / "cpu" / own).mkdir(parents=True)
    (root / "cpu/cpu.cfs_quota_us").write_text("-1")
    (root / "self").write_text(f"9:name=systemd:/\n4:memory:/elsewhere\n1:cpu,cpuacct:/{own}\n0::/\n")
    files = FakeGroups(root, unified=False)
    return CpuGroups.find(root, root / "self", files), files


def v2_tree(root: Path, own: str, *others: int) -> tuple[CpuGroups, FakeGroups]:
    group = root / own
    group.mkdir(parents=True)
    (group / "cgroup.controllers").write_text("cpuset cpu io memory\n")
    (group / "cgroup.subtree_control").write_text("")
    (group / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in (os.getpid(), *others)))
    (root / "self").write_text(f"0::/{own}\n")
    files = FakeGroups(root, unified=True)
    return CpuGroups.find(root, root / "self", files), files


def test_version_1_gets_a_period_then_a_quota_then_the_process(tmp_path: Path) -> None:
    groups, files = v1_tree(tmp_path, "jobs/seven")
    group = groups.add("r0", 4242, cpu(2, 0.25))
    name = f"cpu/jobs/seven/joulery-{os.getpid()}-r0"
    assert group == tmp_path / name
    assert files.writes == [
        (f"{name}/cpu.cfs_period_us", "10000"),
        (f"{name}/cpu.cfs_quota_us", "5000"),
        (f"{name}/cgroup.procs", "4242"),
    ]


def test_a_group_of_the_host_that_a_container_cannot_see_is_its_root(tmp_path: Path) -> None:
    groups, _ = v1_tree(tmp_path)
    (tmp_path / "self").write_text("1:cpu:/docker/abc\n")
    assert CpuGroups.find(tmp_path, tmp_path / "self").base == tmp_path / "cpu"
    assert groups.base == tmp_path / "cpu"


def test_version_2_steps_aside_and_hands_the_controller_down(tmp_path: Path) -> None:
    groups, files = v2_tree(tmp_path, "user.slice/run.scope")
    group = groups.add("r0", 4242, cpu(1, 0.5))
    assert (group / "cpu.max").read_text() == "5000 10000"
    assert files.procs(group) == [4242]
    assert files.procs(groups.base) == []
    assert files.procs(groups.base / f"joulery-{os.getpid()}-engine") == [os.getpid()]
    assert (groups.base / "cgroup.subtree_control").read_text() == "+cpu"
    before = len(files.writes)
    groups.add("r1", 4243, cpu(1, 0.5))
    assert len(files.writes) == before + 2, "the controller is handed down once"


def test_version_2_leaves_everything_as_it_was_when_others_are_in_the_way(tmp_path: Path) -> None:
    groups, files = v2_tree(tmp_path, "session.scope", 77)
    with pytest.raises(CapabilityError, match="busy") as caught:
        groups.add("r0", 4242, cpu(1, 0.5))
    assert caught.value.grant is not None
    assert "Delegate=yes" in caught.value.grant
    assert sorted(files.procs(groups.base)) == sorted([77, os.getpid()])
    assert [path.name for path in groups.base.iterdir() if path.is_dir()] == []


def test_groups_are_removed_with_their_processes_and_after_dead_engines(tmp_path: Path) -> None:
    groups, files = v1_tree(tmp_path)
    group = groups.add("r0", 4242, cpu(1, 0.5))
    groups.remove(group)
    assert group.exists(), "still busy"
    (group / "cgroup.procs").write_text("")
    groups.remove(group)
    assert not group.exists()
    files.pids_alive = {31}
    for name in ["joulery-30-r0", "joulery-31-r0", "joulery-x-r0", "other-30-r0"]:
        (tmp_path / "cpu" / name).mkdir()
    groups.sweep()
    assert sorted(path.name for path in (tmp_path / "cpu").iterdir() if path.is_dir()) == [
        "joulery-31-r0",
        "joulery-x-r0",
        "other-30-r0",
    ]


@pytest.mark.parametrize("deny", ["cfs_quota", "cgroup.procs"])
def test_without_permission_nothing_is_left_behind(tmp_path: Path, deny: str) -> None:
    groups, files = v1_tree(tmp_path)
    files.deny = deny
    with pytest.raises(CapabilityError, match="Permission denied") as caught:
        groups.add("r0", 4242, cpu(1, 0.5))
    assert "root" in (caught.value.hint or "") and "whole cores" in (caught.value.hint or "")
    assert deny in (caught.value.resource or "")
    assert allowed_as(str(caught.value), ci=True) == "no CPU quota", "a test that skips by it is counted"
    assert [path for path in (tmp_path / "cpu").iterdir() if path.is_dir()] == []


def test_a_refusal_other_than_busy_is_not_met_by_stepping_aside(tmp_path: Path) -> None:
    groups, files = v2_tree(tmp_path, "a.scope")
    files.deny = "subtree_control"
    with pytest.raises(CapabilityError, match="Permission denied"):
        groups.add("r0", 4242, cpu(1, 0.5))
    assert files.procs(groups.base) == [os.getpid()]


def test_a_share_the_kernel_cannot_give_is_refused(tmp_path: Path) -> None:
    groups, files = v1_tree(tmp_path)
    with pytest.raises(CapabilityError, match="too small") as caught:
        groups.add("r0", 4242, cpu(2, 0.04))
    assert "0.05" in (caught.value.hint or "")
    assert files.writes == []
    groups.add("r0", 4242, cpu(2, 0.05))
    assert files.writes[1][1] == "1000"


@pytest.mark.parametrize("controllers", [None, "memory io\n"])
def test_a_machine_without_the_controller_says_so(tmp_path: Path, controllers: str | None) -> None:
    if controllers:
        (tmp_path / "cgroup.controllers").write_text(controllers)
    with pytest.raises(CapabilityError, match="offers no CPU quota") as caught:
        CpuGroups.find(tmp_path, tmp_path / "self")
    assert allowed_as(str(caught.value), ci=True) == "no CPU quota"


def test_a_quota_of_a_quarter_core_holds_on_this_machine() -> None:
    try:
        groups = CpuGroups.find(ROOT)
    except CapabilityError as error:
        pytest.skip(str(error))
    spin = "import time\nend = time.time() + 0.8\nwhile time.time() < end: pass\nprint(time.process_time())"
    with subprocess.Popen(
        [sys.executable, "-c", "input()\n" + spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            group = groups.add("test", process.pid, cpu(1, 0.25))
        except CapabilityError as error:
            process.kill()
            pytest.skip(str(error))
        used_s = float(process.communicate("\n")[0])
    assert used_s < 0.8 * 0.25 + 0.15

    def gone() -> bool:
        groups.remove(group)
        return not group.exists()

    assert wait_until(gone, "the removal of the group")


def test_the_real_files_are_written_made_and_removed(tmp_path: Path) -> None:
    files = GroupFiles()
    group = tmp_path / "group"
    files.make(group)
    files.write(group / "cpu.max", "1000 10000")
    assert (group / "cpu.max").read_text() == "1000 10000"
    with pytest.raises(OSError, match="not empty"):
        files.remove(group)
    (group / "cpu.max").unlink()
    files.remove(group)
    assert not group.exists()
    assert files.alive(os.getpid())
    assert not files.alive(2**22 + 1)


def test_the_fake_refuses_what_the_kernel_refuses(tmp_path: Path) -> None:
    groups, files = v2_tree(tmp_path, "a.scope")
    with pytest.raises(OSError, match="busy") as caught:
        files.write(groups.base / "cgroup.subtree_control", "+cpu")
    assert caught.value.errno == errno.EBUSY
