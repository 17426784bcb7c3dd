import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from joulery.app.profiling import service_profile as bench
from joulery.app.profiling.service_profile import (
    age_text,
    measure_profile,
    obtain_profile,
    power_line,
    read_profile,
    write_profile,
)
from joulery.app.serving.service import service_setup
from joulery.config.parsing.reading import load
from joulery.domain.energy.channel import Channel, MeterSpec, ReadingKind
from joulery.domain.energy.power import BusyTimes, PowerTrace
from joulery.domain.errors import CapabilityError, ConfigError, DataError
from joulery.domain.quality import Quality
from joulery.runtime.profiling.slice_timings import Plan
from joulery.store.run.readings import RunReadings
from tests.runtime.site_files import toy_site

METERS = (MeterSpec("cpu-model", {"idle_w": 20.0, "max_w": 60.0, "band_ratio": 0.3}),)


@pytest.fixture
def setup(tmp_path):
    site = load(toy_site(tmp_path))
    return service_setup(site, site.services[0], tmp_path)


async def test_a_service_is_profiled_for_real_and_the_profile_kept(tmp_path, setup, monkeypatch):
    monkeypatch.setattr(bench, "REST_S", 0.3)
    lines = []
    monkeypatch.setattr(bench, "power_line", lambda readings: lines.append(power_line(readings)) or lines[-1])
    common = {"given": None, "cache": tmp_path / "cache", "folder": None, "meters": METERS}
    first = await obtain_profile(setup, plan=Plan(2, 8, 6), **common)
    profile = first.profile
    assert first.source == "measured now" and first.file is not None and first.file.exists()
    for entry in profile.entries:
        expected_s = {"small": 0.002, "large": 0.006}[entry.variant]
        assert entry.alone.mean_cpu_s >= expected_s  # the toy works until its process has used so much
        assert entry.alone.mean_s > 0
        assert entry.startup_s > 0 and entry.startup_cpu_s > 0
    assert sorted((e.variant, e.slice.cores) for e in profile.entries) == [
        ("large", 1),
        ("large", 2),
        ("small", 1),
        ("small", 2),
    ]
    assert (profile.quality, profile.meter, profile.band_ratio) == (Quality.MODELLED, "cpu-model", 0.3)
    assert profile.idle_w == pytest.approx(20.0)
    # What the meter and the kernel's clock ticks say of so short a time is theirs; the profile keeps what they said.
    (line, others_cores) = lines[0]
    assert line.active_w > 0 and {entry.active_w for entry in profile.entries} == {line.active_w}
    assert profile.machine["others_busy_cores"] == round(others_cores, 3)
    profile = replace(profile, machine={**profile.machine, "others_busy_cores": 0.1})  # on any machine
    write_profile(first.file, profile)
    again = await obtain_profile(setup, **common)
    assert again.source == "kept from an earlier start" and again.profile.as_dict() == profile.as_dict()
    given = await obtain_profile(setup, **{**common, "given": first.file})
    assert given.source == f"from {first.file}"


async def test_a_profile_of_a_busy_machine_is_not_reused_and_says_so(tmp_path, setup, monkeypatch):
    from tests.app.serving.test_service import profile

    busy = [1.2, 0.0]

    async def measured(*args, **options):
        return replace(profile(), machine={"others_busy_cores": busy.pop(0)})

    monkeypatch.setattr(bench, "measure_profile", measured)
    common = {"given": None, "cache": tmp_path / "cache", "folder": None, "meters": METERS}
    first = await obtain_profile(setup, **common)
    assert first.source == "measured now" and bench.busy_cores(first.profile) == 1.2
    second = await obtain_profile(setup, **common)
    assert second.source.startswith("measured now") and "1.2 cores" in second.source
    third = await obtain_profile(setup, **common)
    assert third.source == "kept from an earlier start" and not bench.busy_cores(third.profile)


async def test_what_a_kept_profile_depends_on(setup, monkeypatch):
    key = bench._key(setup, METERS)
    assert key == bench._key(setup, METERS)
    others = [
        (replace(setup, models={**setup.models, "small": setup.models["large"]}), METERS),
        (replace(setup, partitions=setup.partitions[:1]), METERS),
        (setup, None),
    ]
    assert len({key, *(bench._key(*other) for other in others)}) == 4
    monkeypatch.setattr(bench, "machine", lambda: {"processor": "another"})
    assert bench._key(setup, METERS) != key


