"""The ledger of a cluster's nodes: nothing is lost, priced at the wrong grid, or missing without a word."""

import math
from types import SimpleNamespace

import pytest

from joulery.domain.errors import ActuationError
from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.policies.serving.node_order import NodeOrder
from joulery.runtime.serving.nodes.ledger import NodeLedger, PlacedNode

JOULES_PER_KWH = 3.6e6


class Grid:
    """An intensity that a test sets."""

    def __init__(self, g_per_kwh: float, zone: str = "X") -> None:
        self.g_per_kwh, self.zone = g_per_kwh, zone

    async def refresh(self) -> None:
        return None

    def at(self, t_s: float) -> float:
        return self.g_per_kwh

    def label(self):
        return SimpleNamespace(zone=self.zone)


class Cluster:
    """Nodes whose meters say what a test wants."""

    def __init__(self) -> None:
        self.answers: dict[str, dict] = {}
        self.now_s, self.warned = 100.0, []
        self.grids = {"a": Grid(400.0, "dirty"), "b": Grid(50.0, "clean")}
        placed = [PlacedNode(name, f"10.0.0.{at}", self.grids[name]) for at, name in enumerate("ab", 1)]
        self.ledger = NodeLedger(self.read, placed, 1.5, lambda: self.now_s, self.warned.append)

    async def read(self):
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers

    async def look(self, later_s: float = 1.0, **joules: tuple[float, float]) -> None:
        """A look; of each node the joules of its machine and its own so far."""
        self.now_s += later_s
        self.answers = {
            f"10.0.0.{name[1:]}": {
                "machine": name,
                "energy_j": energy_j,
                "own_j": own_j,
                "covered_s": self.now_s - 101.0,
                "quality": "measured",
                "meters": ["rapl"],
                "opened": "1",
            }
            for name, (energy_j, own_j) in joules.items()
        }
        await self.ledger.look()

    def entry(self, name: str) -> dict:
        return next(one for one in self.ledger.report()["nodes"] if one["node"] == name)


async def test_joules_are_priced_at_the_grid_of_their_node_and_sum_up():
    cluster = Cluster()
    await cluster.look(n1=(0.0, 0.0), n2=(0.0, 0.0))
    await cluster.look(n1=(10.0, 4.0), n2=(20.0, 5.0))
    cluster.grids["a"].g_per_kwh = 100.0
    await cluster.look(n1=(30.0, 8.0), n2=(20.0, 5.0))
    a, b, report = cluster.entry("a"), cluster.entry("b"), cluster.ledger.report()
    assert (a["energy_j"], a["ray_j"], b["energy_j"]) == (30.0, 8.0, 20.0)
    assert a["carbon_g"] == pytest.approx((10 * 400 + 20 * 100) * 1.5 / JOULES_PER_KWH)
    assert b["carbon_g"] == pytest.approx(20 * 50 * 1.5 / JOULES_PER_KWH)
    assert report["nodes_energy_j"] == 50.0 and report["nodes_unmetered"] == []
    assert report["nodes_carbon_g"] == pytest.approx(a["carbon_g"] + b["carbon_g"])
    assert a["coverage_ratio"] == b["coverage_ratio"] == 1.0
    assert (a["zone"], b["quality"], b["meters"]) == ("dirty", "measured", ["rapl"])
    assert cluster.warned == []


async def test_a_node_without_a_meter_is_said_and_never_zero():
    cluster = Cluster()
    for _ in range(2):
        await cluster.look(n1=(0.0, 0.0))
        cluster.answers["10.0.0.2"] = {"refusal": "no RAPL counters there"}
        await cluster.ledger.look()
    entry, report = cluster.entry("b"), cluster.ledger.report()
    assert (entry["energy_j"], entry["carbon_g"], entry["coverage_ratio"]) == (None, None, 0.0)
    assert entry["refusal"] == "no RAPL counters there" and report["nodes_unmetered"] == ["b"]
    assert any("b is not metered" in text and "no RAPL counters" in text for text in cluster.warned)


async def test_a_node_that_the_site_does_not_name_is_counted_without_grams_and_said():
    cluster = Cluster()
    await cluster.look(n1=(0.0, 0.0), n2=(0.0, 0.0), n9=(0.0, 0.0))
    await cluster.look(n1=(1.0, 0.0), n2=(1.0, 0.0), n9=(7.0, 1.0))
    entry = cluster.entry("10.0.0.9")
    assert (entry["energy_j"], entry["carbon_g"], entry["carbon_unknown_j"]) == (7.0, None, 7.0)
    assert cluster.ledger.report()["nodes_energy_j"] == 9.0
    assert any("10.0.0.9 has no carbon source" in text for text in cluster.warned)


