"""The governed clocks of a site, and who lends them."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from joulery.app.wiring.governed_clocks import governed_clocks
from joulery.config import load
from joulery.domain.gpu.device import ClockSetting
from joulery.store.leases import LeaseBook
from tests.fakes.cpufreq import cpu_machine

SITE = """
joulery: 1
mode: MODE
fleet:
  clocks: [{device: cpu, lease: 40 s}, {device: emulated, lease: 20 s}]
"""


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    cpu_machine(tmp_path, monkeypatch)


def site(folder, text):
    (folder / "site.yaml").write_text(text)
    return load(folder / "site.yaml")


def opened(site):
    async def run():
        async with AsyncExitStack() as stack:
            clocks, holder = await governed_clocks(site, stack, lambda message: None)
            return [clock.name for clock in clocks], holder

    return asyncio.run(run())


def test_mode_act_leases_settings_for_the_shortest_term_until_the_stack_unwinds(tmp_path):
    async def run():
        async with AsyncExitStack() as stack:
            acting = site(tmp_path, SITE.replace("MODE", "act"))
            clocks, holder = await governed_clocks(acting, stack, lambda message: None)
            assert [clock.name for clock in clocks] == ["cpu", "emulated:0"]
            emulated = clocks[1]
            holder.set(emulated.device, emulated.spec, ClockSetting(800.0), "nothing waits")
            (lease,) = holder.held
            assert LeaseBook().read(lease.name).lasts_s == 20.0
        assert LeaseBook().names() == ()

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["advise", "shadow"])
def test_other_modes_take_no_lease(tmp_path, mode):
    assert opened(site(tmp_path, SITE.replace("MODE", mode))) == (["cpu", "emulated:0"], None)


def test_a_site_without_clocks_needs_no_lease_holder(tmp_path):
    assert opened(site(tmp_path, "joulery: 1\nmode: act\n")) == ([], None)
