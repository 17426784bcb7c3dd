import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.runtime.measuring.share import DISCOVERY_RATIO, CpuShare, GpuShare, JoinedTrees, board_ratios

OURS = frozenset({10, 11})
NAN = math.nan


@pytest.mark.parametrize(
    ("holders", "busy", "run"),
    [
        ({}, 0.0, 0.0),
        ({10: 0.0}, 1.0, 1.0),
        ({10: 0.0, 11: 0.0}, 1.0, 1.0),
        ({20: 0.0}, 1.0, 0.0),
        ({20: NAN, 21: NAN}, 1.0, 0.0),
        ({10: 0.75, 20: 0.25}, 1.0, 0.75),
        ({10: 0.5, 11: 0.25, 20: 0.25}, 1.0, 0.75),
        ({10: 0.0, 20: 0.0}, 0.0, 0.0),
        (None, 1.0, 1.0),
    ],
)
def test_whose_a_board_is(holders: dict[int, float] | None, busy: float, run: float) -> None:
    assert board_ratios(holders, OURS) == (busy, run)


def test_shares_that_are_not_reported_are_unknown() -> None:
    assert all(math.isnan(ratio) for ratio in board_ratios({10: NAN, 20: NAN}, OURS))


@given(st.dictionaries(st.integers(9, 13), st.floats(0, 1), max_size=5))
def test_the_run_never_has_more_than_was_busy(holders: dict[int, float]) -> None:
    total = math.fsum(holders.values())
    shares = {pid: share / total for pid, share in holders.items()} if total > 0 else holders
    busy, run = board_ratios(shares, OURS)
    assert 0 <= run <= busy + 1e-12 <= 1 + 1e-9


def test_boards_are_read_in_order() -> None:
    held = {"gpu:0": {20: 1.0}, "gpu:1": {10: 1.0}}
    share = GpuShare(["gpu:0", "gpu:1", "gpu:2"], lambda: held, lambda: OURS)
    assert share.columns == (
        "busy_ratio:gpu:0",
        "run_ratio:gpu:0",
        "busy_ratio:gpu:1",
        "run_ratio:gpu:1",
        "busy_ratio:gpu:2",
        "run_ratio:gpu:2",
    )
    assert share.read() == (1.0, 0.0, 1.0, 1.0, 1.0, 1.0)


def test_a_board_stated_to_be_the_runs_is_charged_to_it_whichever_process_computes_there() -> None:
    held = {"gpu:0": {20: 1.0}, "gpu:1": {20: 1.0}}
    share = GpuShare(["gpu:0", "gpu:1"], lambda: held, lambda: OURS, own=["gpu:1"])
    assert share.read() == (1.0, 0.0, 1.0, 1.0)
    held.clear()
    assert share.read()[2:] == (1.0, 1.0), "idle too: it is there for the run"


def test_a_process_that_ended_since_the_last_reading_had_the_board_until_then() -> None:
    held: dict[str, dict[int, float] | None] = {"gpu:0": {}}
    share = GpuShare(["gpu:0"], lambda: held, lambda: OURS)
    assert share.read() == (0.0, 0.0)
    held["gpu:0"] = {10: 1.0}
    assert share.read() == (1.0, 1.0)
    held["gpu:0"] = {20: 1.0}
    assert share.read() == (1.0, 1.0), "ours ended, another one came"
    assert share.read() == (1.0, 0.0)
    held["gpu:0"] = {}
    assert share.read() == (1.0, 0.0)
    assert share.read() == (0.0, 0.0)
    held["gpu:0"] = {10: 0.75, 20: 0.25}
    assert share.read() == (1.0, 0.75)


class Busy:
    sockets = (0, 3)
    cpus = (2, 2)

    def read(self) -> tuple[float, ...]:
        return (5.0, 6.0)

    def close(self) -> None: ...


class Tree:
    looked = 0

    def discover(self) -> None:
        self.looked += 1
        sum(range(200_000))

    def pids(self) -> frozenset[int]:
        return OURS

    def read(self) -> tuple[float, ...]:
        return (1.0, 2.0)

    def close(self) -> None: ...


def test_cpu_columns_name_their_sockets() -> None:
    share = CpuShare(Busy(), Tree())
    assert share.columns == ("busy_s:cpu:0", "busy_s:cpu:3", "run_s:cpu:0", "run_s:cpu:3", "self_s")
    assert share.read()[:4] == (5.0, 6.0, 1.0, 2.0)
    assert 0 < share.read()[4] < 1000


def test_looking_for_processes_takes_its_small_share_of_a_core() -> None:
    now = [0.0]
    tree = Tree()
    share = CpuShare(Busy(), tree, lambda: now[0])
    share.read()
    share.read()
    assert tree.looked == 1
    now[0] = 1e6
    share.read()
    assert tree.looked == 2
    assert DISCOVERY_RATIO <= 0.01


class SearchedTree:
    def __init__(self, root):
        self.root, self.busy_s, self.searched, self.closed = root, (10.0 * root, 0.0), 0, 0

    def discover(self):
        self.searched += 1

    def pids(self):
        return frozenset({self.root, 10 * self.root})

    def read(self):
        return self.busy_s

    def close(self):
        self.closed += 1


def test_later_processes_join_and_the_sum_never_falls():
    trees, roots = {}, {1}

    def open_tree(root):
        trees[root] = SearchedTree(root)
        return trees[root]

    joined = JoinedTrees(lambda: roots, open_tree)
    assert joined.read() == (0.0, 0.0)
    trees[1].busy_s = (12.0, 1.0)
    assert joined.read() == (2.0, 1.0)
    roots.add(2)
    assert joined.pids() == {1, 10}
    joined.discover()
    assert joined.pids() == {1, 10, 2, 20}
    assert joined.read() == (2.0, 1.0)
    trees[2].busy_s = (20.5, 0.25)
    assert joined.read() == (2.5, 1.25)
    roots.clear()  # a process that ended has still used what it used
    joined.discover()
    assert joined.read() == (2.5, 1.25)
    assert trees[1].searched == 2
    joined.close()
    assert trees[1].closed == trees[2].closed == 1
