"""A machine that commands send to sleep and wake."""

import sys

import pytest

from joulery.adapters.devices.node_commands import NodeCommands
from joulery.app.wiring.devices import open_device
from joulery.domain.errors import ActuationError, CapabilityError, ConfigError
from joulery.domain.gpu.device import DeviceSpec, Knob, SleepSetting


def notes(folder, word: str) -> tuple[str, ...]:
    """A command that writes a word down."""
    return sys.executable, "-c", f"open({str(folder / 'log')!r}, 'a').write({word + ' '!r})"


def node(folder) -> NodeCommands:
    return NodeCommands("south", notes(folder, "sleep"), notes(folder, "wake"))


def test_it_sleeps_wakes_and_is_reset_by_another_process_that_knows_nothing_of_it(tmp_path):
    device = node(tmp_path)
    found = device.observe()
    assert (found.setting, found.memento) == (SleepSetting(), {"asleep": False})
    done = device.apply(SleepSetting(asleep=True))
    assert (str(done.before), str(done.after)) == ("awake", "asleep") and device.observe().setting.asleep
    node(tmp_path).reset(found.memento)
    device.apply(SleepSetting())
    device.apply(SleepSetting())
    node(tmp_path).reset()
    assert (tmp_path / "log").read_text().split() == ["sleep", "wake", "wake", "wake"]


def test_the_watchdog_opens_it_from_its_spec(tmp_path):
    commands = {"sleep": list(notes(tmp_path, "sleep")), "wake": list(notes(tmp_path, "wake"))}
    spec = DeviceSpec("node-commands", {"node": "south", **commands})
    able = open_device(spec).capability()
    assert (able.device, able.knob, spec.knob, able.settable) == ("node:south", Knob.SLEEP, Knob.SLEEP, True)


def test_a_command_that_fails_hangs_or_is_missing_is_one_clear_error(tmp_path):
    fails = (sys.executable, "-c", "import sys; sys.exit('no route to south')")
    with pytest.raises(ActuationError, match="no route to south"):
        NodeCommands("south", fails, fails).reset()
    hangs = (sys.executable, "-c", "import signal; signal.pause()")
    with pytest.raises(ActuationError, match=r"within 0\.2 s"):
        NodeCommands("south", hangs, hangs, timeout_s=0.2).apply(SleepSetting(asleep=True))
    missing = NodeCommands("south", ("no-such-program-here",), notes(tmp_path, "wake"))
    assert not missing.capability().settable and "no-such-program-here" in missing.capability().detail
    with pytest.raises(CapabilityError, match="no such program"):
        missing.apply(SleepSetting(asleep=True))
    assert not missing.observe().setting.asleep
    (tmp_path / "text").write_text("no program")
    with pytest.raises(CapabilityError, match="Permission denied"):
        NodeCommands("south", (str(tmp_path / "text"),), fails).apply(SleepSetting(asleep=True))
    with pytest.raises(ConfigError, match="a command that puts"):
        NodeCommands("south", (), fails)
