"""Nodes of a cluster that sleep: never one that is needed, never without a way back."""

import asyncio
from types import SimpleNamespace

import pytest

from joulery.domain.errors import ActuationError
from joulery.domain.gpu.device import DeviceCapability, DeviceChange, DeviceSpec, DeviceState, Knob, SleepSetting
from joulery.domain.serving.engine import ModelKind, ModelRef, ReplicaSpec
from joulery.domain.serving.service import Slice, SliceKind
from joulery.runtime.serving.nodes.sleep import SleepingNodes, SleepRule, SleepWorld

ONE = Slice(SliceKind.CPU, cores=1)
ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}


def on(node: str) -> ReplicaSpec:
    return ReplicaSpec("sums", "small", ONE, ModelRef(ModelKind.ONNX, "m.onnx"), device=f"node:{node}" if node else "")


class Machine:
    """A node whose commands work, fail, or have it come back late."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name, self.fails, self.asleep = world, name, False, False

    def capability(self) -> DeviceCapability:
        return DeviceCapability(f"node:{self.name}", self.name, Knob.SLEEP, True)

    def observe(self) -> DeviceState[SleepSetting]:
        return DeviceState(SleepSetting(), {"asleep": False})

    def apply(self, wanted: SleepSetting) -> DeviceChange[SleepSetting]:
        return self._change(wanted) if wanted.asleep != self.asleep else DeviceChange(wanted, wanted, 0.0)

    def _change(self, wanted: SleepSetting) -> DeviceChange[SleepSetting]:
        if self.fails:
            raise ActuationError(f"node:{self.name}: exit status 1")
        self.asleep = wanted.asleep
        self.world.said.append((self.name, str(wanted)))
        if wanted.asleep:
            self.world.there.discard(ADDRESSES[self.name])
            self.world.back_s.pop(ADDRESSES[self.name], None)
        elif self.world.back_after_s is not None:
            self.world.back_s[ADDRESSES[self.name]] = self.world.now_s + self.world.back_after_s
        return DeviceChange(SleepSetting(not wanted.asleep), wanted, 0.1)

    def reset(self, memento=None) -> DeviceChange[SleepSetting]:
        return self._change(SleepSetting((memento or {}).get("asleep", False)))


class Holder:
    """Holds leases without files."""

    def __init__(self) -> None:
        self.devices: dict[str, Machine] = {}

    @property
    def held(self):
        return tuple(SimpleNamespace(name=name) for name in self.devices)

    def set(self, device, spec, wanted, reason):
        done = device.apply(wanted)
        self.devices[f"node-{device.name}.sleep"] = device
        return done

    def release(self, name):
        device = self.devices[name]
        done = device.reset({"asleep": False})
        del self.devices[name]
        return done


class World:
    """Three nodes: ``a`` never sleeps."""

    def __init__(self) -> None:
        self.now_s, self.there, self.back_s = 1000.0, set(ADDRESSES.values()), {}
        self.running: list[ReplicaSpec] = [on("a"), on("b"), on("c")]
        self.said, self.records, self.back_after_s = [], [], 30.0
        self.machines = {name: Machine(self, name) for name in "bc"}
        self.holder = Holder()
        rules = [
            SleepRule(name, ADDRESSES[name], 300.0, 60.0, machine, DeviceSpec("node-commands", {"node": name}))
            for name, machine in self.machines.items()
        ]
        world = SleepWorld(lambda: self.running, self.present, self.records.append, lambda: self.now_s, self.pause)
        self.sleep = SleepingNodes(rules, self.holder, world)

    async def present(self):
        self.there |= {address for address, at_s in self.back_s.items() if at_s <= self.now_s}
        self.back_s = {address: at_s for address, at_s in self.back_s.items() if at_s > self.now_s}
        return frozenset(self.there)

    async def pause(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)

    async def passes(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now_s += 1.0
            await self.sleep.step(await self.present())

    def kinds(self):
        return [(one.decision.kind, one.decision.target, one.outcome) for one in self.records]


async def test_a_node_sleeps_once_it_was_empty_for_long_enough_and_wakes_for_a_layout():
    world = World()
    world.running = [on("a"), on("b")]
    await world.passes(300)
    assert world.said == [] and not world.sleep.asleep
    await world.passes(2)
    assert world.said == [("c", "asleep")] and world.sleep.asleep == {"c"}
    await world.passes(900)
    assert world.said == [("c", "asleep")], "b has a replica"
    assert world.sleep.on_sleeping([on("a"), on("c")]) == {"c"}
    begin_s = world.now_s
    await world.sleep.wake({"a", "c"})
    assert world.said == [("c", "asleep"), ("c", "awake")] and not world.sleep.asleep
    assert 30.0 <= world.now_s - begin_s <= 32.0 and world.holder.devices == {}
    assert world.kinds() == [("sleep_node", "c", "applied"), ("wake_node", "c", "applied")]
    assert "after 30 s" in world.records[-1].detail and world.records[0].decision.reason.startswith("c sleeps")


async def test_a_node_that_a_change_needs_does_not_fall_asleep_under_it():
    world = World()
    world.running = [on("a")]
    await world.passes(299)
    async with world.sleep.needed([on("b")]):
        await world.passes(600)
        assert world.said == [("c", "asleep")]
    await world.passes(299)
    assert world.said == [("c", "asleep")], "it has been free for less than the time since"
    await world.passes(3)
    assert world.said == [("c", "asleep"), ("b", "asleep")]


async def test_nothing_sleeps_while_the_cluster_is_lost_nor_a_node_that_is_away():
    world = World()
    world.running = []
    await world.passes(1000)
    assert world.said == [], "no replica is known: the nodes are not empty"
    world.running = [on("a")]
    world.there = {ADDRESSES["a"], ADDRESSES["b"]}
    await world.passes(310)
    assert world.said == [("b", "asleep")], "c is not in the cluster, and what it does is not known"


async def test_a_node_that_does_not_come_back_is_an_error_and_is_not_waited_for_again_at_once():
    world = World()
    world.running = [on("a")]
    await world.passes(302)
    world.back_after_s = None
    begin_s = world.now_s
    with pytest.raises(ActuationError, match="b did not come back"):
        await world.sleep.wake({"b"})
    assert world.now_s - begin_s == pytest.approx(121.0, abs=2.0), "twice what its site file says"
    assert world.sleep.asleep == {"b", "c"}
    begin_s = world.now_s
    with pytest.raises(ActuationError, match="tried again in"):
        await world.sleep.wake({"b"})
    assert world.now_s == begin_s
    world.now_s, world.back_after_s = world.now_s + 601.0, 5.0
    await world.sleep.wake({"b"})
    assert world.sleep.asleep == {"c"} and world.said[-1] == ("b", "awake")
    assert world.kinds()[-2:] == [("wake_node", "b", "failed"), ("wake_node", "b", "applied")]


async def test_one_of_two_that_comes_back_is_awake_though_the_other_is_lost():
    world = World()
    world.running = [on("a")]
    await world.passes(302)
    world.machines["c"].fails = True
    with pytest.raises(ActuationError, match="exit status 1"):
        await world.sleep.wake({"b", "c"})
    world.now_s += 601.0
    await world.sleep.wake({"b"})
    assert world.sleep.asleep == {"c"}
    assert list(world.holder.devices) == ["node-c.sleep"], "its lease stays, for the watchdog"


async def test_a_command_that_fails_is_tried_again_after_a_while():
    world = World()
    world.running = [on("a"), on("c")]
    world.machines["b"].fails = True
    await world.passes(800)
    assert world.kinds() == [("sleep_node", "b", "failed")]
    world.machines["b"].fails = False
    await world.passes(600)
    assert world.kinds() == [("sleep_node", "b", "failed"), ("sleep_node", "b", "applied")]


@pytest.mark.parametrize("lease_is_lost", [False, True])
async def test_a_node_that_others_woke_is_awake_and_sleeps_again_when_it_was_empty_for_long_enough(lease_is_lost):
    world = World()
    world.running = [on("a"), on("c")]
    await world.passes(302)
    assert world.sleep.asleep == {"b"}
    await world.passes(10)
    world.there.add(ADDRESSES["b"])
    if lease_is_lost:
        world.holder.devices.clear()
    await world.passes(5)
    assert world.sleep.asleep == set() and world.sleep.on_sleeping([on("b")]) == set()
    assert world.holder.devices == {}, "nothing is to be taken back"
    await world.passes(302)
    assert world.said == [("b", "asleep"), ("b", "awake"), ("b", "asleep")] and list(world.holder.devices) == [
        "node-b.sleep"
    ]


@pytest.mark.parametrize("lease_is_lost", [False, True])
async def test_a_node_that_others_woke_is_not_counted_as_asleep_while_its_command_fails(lease_is_lost):
    world = World()
    world.running = [on("a"), on("c")]
    await world.passes(312)
    world.there.add(ADDRESSES["b"])
    world.machines["b"].fails = True
    if lease_is_lost:
        world.holder.devices.clear()
    await world.passes(400)
    assert world.kinds() == [
        ("sleep_node", "b", "applied"),
        ("wake_node", "b", "failed"),
        ("sleep_node", "b", "failed"),
    ]
    assert world.sleep.asleep == set() and ADDRESSES["b"] in world.there, "it was never sent to sleep again"
    world.machines["b"].fails = False
    await world.passes(600)
    assert world.sleep.asleep == {"b"} and ADDRESSES["b"] not in world.there
    assert world.said == [("b", "asleep"), ("b", "awake"), ("b", "asleep")] and world.kinds()[3:] == [
        ("sleep_node", "b", "applied")
    ]


async def test_nodes_that_are_missing_at_the_start_are_woken():
    world = World()
    world.there = {ADDRESSES["a"], ADDRESSES["c"]}
    await world.sleep.wake()
    assert world.said == [("b", "awake")] and ADDRESSES["b"] in world.there
