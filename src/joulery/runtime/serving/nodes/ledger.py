"""Account the nodes of a cluster while a site is served: joules by their meters, grams by their grids, and ranks."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from joulery.accounting.cluster_nodes import NodeReading, by_node
from joulery.accounting.node_energy import EnergyTotal
from joulery.domain.errors import JouleryError
from joulery.domain.quality import Quality
from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.policies.serving.node_order import NodeOrder
from joulery.runtime.serving.live_intensity import LiveIntensity

Answers = Mapping[str, Mapping[str, Any]]
"""Answers of each node's meter, by address: a reading, or ``refusal``; ``gone`` too where the node may be lost."""


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node that the site file names.

    Attributes:
        name: Its name.
        address: Its address in the cluster.
        grid: Its carbon intensity.
    """

    name: str
    address: str
    grid: LiveIntensity


@dataclass(slots=True, eq=False)
class _Account:
    """Account of one node."""

    name: str
    address: str
    grid: LiveIntensity | None
    total: EnergyTotal = field(default_factory=EnergyTotal)
    own_j: float = 0.0
    covered_s: float = 0.0
    answered: int = 0
    asleep_s: float = 0.0
    last: NodeReading | None = None
    refusal: str = ""
    gone: bool = False


class NodeLedger:
    """Joules and grams of every node of a cluster.

    Args:
        read: Reads the meters of all nodes.
        placed: The nodes that the site file names; others that answer are counted without grams.
        pue: Facility energy per IT energy.
        now_s: Unix seconds.
        warn: Receives warnings; a text may be repeated.

    Attributes:
        asleep: Names of the nodes that were sent to sleep and are not back; set by another object.
        present: Addresses of the nodes that answered the last reading.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Answers]],
        placed: Sequence[PlacedNode],
        pue: float,
        now_s: Callable[[], float],
        warn: Callable[[str], None],
    ) -> None:
        self._read, self._pue, self._now_s, self._warn = read, pue, now_s, warn
        self._accounts = {node.address: _Account(node.name, node.address, node.grid) for node in placed}
        self._placed = {node.name: node.grid for node in placed}
        self._from_s = self._looked_s = math.nan
        self._looking = asyncio.Lock()
        self._named: dict[str, _Account | None] = {}
        self.ranks: dict[str, int] = {}
        self.present: frozenset[str] = frozenset()
        self.moves: Counter[str] = Counter()
        self.asleep: Collection[str] = frozenset()

    async def look(self) -> None:
        """Read every meter, and book the joules since the last reading at the grids' intensities."""
        async with self._looking:
            await self._look()

    async def _look(self) -> None:
        for grid in self._placed.values():
            await grid.refresh()
        try:
            answers = await self._read()
        except JouleryError as error:
            self._warn(f"the nodes' meters do not answer: {error}")
            answers = {}
        now_s = self._now_s()
        if math.isnan(self._from_s):
            self._from_s = now_s
        middle_s = now_s if math.isnan(self._looked_s) else (self._looked_s + now_s) / 2
        passed_s, self._looked_s = 2.0 * (now_s - middle_s), now_s
        self.present = frozenset(address for address, answer in answers.items() if not answer.get("gone"))
        self._charge(answers, middle_s)
        for address, account in self._accounts.items():
            account.gone = address not in self.present
            if account.name in self.asleep:
                account.asleep_s += passed_s
            elif answers and address not in answers:
                account.refusal = "it is not in the cluster"
                self._warn(f"node {account.name} ({address}) is not in the Ray cluster: it is no longer metered")

    def _charge(self, answers: Answers, at_s: float) -> None:
        """Book the joules that the meters counted since the last reading, at the intensities of a time."""
        grown: dict[str, NodeReading] = {}
        for address, answer in answers.items():
            account = self._accounts.get(address) or self._add(address)
            reading = self._reading(account, answer)
            since = None if reading is None else reading.since(account.last)
            account.last = reading or account.last
            if since is not None:
                grown[address] = since
        for address, (energy_j, own_j) in by_node(grown).items():
            account = self._accounts[address]
            g_per_kwh = math.nan if account.grid is None else account.grid.at(at_s) * self._pue
            account.total.add(energy_j, g_per_kwh)
            account.own_j += own_j
            account.covered_s += grown[address].covered_s

    def _add(self, address: str) -> _Account:
        """Add the account of a node that the site file does not name."""
        found = self._accounts[address] = _Account(address, address, None)
        self._warn(
            f"node {address} has no carbon source: its joules are counted, its grams are not; list it, "
            "with its carbon, under serving.engine.nodes"
        )
        return found

    def _reading(self, account: _Account, answer: Mapping[str, Any]) -> NodeReading | None:
        account.refusal = "" if account.name in self.asleep else str(answer.get("refusal", ""))
        if account.name in self.asleep and "refusal" in answer:
            return None
        if account.refusal:
            self._warn(
                f"node {account.name} is not metered, and its joules are missing from the report: {account.refusal}"
            )
            return None
        fields = {**answer, "quality": Quality(answer["quality"]), "meters": tuple(answer["meters"])}
        return NodeReading(**fields)

    def order(self, policy: NodeOrder) -> bool:
        """Rank the named nodes by their grids now, lost ones last; return whether the ranks have changed.

        A sleeping node keeps its place, because it may be woken.
        """
        gone = {account.name for account in self._accounts.values() if account.gone} - set(self.asleep)
        known = {name: math.nan if name in gone else each for name, each in self.intensities().items()}
        ranks = policy.step(known, self.ranks)
        changed, self.ranks = ranks != self.ranks, ranks
        return changed

    def intensities(self) -> dict[str, float]:
        """Intensity of each named node's grid now, g/kWh; NaN unknown."""
        return {name: grid.at(self._now_s()) for name, grid in self._placed.items()}

    def answered(self, record: RequestRecord) -> None:
        """Count a request for the node whose replica answered it."""
        if record.outcome is not Outcome.OK:
            return
        if record.replica not in self._named:
            application = record.replica.rpartition("#")[0]
            fits = [one for one in self._accounts.values() if application.endswith(f".{one.name}")]
            self._named[record.replica] = max(fits, key=lambda one: len(one.name), default=None)
        account = self._named[record.replica]
        if account is not None:
            account.answered += 1

    def report(self) -> dict[str, Any]:
        """``nodes``, each with its joules, grams and coverage; their sums; those that were not metered throughout."""
        elapsed_s = self._looked_s - self._from_s
        entries = [self._entry(account, elapsed_s) for account in self._accounts.values()]
        known = [one for one in entries if one["carbon_g"] is not None]
        return {
            "nodes": entries,
            "nodes_energy_j": math.fsum(one["energy_j"] for one in entries if one["energy_j"] is not None),
            "nodes_carbon_g": math.fsum(one["carbon_g"] for one in known) if known else None,
            "nodes_unmetered": [one["node"] for one in entries if one["energy_j"] is None],
            "node_orders": sum(self.moves.values()),
        }

    @staticmethod
    def _entry(account: _Account, elapsed_s: float) -> dict[str, Any]:
        total, metered = account.total, account.covered_s > 0
        grid = None if account.grid is None else account.grid.label()
        priced = metered and total.energy_j > total.unknown_j
        return {
            "node": account.name,
            "address": account.address,
            "zone": None if grid is None else grid.zone,
            "answered": account.answered,
            "energy_j": total.energy_j if metered else None,
            "ray_j": account.own_j if metered else None,
            "carbon_g": total.carbon_g if priced else None,
            "carbon_unknown_j": total.unknown_j,
            "coverage_ratio": min(1.0, account.covered_s / elapsed_s) if elapsed_s > 0 else 0.0,
            "asleep_s": account.asleep_s,
            "quality": account.last.quality.value if account.last is not None else None,
            "meters": list(account.last.meters) if account.last is not None else [],
            "machine": account.last.machine if account.last is not None else None,
            "refusal": account.refusal or None,
        }
