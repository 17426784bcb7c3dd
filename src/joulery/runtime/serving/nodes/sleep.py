"""Nodes of a cluster that sleep while they are empty.

A node without replicas is sent to sleep after a while by the command of the site file, and is woken before a layout
that needs it runs. The setting is leased: it is reverted when the session ends, and by the watchdog when its process
dies.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from joulery.domain.decisions import Decision
from joulery.domain.errors import ActuationError, JouleryError
from joulery.domain.gpu.device import DeviceSpec, SleepSetting, lease_name
from joulery.domain.ports import Device
from joulery.domain.serving.engine import NODE, ReplicaSpec
from joulery.domain.serving.timeline import DecisionRecord
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.session.driver import APPLIED, FAILED

SLEEP_NODE, WAKE_NODE = "sleep_node", "wake_node"
WANTED = "replicas are to run on it"
RETRY_S = 600.0
"""Seconds between two commands for a node that failed."""
PATIENCE = 2.0
"""A node may take this many times the waking time of its site file before it is given up."""
_LOOK_S = 1.0
"""Seconds between two checks whether a node is there."""


@dataclass(frozen=True, slots=True)
class SleepRule:
    """Sleep rule of a node.

    Attributes:
        name: Its name.
        address: Its address in the cluster.
        after_s: Seconds for which it must have been empty.
        wakes_s: Seconds that it takes to come back.
        device: Device that sends it to sleep and wakes it.
        spec: How another process opens that device, for the watchdog.
    """

    name: str
    address: str
    after_s: float
    wakes_s: float
    device: Device[SleepSetting]
    spec: DeviceSpec


@dataclass(frozen=True, slots=True)
class SleepWorld:
    """Access to replicas, cluster, log and clock.

    Attributes:
        specs: Returns every present replica.
        present: Addresses of the nodes that answer.
        record: Keeps a decision and its outcome.
        now_s: A clock that never goes back; Unix seconds for the log.
        pause: Waits for a number of seconds.
    """

    specs: Callable[[], Iterable[ReplicaSpec]]
    present: Callable[[], Awaitable[Collection[str]]]
    record: Callable[[DecisionRecord], None]
    now_s: Callable[[], float]
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep


class SleepingNodes:
    """Sends empty nodes to sleep, and wakes them.

    Args:
        rules: Sleep rule of each node; empty where no node sleeps.
        holder: Holds the leases; None where there are no rules.
        world: Access to replicas, cluster, log and clock.

    Attributes:
        asleep: Those that were sent to sleep and are not back.
    """

    def __init__(self, rules: Sequence[SleepRule], holder: LeaseHolder | None, world: SleepWorld) -> None:
        self._rules = {rule.name: rule for rule in rules}
        self._holder, self._world = holder, world
        self._turn = asyncio.Lock()
        self._needed: Counter[str] = Counter()
        self._empty_s: dict[str, float] = {}
        self._retry_s: dict[str, float] = {}
        self._left: set[str] = set()
        self._owed: set[str] = set()
        self.asleep: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        """The nodes that may sleep."""
        return frozenset(self._rules)

    @asynccontextmanager
    async def needed(self, specs: Iterable[ReplicaSpec]) -> AsyncIterator[None]:
        """Send no node of these replicas to sleep while the block runs."""
        names = nodes_of(specs)
        self._needed.update(names)
        try:
            yield
        finally:
            self._needed.subtract(names)

    def on_sleeping(self, specs: Iterable[ReplicaSpec]) -> set[str]:
        """The nodes of these replicas that sleep."""
        return nodes_of(specs) & self.asleep

    async def wake(self, names: Collection[str] | None = None) -> None:
        """Wake the nodes that are not in the cluster, and wait until they are back.

        Args:
            names: The nodes; every one that may sleep when None.

        Raises:
            ActuationError: A node did not come back, or failed to within the last ten minutes.
            CapabilityError: The command of a node is missing.
        """
        asked = [rule for name, rule in self._rules.items() if names is None or name in names]
        if not asked:
            return
        async with self._turn:
            there, begin_s = await self._world.present(), self._world.now_s()
            missing = [rule for rule in asked if rule.name in self.asleep or rule.address not in there]
            for rule in missing:
                left_s = self._retry_s.get(rule.name, -math.inf) - self._world.now_s()
                if left_s > 0:
                    raise ActuationError(f"node {rule.name} failed before; it is tried again in {left_s:.0f} s")
            try:
                for rule in missing:
                    await self._take_back(rule)
                while missing:
                    missing = await self._not_back(missing, begin_s)
            except JouleryError as error:
                for rule in missing:
                    self._retry_s[rule.name] = self._world.now_s() + RETRY_S
                    self._record(WAKE_NODE, rule, WANTED, FAILED, str(error))
                raise

    async def _take_back(self, rule: SleepRule) -> None:
        """Run the command that wakes a node, and end its lease where there is one."""
        assert self._holder is not None
        lease = lease_name(rule.device.capability().device, rule.spec.knob)
        if any(held.name == lease for held in self._holder.held):
            await asyncio.to_thread(self._holder.release, lease)
        else:
            await asyncio.to_thread(rule.device.reset)  # also where another process had it sleep
        self._owed.discard(rule.name)

    async def _not_back(self, rules: Sequence[SleepRule], begin_s: float) -> list[SleepRule]:
        """Check once which nodes are back, and mark them awake; return the others, after a pause if there are any.

        Raises:
            ActuationError: A node has taken too long.
        """
        there, took_s = await self._world.present(), self._world.now_s() - begin_s
        for rule in rules:
            if rule.address in there:
                self.asleep.discard(rule.name)
                self._left.discard(rule.name)
                self._record(WAKE_NODE, rule, WANTED, APPLIED, f"it was back after {took_s:.0f} s")
        away = [rule for rule in rules if rule.address not in there]
        late = [rule.name for rule in away if took_s > PATIENCE * rule.wakes_s]
        if late:
            raise ActuationError(
                f"{', '.join(late)} did not come back to the cluster within {took_s:.0f} s",
                hint="the command under wake has to start Ray on the node too; wakes_in states how long it may take",
            )
        if away:
            await self._world.pause(_LOOK_S)
        return away

    async def step(self, present: Collection[str]) -> None:
        """Send nodes to sleep that have been empty for long enough.

        Args:
            present: Addresses of the nodes that answer.
        """
        if self._turn.locked():
            return
        async with self._turn:
            await self._returned(present)
            running = nodes_of(self._world.specs())
            if not running:  # the cluster is lost, and nothing is known of its nodes
                self._empty_s.clear()
                return
            now_s = self._world.now_s()
            for name, rule in self._rules.items():
                if name in running or self._needed[name] or name in self.asleep or rule.address not in present:
                    self._empty_s.pop(name, None)
                    continue
                since_s = self._empty_s.setdefault(name, now_s)
                if now_s - since_s >= rule.after_s and now_s >= self._retry_s.get(name, -math.inf):
                    await self._send_to_sleep(rule, now_s - since_s)

    async def _returned(self, present: Collection[str]) -> None:
        """Find nodes that others have woken, and end their leases: the setting of this process no longer holds."""
        for name in tuple(self.asleep):
            if self._rules[name].address not in present:
                self._left.add(name)
            elif name in self._left:
                try:
                    await self._take_back(self._rules[name])
                except JouleryError as error:  # it is awake, whatever its command reports
                    self._owed.add(name)
                    self._record(WAKE_NODE, self._rules[name], "others have woken it", FAILED, str(error))
                self.asleep.discard(name)
                self._left.discard(name)

    async def _send_to_sleep(self, rule: SleepRule, empty_s: float) -> None:
        assert self._holder is not None
        reason = f"no replica was on it for {empty_s:.0f} s"
        try:
            if rule.name in self._owed:  # its device has it as asleep, and would do nothing
                await self._take_back(rule)
            await asyncio.to_thread(self._holder.set, rule.device, rule.spec, SleepSetting(asleep=True), reason)
        except JouleryError as error:
            self._retry_s[rule.name] = self._world.now_s() + RETRY_S
            self._record(SLEEP_NODE, rule, reason, FAILED, str(error))
            return
        self.asleep.add(rule.name)
        self._empty_s.pop(rule.name, None)
        self._record(SLEEP_NODE, rule, reason, APPLIED)

    def _record(self, kind: str, rule: SleepRule, reason: str, outcome: str, detail: str = "") -> None:
        text = f"{rule.name} {'sleeps' if kind == SLEEP_NODE else 'is woken'}: {reason}"
        decision = Decision(kind, rule.name, kind == SLEEP_NODE, "node-sleep", text, "consolidation")
        self._world.record(DecisionRecord(self._world.now_s(), decision, outcome, detail))


def nodes_of(specs: Iterable[ReplicaSpec]) -> set[str]:
    """The nodes that replicas are to be on, by name."""
    return {spec.device.removeprefix(NODE) for spec in specs if spec.device.startswith(NODE)}
