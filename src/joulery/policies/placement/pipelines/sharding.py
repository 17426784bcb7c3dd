"""Operators sharded among the devices of one stage: the cheapest layouts (AlpaServe, section 4.1).

Each operator has one of several shardings. Its cost is its own time, the collective it ends with, and the conversion
of its producer's layout into the one it needs. For inference there are no gradients and no weight updates.
``minimise sum_v c_v · s_v + sum_vu s_v' R_vu s_u`` with one-hot ``s``: an integer programme for a graph, a shortest
path for a chain, so that dynamic programming finds the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import ConfigError
from joulery.domain.gpu.clock_profile import ScoredOperator
from joulery.domain.trace.operators import OperatorKind

_BLOCK = 64
"""Longest run of operators without a layer's name that is solved at once."""


class Cut(StrEnum):
    """Distribution of a tensor over the devices of a stage."""

    WHOLE = "whole"
    """Each device has all of it."""
    ROWS = "rows"
    """Each device has some of the requests."""
    COLUMNS = "columns"
    """Each device has some of the channels or heads."""


@dataclass(frozen=True, slots=True)
class Link:
    """Connection between two devices.

    Attributes:
        bandwidth: Bytes a second each way.
        hop_s: Delay of one message.
    """

    bandwidth: float = 12e9
    hop_s: float = 10e-6

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.hop_s >= 0):
            raise ConfigError("a link needs a bandwidth above 0", got=f"{self.bandwidth} B/s, {self.hop_s} s")

    def send_s(self, size_bytes: float) -> float:
        """Time to send data to the next device."""
        return self.hop_s + size_bytes / self.bandwidth

    def gather_s(self, size_bytes: float, devices: int) -> float:
        """Time of an all-gather: until every device has the whole of a sharded tensor."""
        return self.hop_s + size_bytes * (devices - 1) / devices / self.bandwidth

    def reduce_s(self, size_bytes: float, devices: int) -> float:
        """Time of an all-reduce: until every device has the sum."""
        return self.hop_s + 2.0 * size_bytes * (devices - 1) / devices / self.bandwidth

    def exchange_s(self, size_bytes: float, devices: int) -> float:
        """Time of an all-to-all exchange: from shards along one axis to shards along another."""
        return self.hop_s + size_bytes * (devices - 1) / devices**2 / self.bandwidth


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to shard an operator.

    Attributes:
        needs, leaves: Layout of its input and of its output.
        time_s: Its own time and that of the collective it ends with, all calls.
        weight_ratio: Share of its weights each device holds.
    """

    needs: Cut
    leaves: Cut
    time_s: float
    weight_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Sharding:
    """The sharding of every operator.

    Attributes:
        choices: The choice of each operator.
        time_s: Time of each operator, including the conversion of its input.
    """

    choices: tuple[Choice, ...]
    time_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        """Time of all operators."""
        return float(sum(self.time_s))


def choices_of(
    operator: ScoredOperator, devices: int, launch_s: float, link: Link, batch: int = 1
) -> tuple[Choice, ...]:
    """The ways an operator can be sharded among some devices; unsharded first.

    Args:
        operator: The operator, with its time on one device.
        devices: Number of devices, >= 1.
        launch_s: Least time of one call.
        link: Connection between the devices.
        batch: Requests in one pass; fewer than devices are not split among them.
    """
    cost, whole_s = operator.cost, operator.time_s
    whole = Choice(Cut.WHOLE, Cut.WHOLE, whole_s)
    if devices == 1 or cost.kind is OperatorKind.OTHER:
        return (whole,)
    part_s = min(whole_s, max(whole_s / devices, launch_s * cost.count))
    dealt = (whole, Choice(Cut.ROWS, Cut.ROWS, part_s)) if batch >= devices else (whole,)
    sum_s = cost.count * link.reduce_s(cost.output_bytes, devices)
    if cost.kind in (OperatorKind.DOT, OperatorKind.CONVOLUTION) and cost.parameter_bytes > 0:
        return (
            *dealt,
            Choice(Cut.WHOLE, Cut.COLUMNS, part_s, 1.0 / devices),
            Choice(Cut.COLUMNS, Cut.WHOLE, part_s + sum_s, 1.0 / devices),
        )
    if cost.kind in (OperatorKind.NORM, OperatorKind.FUSION):
        return dealt
    return (*dealt, Choice(Cut.COLUMNS, Cut.COLUMNS, part_s))


def turning_s(leaves: Cut, needs: Cut, size_bytes: float, devices: int, link: Link) -> float:
    """Time to convert a tensor from one layout into another."""
    if leaves is needs or leaves is Cut.WHOLE:
        return 0.0
    if needs is Cut.WHOLE:
        return link.gather_s(size_bytes, devices)
    return link.exchange_s(size_bytes, devices)


def shard(operators: Sequence[ScoredOperator], devices: int, launch_s: float, link: Link, batch: int = 1) -> Sharding:
    """Shard operators among the devices of a stage. Layers begin and end whole; equal layers are solved once.

    Operators are taken as a chain, in the order of the graph.

    Args:
        operators: The operators, in topological order.
        devices: Devices of the stage.
        launch_s: Least time of one call.
        link: What connects the devices.
        batch: Requests in one pass.

    Raises:
        ConfigError: No device.
    """
    if devices < 1:
        raise ConfigError("a stage needs devices", got=str(devices), expected="1 or more")
    choices: list[Choice] = []
    times: list[float] = []
    solved: dict[tuple[object, ...], Sharding] = {}
    for block in _blocks(operators):
        key = tuple((each.cost.kind, each.time_s, each.cost.parameter_bytes, each.cost.output_bytes) for each in block)
        if key not in solved:
            solved[key] = solve(
                [choices_of(each, devices, launch_s, link, batch) for each in block], block, devices, link
            )
        choices += solved[key].choices
        times += solved[key].time_s
    return Sharding(tuple(choices), tuple(times))


def solve(
    options: Sequence[Sequence[Choice]], operators: Sequence[ScoredOperator], devices: int, link: Link
) -> Sharding:
    """The cheapest choice for each operator of a chain that begins and ends whole.

    Args:
        options: Choices of each operator, at least one each.
        operators: The operators.
        devices: Devices of the stage.
        link: What connects them.
    """
    turn = _turning(options, operators, devices, link)
    picked = _cheapest(options, turn)
    times = [options[0][picked[0]].time_s + turn[0][0, picked[0]]]
    times += [options[at][picked[at]].time_s + turn[at][picked[at - 1], picked[at]] for at in range(1, len(options))]
    times[-1] += turn[-1][picked[-1], 0]
    chosen = tuple(option[index] for option, index in zip(options, picked, strict=True))
    return Sharding(chosen, tuple(float(time_s) for time_s in times))


def _turning(
    options: Sequence[Sequence[Choice]], operators: Sequence[ScoredOperator], devices: int, link: Link
) -> list[FloatArray]:
    """Cost of each boundary of the chain: into the first operator, between neighbours, out of the last."""
    whole = (Choice(Cut.WHOLE, Cut.WHOLE, 0.0),)
    sides = [whole, *options, whole]
    costs = [operators[0].cost, *(operator.cost for operator in operators)]
    return [
        np.array(
            [
                [cost.count * turning_s(a.leaves, b.needs, cost.output_bytes, devices, link) for b in following]
                for a in leading
            ]
        )
        for leading, following, cost in zip(sides, sides[1:], costs, strict=False)
    ]


def _cheapest(options: Sequence[Sequence[Choice]], turn: Sequence[FloatArray]) -> list[int]:
    """The index of each operator's choice, least cost in all; the first of equal ones."""
    cost, before = turn[0][0] + [choice.time_s for choice in options[0]], []
    for choices, pair in zip(options[1:], turn[1:-1], strict=True):
        joint = cost[:, None] + pair
        before.append(np.argmin(joint, axis=0))
        cost = joint.min(axis=0) + [choice.time_s for choice in choices]
    picked = [int(np.argmin(cost + turn[-1][:, 0]))]
    for best in reversed(before):
        picked.append(int(best[picked[-1]]))
    return picked[::-1]


def _blocks(operators: Sequence[ScoredOperator]) -> list[list[ScoredOperator]]:
    """Runs of operators that share the first part of their name (a layer), split where they get long."""
    blocks: list[list[ScoredOperator]] = []
    last = None
    for operator in operators:
        head, dot, _ = operator.cost.name.partition(".")
        layer = head if dot and head.rstrip("0123456789") != head else ""
        if not blocks or layer != last or len(blocks[-1]) >= _BLOCK:
            blocks.append([])
        blocks[-1].append(operator)
        last = layer
    return blocks