async def test_a_node_that_is_lost_keeps_what_was_metered_and_shows_the_gap():
    cluster = Cluster()
    await cluster.look(n1=(0.0, 0.0), n2=(0.0, 0.0))
    await cluster.look(n1=(1.0, 0.0), n2=(5.0, 1.0))
    for joules in (2.0, 3.0):
        await cluster.look(n1=(joules, 0.0))
    assert cluster.entry("b")["energy_j"] == 5.0 and cluster.entry("b")["coverage_ratio"] == pytest.approx(1 / 3)
    assert any("not in the Ray cluster" in text for text in cluster.warned)
    cluster.answers = ActuationError("Ray is gone")
    await cluster.ledger.look()
    assert any("Ray is gone" in text for text in cluster.warned)


async def test_a_node_that_may_be_lost_comes_last_until_it_answers_again():
    cluster = Cluster()
    await cluster.look(n1=(0.0, 0.0), n2=(0.0, 0.0))
    assert cluster.ledger.order(NodeOrder()) and cluster.ledger.ranks == {"b": 0, "a": 1}
    cluster.answers["10.0.0.2"] = {"gone": True, "refusal": "its meter ended"}
    await cluster.ledger.look()
    assert cluster.ledger.order(NodeOrder()) and cluster.ledger.ranks == {"a": 0, "b": 1}
    await cluster.look(n1=(1.0, 0.0), n2=(1.0, 0.0))
    assert cluster.ledger.order(NodeOrder()) and cluster.ledger.ranks == {"b": 0, "a": 1}


async def test_meters_that_begin_anew_lose_the_gap_alone():
    cluster = Cluster()
    await cluster.look(n1=(0.0, 0.0))
    await cluster.look(n1=(8.0, 0.0))
    cluster.answers["10.0.0.1"] |= {"opened": "2", "energy_j": 100.0}
    await cluster.ledger.look()
    cluster.answers["10.0.0.1"] |= {"energy_j": 103.0}
    await cluster.ledger.look()
    assert cluster.entry("a")["energy_j"] == 11.0


async def test_an_intensity_that_is_not_known_counts_joules_and_no_grams():
    cluster = Cluster()
    cluster.grids["a"].g_per_kwh = math.nan
    await cluster.look(n1=(0.0, 0.0), n2=(0.0, 0.0))
    await cluster.look(n1=(3.0, 0.0), n2=(3.0, 0.0))
    assert (cluster.entry("a")["carbon_g"], cluster.entry("a")["carbon_unknown_j"]) == (None, 3.0)
    assert cluster.ledger.order(NodeOrder()) and cluster.ledger.ranks == {"b": 0, "a": 1}
    assert not cluster.ledger.order(NodeOrder())


def test_answers_count_for_the_node_of_their_replica():
    cluster = Cluster()
    names = ("joulery.s.cpu-1.a#0", "joulery.s.cpu-1.b#1", "joulery.s.cpu-2.b#0", "joulery.s.cpu-1.other#0", "")
    for replica in names:
        cluster.ledger.answered(RequestRecord("s", "v", replica, 0, 0, 1, Outcome.OK, 0, 0, 1, None))
    cluster.ledger.answered(RequestRecord("s", "v", names[0], 0, 0, 1, Outcome.FAILED, 0, 0, 1, None))
    assert (cluster.entry("a")["answered"], cluster.entry("b")["answered"]) == (1, 2)


async def test_a_node_that_sleeps_keeps_its_place_and_is_not_reported_as_lost():
    cluster = Cluster()
    await cluster.look(n1=(0.0, 0.0), n2=(0.0, 0.0))
    await cluster.look(n1=(1.0, 0.5), n2=(1.0, 0.5))
    cluster.ledger.asleep = {"b"}
    for passed in range(3):
        await cluster.look(n1=(2.0 + passed, 1.0))
    cluster.answers["10.0.0.2"] = {"gone": True, "refusal": "its meter did not answer"}
    cluster.now_s += 1.0
    await cluster.ledger.look()
    cluster.ledger.order(NodeOrder())
    assert cluster.ledger.ranks == {"b": 0, "a": 1}, "its grid is the cleaner one, and it may be woken"
    assert cluster.ledger.present == {"10.0.0.1"} and cluster.warned == []
    b = cluster.entry("b")
    assert (b["asleep_s"], b["refusal"], b["energy_j"]) == (4.0, None, 1.0)
    assert cluster.entry("a")["asleep_s"] == 0.0
    cluster.ledger.asleep = set()
    await cluster.look(n1=(9.0, 1.0))
    assert [text for text in cluster.warned if "not in the Ray cluster" in text] != []
    cluster.ledger.order(NodeOrder())
    assert cluster.ledger.ranks == {"a": 0, "b": 1} and cluster.entry("b")["asleep_s"] == 4.0