async def test_a_given_profile_must_know_every_variant_on_every_slice(tmp_path, setup):
    from tests.app.serving.test_service import profile

    file = tmp_path / "p.json"
    write_profile(file, replace(profile(), entries=profile().entries[:-1]))
    with pytest.raises(DataError, match="large was not measured on cpu:2"):
        await obtain_profile(setup, given=file, cache=tmp_path, folder=None, meters=METERS)


async def test_a_profile_that_cannot_be_kept_is_used_all_the_same(tmp_path, setup, monkeypatch):
    from tests.app.serving.test_service import profile

    async def measured(*args, **options):
        return profile()

    monkeypatch.setattr(bench, "measure_profile", measured)
    (tmp_path / "cache").write_text("in the way")
    found = await obtain_profile(setup, given=None, cache=tmp_path / "cache", folder=None, meters=METERS)
    assert found.file is None and found.source.startswith("measured now; not kept: cannot write")


async def test_photographs_for_a_model_of_numbers_are_refused_and_nothing_is_left_running(tmp_path, setup):
    with pytest.raises(ConfigError, match="photographs cannot be sent"):
        await measure_profile(setup, folder=tmp_path, meters=METERS)


async def test_a_meter_that_is_not_there_ends_it_at_once(setup, tmp_path):
    missing = (MeterSpec("replay", {"file": str(tmp_path / "none.csv")}),)
    with pytest.raises((CapabilityError, DataError, ConfigError)):
        await measure_profile(setup, folder=None, meters=missing)


def test_a_damaged_profile_is_one_clear_error(tmp_path):
    file = tmp_path / "p.json"
    for content, words in (("{", "not JSON"), ("[]", "not a profile"), ('{"schema": "x"}', "not a profile")):
        file.write_text(content)
        with pytest.raises(DataError, match=words) as caught:
            read_profile(file)
        assert "p.json" in str(caught.value)
    with pytest.raises(DataError, match="no such file"):
        read_profile(tmp_path / "none.json")


def readings(idle_w: float = float("nan")) -> RunReadings:
    """Ten seconds of a machine whose power is 10 W + 5 W a busy core, load rising from 0 to 2 cores."""
    t_ns = 1_700_000_000_000_000_000 + np.arange(101) * 100_000_000
    cores = np.repeat(np.linspace(0, 2, 10), 10)
    channel = Channel("cpu:0", "package", ReadingKind.COUNTER, "rapl", Quality.MEASURED, idle_w=idle_w)
    trace = PowerTrace(channel, t_ns, np.concatenate([[0], np.cumsum(0.1 * (10 + 5 * cores))]), 0.1)
    return RunReadings((trace,), {"cpu:0": BusyTimes(t_ns, 0.1 * cores * 0.75, 0.1 * cores, 2)})


def test_the_power_line_of_recorded_evidence():
    line, others_cores = power_line(readings())
    assert line.idle_w == pytest.approx(10.0, abs=0.05) and line.active_w == pytest.approx(5.0, rel=0.01)
    assert others_cores == pytest.approx(0.25, abs=0.01)
    assert power_line(readings(10.0))[0].idle_w == 10.0
    gpu = readings().traces[0].channel._replace(device="gpu:0")
    blind = RunReadings(
        (PowerTrace(gpu, readings().traces[0].t_ns, readings().traces[0].values, 0.1),), readings().busy
    )
    with pytest.raises(DataError, match=r"no meter .*power of the CPUs"):
        power_line(blind)
    with pytest.raises(DataError, match="no meter sees"):
        power_line(RunReadings(readings().traces, {}))


def test_age_in_words():
    from tests.app.serving.test_service import profile

    made = replace(profile(), created_s=1000.0)
    assert [age_text(made, 1000.0 + s) for s in (5, 61, 7200, 90000)] == [
        "just now",
        "1 minute ago",
        "2 hours ago",
        "1 day ago",
    ]


def test_the_verb(tmp_path, capsys, monkeypatch):
    import subprocess

    site = toy_site(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "joulery", "profile", "small", str(site), "--slices", "1", "--runs", "200", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(e["variant"], e["slice"]) for e in found["entries"]] == [("small", "cpu:1")]
    assert found["entries"][0]["alone"]["summary"]["runs"] == 200
    for arguments, words in ((["big"], "no such service or variant"), (["sums", "--slices", "9"], "not a partition")):
        name, *rest = arguments
        done = subprocess.run(
            [sys.executable, "-m", "joulery", "profile", name, str(site), *rest],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
