"""The check on a GPU, as far as a made-up driver takes it: totals, kernels, what is said where there is none."""

import math
import os
import re
import time
from pathlib import Path

import pytest

from benchmarks import NotRun, gpu
from joulery.adapters.tracers.kineto.reader import read_columns
from reproduce.smaragdine import RangeCheck
from tests.adapters.tracers.kineto.kineto_file import KinetoFile
from tests.data_folder import data_folder
from tests.fakes import nvml as fake_nvml
from tests.waiting import wait_until

FAKES = Path(fake_nvml.__file__).parent / "path"


def test_totals_are_read_from_sampler_counter_and_instants_over_the_same_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The sampler is a process of its own: it finds the same made-up board through the environment.
    state = tmp_path / "boards.json"
    driver = fake_nvml.NvmlFake(fake_nvml.gpu("NVIDIA H200", power_mw=100_000, idle_w=100.0, samples=True), file=state)
    monkeypatch.setenv("PYTHONPATH", str(FAKES), prepend=os.pathsep)
    monkeypatch.setenv(fake_nvml.STATE, str(state))
    # A meter that is not named is opened where the driver is: C's library under the name of the driver's will do.
    library = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libc." in line)
    (tmp_path / "libnvidia-ml.so.1").symlink_to(library)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path), prepend=os.pathsep)
    totals = gpu.measured_totals(lambda: time.sleep(0.02), 2.0, driver)
    assert totals.seconds >= 2.0
    assert totals.counter_j == pytest.approx(100 * totals.seconds, rel=0.1)
    assert totals.joulery_j == pytest.approx(100 * totals.seconds, rel=0.1)
    assert totals.instant_j == pytest.approx(100 * totals.seconds)
    assert totals.zeus_j is None
    assert driver.opened == 0


def test_power_is_integrated_between_the_two_instants_alone() -> None:
    second = 10**9
    ramp = [(at * second, 10.0 * at) for at in range(11)]
    assert gpu.integral_j(ramp, 2 * second, 6 * second) == pytest.approx(10 * (36 - 4) / 2)
    assert gpu.integral_j(ramp, second // 2, 3 * second // 2) == pytest.approx(10.0)
    assert gpu.integral_j([], 0, second) is None


def test_each_total_has_a_line_of_its_own_and_an_unreported_one_does_not_hold() -> None:
    good = gpu.judged(gpu.Totals(20.0, 101.0, 100.0, 95.0, 100.0, 99.0))
    assert [line.holds for line in good] == [True] * 5
    off = gpu.judged(gpu.Totals(9.0, 103.0, 100.0, None, 105.1, 90.0))
    assert [line.holds for line in off] == [False, False, True, False, False]
    assert "ZeusMonitor" not in str(gpu.judged(gpu.Totals(20.0, 1.0, 1.0, 1.0, None)))


def test_kernels_without_a_launch_and_operations_outside_of_modules_lower_the_figures(tmp_path: Path) -> None:
    f = KinetoFile()
    f.module("Net/a", 0, 100)
    f.op("aten::mm", 10, 60)
    f.launch("cudaLaunchKernel", 20, 10, correlation=1)
    f.kernel("gemm", 40, 60, correlation=1)
    f.op("aten::add", 200, 50)
    f.launch("cudaLaunchKernel", 210, 10, correlation=2)
    f.kernel("add", 230, 30, correlation=2)
    f.kernel("lost", 300, 10, correlation=9)
    f.launch("cudaLaunchKernel", 400, 10, correlation=3)
    f.kernel("of no operation", 420, 100, correlation=3)
    assert gpu.linked(read_columns(f.write(tmp_path))) == (pytest.approx(0.45), pytest.approx(0.3))


def test_all_kernel_time_of_a_real_trace_is_linked() -> None:
    linked, _ = gpu.linked(read_columns(data_folder("smaragdine") / "kineto_gpu" / "a100_nccl_data.json.gz"))
    assert linked == 1.0


def test_without_a_gpu_it_does_not_run_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "missing", lambda plan: "no GPU")
    with pytest.raises(NotRun, match="no GPU"):
        gpu.run()


def test_no_part_of_an_unknown_name_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOULERY_BENCH_GPU", "totals,part")
    with pytest.raises(NotRun) as caught:
        gpu.run()
    assert "no part part" in str(caught.value) and "totals, ranks" in str(caught.value)


def test_a_part_is_printed_when_it_is_known_and_bars_of_the_others_do_not_count_as_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def measure(plan: gpu.Plan) -> list[RangeCheck]:
        seen.append(capsys.readouterr().err)
        return [RangeCheck("a figure", 2.0, 1.0, 3.0)]

    def fail(plan: gpu.Plan) -> list[RangeCheck]:
        seen.append(capsys.readouterr().err)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "missing", lambda plan: "")
    monkeypatch.setattr(gpu, "PARTS", {"one": measure, "two": fail})
    with pytest.raises(KeyboardInterrupt):
        gpu.run()
    begun, known = seen
    assert begun == "gpu: one …\n"
    assert re.search(r"^gpu: one took [\d.]+ s\n  a figure: 2 \(1 to 3\)\n", known)
    monkeypatch.setenv("JOULERY_BENCH_GPU", "one")
    assert list(gpu.run().checks) == [("a figure", True), ("part two", None)]


def test_the_error_of_parts_weighs_each_by_its_energy() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'joulery[torch]'")
    from benchmarks._gpu_parts import PartJoules, weighted_error

    exact, off = PartJoules("a", 600, 30.0, 30.0), PartJoules("b", 200, 10.0, 14.0)
    assert weighted_error([exact, off]) == pytest.approx(0.1)
    assert weighted_error([off]) == pytest.approx(0.4)


def test_a_total_without_a_counter_does_not_hold() -> None:
    line = gpu.judged(gpu.Totals(20.0, 1.0, 0.0, 1.0, None))[1]
    assert math.isnan(line.value)
    assert not line.holds


def ranks_report(
    *ops: tuple[str, str, float], ranks: tuple[int, ...] = (0, 1), each_j: float = 5.0
) -> dict[str, object]:
    return {
        "ranks": [{"rank": rank, "energy_j": each_j} for rank in ranks],
        "devices": {"gpu:0": {"attributed_j": 10.0}},
        "ops": [{"op": op, "phase": "forward", "device": device, "runtime_s": s} for op, device, s in ops],
    }


def test_ranks_make_one_tree_on_the_board_of_the_uuid() -> None:
    good = gpu.judged_ranks(ranks_report(("Net/a", "gpu:0", 1.0), ("Net/b", "gpu:0", 2.0)), "gpu:0")
    assert [line.holds for line in good] == [True] * 4
    alone = ranks_report(("Net/a", "gpu:0", 1.0), ("Net/a", "gpu:GPU-1", 1.0), ranks=(0,), each_j=9.0)
    assert [line.holds for line in gpu.judged_ranks(alone, "gpu:0")] == [False] * 4


def test_what_nvidia_smi_prints_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 71.50\necho '[N/A]'\nsleep 0.3\necho 300.25\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with gpu.smi_averages() as found:
        wait_until(lambda: len(found) == 2, "two readings")
    assert [watts for _, watts in found] == [71.5, 300.25]
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with gpu.smi_averages() as none:
        assert none == []
