import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from joulery.adapters.cgroups import RunGroup, make_group, open_group
from joulery.domain.errors import CapabilityError
from tests.waiting import wait_until


class Cgroups:
    """A /proc and a /sys/fs/cgroup on disk, with one version 2 and perhaps one version 1 hierarchy."""

    def __init__(self, root: Path, own: list[str], mounts: list[str]) -> None:
        self.proc = root / "proc"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self/cgroup").write_text("\n".join(own) + "\n")
        lines = [line.replace("ROOT", str(root)) for line in mounts]
        (self.proc / "self/mountinfo").write_text("\n".join(lines) + "\n")


V2 = "38 31 0:38 / ROOT/unified rw,relatime - cgroup2 cgroup2 rw"
V2_INSIDE = "38 31 0:38 /box ROOT/unified rw,relatime shared:1 - cgroup2 cgroup2 rw"
CPUACCT = "33 31 0:30 / ROOT/cpuacct rw - cgroup cgroup rw,cpuacct"
TIED = "33 31 0:30 / ROOT/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"


def stand_in(folder: Path, per_cpu: bool) -> None:
    """What the kernel puts into a new group; here it has to be there before."""
    (folder / "cgroup.procs").write_text("")
    (folder / ("cpuacct.usage_percpu" if per_cpu else "cpu.stat")).write_text(
        "5000 7000\n" if per_cpu else "usage_usec 1\n"
    )


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders made below appear with their files, as groups do."""
    real_mkdir = Path.mkdir

    def mkdir(self: Path, *args: object, **kwargs: object) -> None:
        real_mkdir(self, *args, **kwargs)  # type: ignore[arg-type]
        if "cgroup.procs" in {entry.name for entry in self.parent.iterdir()}:
            stand_in(self, "cpuacct" in str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)


def hierarchy(root: Path, name: str, per_cpu: bool) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    stand_in(folder, per_cpu)
    return folder


@pytest.mark.usefixtures("kernel")
def test_version_2_is_preferred_and_the_group_lies_in_our_own(tmp_path: Path) -> None:
    hierarchy(tmp_path, "unified/user/me", False)
    hierarchy(tmp_path, "cpuacct", True)
    groups = Cgroups(tmp_path, ["3:cpuacct:/", "0::/user/me"], [CPUACCT, V2])
    group = make_group(7, groups.proc)
    assert group == RunGroup(tmp_path / "unified/user/me/joulery-7", per_cpu=False)
    assert (tmp_path / "unified/user/me/cgroup.procs").read_text() == "0"


@pytest.mark.usefixtures("kernel")
def test_a_mount_of_a_part_of_the_hierarchy_is_understood(tmp_path: Path) -> None:
    hierarchy(tmp_path, "unified/inner", False)
    groups = Cgroups(tmp_path, ["0::/box/inner"], [V2_INSIDE])
    assert make_group(7, groups.proc).path == tmp_path / "unified/inner/joulery-7"


@pytest.mark.usefixtures("kernel")
def test_version_1_serves_where_version_2_does_not(tmp_path: Path) -> None:
    hierarchy(tmp_path, "cpuacct", True)
    groups = Cgroups(tmp_path, ["3:cpuacct:/", "0::/user/me"], [CPUACCT, V2])
    assert make_group(7, groups.proc) == RunGroup(tmp_path / "cpuacct/joulery-7", per_cpu=True)


def test_a_hierarchy_that_is_mounted_several_times_is_tried_once(tmp_path: Path) -> None:
    """As a container may show it."""
    groups = Cgroups(tmp_path, ["0::/user/me"], [V2, V2, V2])
    with pytest.raises(CapabilityError) as caught:
        make_group(7, groups.proc)
    assert str(caught.value).count(f"{tmp_path}/unified/user/me: ") == 1


@pytest.mark.usefixtures("kernel")
def test_a_hierarchy_that_also_schedules_is_left_alone(tmp_path: Path) -> None:
    hierarchy(tmp_path, "cpu,cpuacct", True)
    groups = Cgroups(tmp_path, ["3:cpu,cpuacct:/"], [TIED])
    with pytest.raises(CapabilityError, match="no control group can be made"):
        make_group(7, groups.proc)
    assert not (tmp_path / "cpu,cpuacct/joulery-7").exists()


@pytest.mark.usefixtures("kernel")
def test_groups_of_processes_that_are_no_more_are_swept(tmp_path: Path) -> None:
    own = hierarchy(tmp_path, "unified", False)
    groups = Cgroups(tmp_path, ["0::/"], [V2])
    (groups.proc / "12").mkdir()
    for name in ("joulery-11", "joulery-12", "joulery-13-replica", "other-11"):
        (tmp_path / name).mkdir()
        (tmp_path / name).rename(own / name)
    make_group(7, groups.proc)
    assert {path.name for path in own.iterdir() if path.is_dir()} == {
        "joulery-7",
        "joulery-12",
        "joulery-13-replica",
        "other-11",
    }


def test_a_group_that_cannot_be_entered_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unified").mkdir()
    groups = Cgroups(tmp_path, ["0::/"], [V2])
    with pytest.raises(CapabilityError, match=r"unified: cannot read .*cgroup\.procs"):
        make_group(7, groups.proc)
    assert not (tmp_path / "unified/joulery-7").exists()


def test_no_hierarchy_at_all(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="no control group"):
        make_group(7, tmp_path / "proc")


def test_time_is_reported_by_socket(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("12\n34\n")
    (tmp_path / "cpuacct.usage_percpu").write_text("1000000000 2000000000 500000000 9 \n")
    tree = open_group(RunGroup(tmp_path, per_cpu=True), (0, 1), {0: 0, 1: 1, 2: 0})
    assert tree.read() == pytest.approx((1.5 + 9e-9, 2.0))
    assert tree.pids() == frozenset()
    tree.discover()
    assert tree.pids() == {12, 34}
    tree.close()
    tree.close()


def test_version_2_reports_no_sockets(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("")
    (tmp_path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\nsystem_usec 2\n")
    tree = open_group(RunGroup(tmp_path, per_cpu=False), (0,), {0: 0, 1: 0})
    assert tree.read() == pytest.approx((2.5,))
    tree.close()
    with pytest.raises(CapabilityError, match="socket"):
        open_group(RunGroup(tmp_path, per_cpu=False), (0, 1), {0: 0, 1: 1})


@pytest.fixture
def real_group() -> Iterator[RunGroup]:
    try:
        group = make_group(os.getpid())
    except CapabilityError as error:
        pytest.skip(str(error))
    yield group
    group.remove()
    assert not group.path.exists()


def test_a_real_group_counts_an_orphan_that_was_not_reaped(real_group: RunGroup) -> None:
    tree = open_group(real_group, (0,), {}) if not real_group.per_cpu else open_group(real_group, (0,), {0: 0, 1: 0})
    before = tree.read()
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    # The shell ends at once; what it left behind belongs to init and is not waited for here.
    subprocess.run(["sh", "-c", f'"{sys.executable}" -c "{burn}" &'], preexec_fn=real_group.enter, check=True)
    tree.discover()
    assert len(tree.pids()) == 1

    def gone() -> bool:
        tree.discover()
        return not tree.pids()

    wait_until(gone, "the end of the descendant")
    assert tree.read()[0] - before[0] >= 0.3
    tree.close()


def test_a_daemon_left_behind_is_moved_out_and_lives_on(real_group: RunGroup) -> None:
    sleeper = subprocess.Popen(["sleep", "60"], preexec_fn=real_group.enter)
    try:
        assert str(sleeper.pid) in (real_group.path / "cgroup.procs").read_text().split()
        real_group.remove()
        assert not real_group.path.exists()
        assert sleeper.poll() is None
        real_group.remove()
    finally:
        sleeper.kill()
        sleeper.wait()
