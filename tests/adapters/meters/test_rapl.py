import math
import os
from pathlib import Path

import pytest

from joulery.adapters.meters.rapl import GRANT, open_rapl
from joulery.domain.energy.channel import ReadingKind
from joulery.domain.errors import CapabilityError
from joulery.domain.quality import Quality
from tests.adapters.meters.powercap import Powercap


@pytest.fixture
def cap(tmp_path: Path) -> Powercap:
    return Powercap(tmp_path / "powercap")


def named(root: Path) -> dict[tuple[str, str], float]:
    meter = open_rapl(root)
    values = {(c.device, c.component): v for c, v in zip(meter.channels, meter.read(), strict=True)}
    meter.close()
    return values


def test_a_client_counts_package_and_dram_but_neither_core_nor_uncore_nor_psys(cap: Powercap) -> None:
    cap.zone("intel-rapl:0", "package-0", 10_000_000)
    cap.zone("intel-rapl:0:0", "core", 6_000_000)
    cap.zone("intel-rapl:0:1", "uncore", 1_000_000)
    cap.zone("intel-rapl:0:2", "dram", 2_500_000)
    cap.zone("intel-rapl:1", "psys", 30_000_000)
    assert named(cap.root) == {("cpu:0", "package"): 10.0, ("cpu:0", "dram"): 2.5}


def test_the_socket_is_in_the_name_not_in_the_folder(cap: Powercap) -> None:
    cap.zone("intel-rapl:0", "package-1", 1_000_000)
    cap.zone("intel-rapl:0:0", "dram", 100_000)
    cap.zone("intel-rapl:1", "package-0", 2_000_000)
    assert named(cap.root) == {("cpu:0", "package"): 2.0, ("cpu:1", "package"): 1.0, ("cpu:1", "dram"): 0.1}


def test_the_dies_of_a_package_are_components_of_one_socket(cap: Powercap) -> None:
    for die in range(2):
        cap.zone(f"intel-rapl:{die}", f"package-0-die-{die}", (die + 1) * 1_000_000)
        cap.zone(f"intel-rapl:{die}:0", "dram", (die + 1) * 100_000)
    assert named(cap.root) == {
        ("cpu:0", "package-die-0"): 1.0,
        ("cpu:0", "package-die-1"): 2.0,
        ("cpu:0", "dram-die-0"): 0.1,
        ("cpu:0", "dram-die-1"): 0.2,
    }


def test_mmio_shows_the_same_counters_and_is_left_out(cap: Powercap) -> None:
    cap.zone("intel-rapl:0", "package-0", 1_000_000)
    cap.zone("intel-rapl-mmio:0", "package-0", 1_000_000)
    (cap.root / "intel-rapl").mkdir()
    meter = open_rapl(cap.root)
    assert len(meter.channels) == 1
    assert meter.notes() == ()
    meter.close()


def test_a_package_named_twice_is_counted_once_and_said(cap: Powercap) -> None:
    cap.zone("intel-rapl:0", "package-0", 1_000_000)
    cap.zone("intel-rapl:1", "package-0", 9_000_000)
    meter = open_rapl(cap.root)
    assert meter.read() == (1.0,)
    assert meter.notes() == ("cpu:0 package: RAPL zone intel-rapl:1 shows it a second time and is left out",)
    meter.close()


def test_more_than_ten_zones_keep_their_order(cap: Powercap) -> None:
    for number in range(12):
        cap.zone(f"intel-rapl:{number}", f"package-{number}", number * 1_000_000)
    assert named(cap.root) == {(f"cpu:{number}", "package"): float(number) for number in range(12)}


def test_the_platform_counts_only_where_there_is_no_package(cap: Powercap) -> None:
    cap.zone("intel-rapl:0", "psys", 7_000_000)
    assert named(cap.root) == {("machine", "psys"): 7.0}


def test_a_channel_says_what_it_is(cap: Powercap) -> None:
    cap.zone("intel-rapl:0", "package-0", range_uj=65_532_610_987)
    meter = open_rapl(cap.root)
    (channel,) = meter.channels
    assert (channel.kind, channel.meter, channel.quality) == (ReadingKind.COUNTER, "rapl", Quality.MEASURED)
    assert channel.wrap_j == pytest.approx(65532.610987)
    meter.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything; see the next test")
def test_permission_denied_by_the_kernel(cap: Powercap) -> None:
    (cap.zone("intel-rapl:0", "package-0") / "energy_uj").chmod(0)
    with pytest.raises(CapabilityError):
        open_rapl(cap.root)


def test_permission_denied_says_the_line_that_grants_it(cap: Powercap, monkeypatch: pytest.MonkeyPatch) -> None:
    cap.zone("intel-rapl:0", "package-0")
    cap.zone("intel-rapl:0:0", "dram")
    real_open, opened = os.open, []

    def open_(file: Path, flags: int, *rest: int) -> int:
        if "intel-rapl:0/energy_uj" in str(file):
            raise PermissionError(13, "Permission denied", str(file))
        opened.append(real_open(file, flags, *rest))
        return opened[-1]

    monkeypatch.setattr(os, "open", open_)
    with pytest.raises(CapabilityError, match=r"may not be read.*energy_uj: permission denied") as caught:
        open_rapl(cap.root)
    assert caught.value.grant == GRANT == "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj"
    assert GRANT in caught.value.hint
    for fd in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_no_powercap_says_where_there_would_be_one(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match=r"no RAPL counters in .*nothing") as caught:
        open_rapl(tmp_path / "nothing")
    assert caught.value.grant is None
    assert "container" in caught.value.hint


def test_a_zone_without_its_files_is_left_out_with_a_note(cap: Powercap) -> None:
    cap.zone("intel-rapl:0", "package-0", 1_000_000)
    (cap.zone("intel-rapl:1", "package-1") / "max_energy_range_uj").write_text("many\n")
    meter = open_rapl(cap.root)
    assert meter.read() == (1.0,)
    assert "cpu:1 package: RAPL zone intel-rapl:1 is left out" in meter.notes()[0]
    meter.close()
    (cap.root / "intel-rapl:0" / "energy_uj").unlink()
    with pytest.raises(CapabilityError, match="no RAPL counter can be read"):
        open_rapl(cap.root)


def test_a_counter_that_fails_is_missing_and_noted_once_and_so_is_its_return(cap: Powercap) -> None:
    cap.zone("intel-rapl:0", "package-0", 1_000_000)
    cap.zone("intel-rapl:1", "package-1", 2_000_000)
    meter = open_rapl(cap.root)
    cap.set("intel-rapl:1", "")
    for _ in range(3):
        first, second = meter.read()
        assert first == 1.0
        assert math.isnan(second)
    assert [note[:14] for note in meter.notes()] == ["cpu:1 package:"]
    cap.set("intel-rapl:1", 3_000_000)
    assert meter.read() == (1.0, 3.0)
    assert meter.notes() == ("cpu:1 package: RAPL counter can be read again",)
    assert meter.notes() == ()
    meter.close()


def test_microjoules_are_not_rounded(cap: Powercap) -> None:
    cap.zone("intel-rapl:0", "package-0", 123_456_789_013)
    assert named(cap.root)[("cpu:0", "package")] == pytest.approx(123456.789013, abs=1e-9)
