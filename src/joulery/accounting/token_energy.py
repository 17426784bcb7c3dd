"""Divides the joules of batching engines among their requests while the engines run.

Requests in one batch share every step of their engine. An engine's joules go to its requests in proportion to the
tokens they moved meanwhile: one a token written, a quarter of one a token read (reading is done many tokens at a time).
Where the meter is read whenever a request begins or ends, the joules are divided over stretches of some seconds and
some steps: of requests that arrive together one enters the batch a step before the others, and would pay for that step
alone. A request shares what was used before it began only with those that began less than a second earlier. Joules of a
stretch without tokens are kept for the next stretch with tokens; the energy of an engine without a request is
unattributed. Always ``requests + idle + unattributed = total``.

A meter that is read seldom misses the last moments of a request that ends. They are charged ahead, by the tokens that
the request moved since the last reading and the joules of a token in the latest readings; the next readings pay for
them.

Requests that are answered whole (embeddings) show no progress. While an engine has no others, they share its joules as
they are used, by the tokens each was given to read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from joulery.domain.errors import DataError

PROMPT_WEIGHT = 0.25
"""Work of reading one token in units of writing one; assumed. SmolLM2 on a CPU: 385 against 207 tokens a second."""
_ROUNDING = 1e-9
_LATE_READINGS = 3
"""Readings from which the joules of a token are taken: a board renews its counter only a few times a second."""
_STRETCH_S, _STRETCH_TOKENS = 2.0, 8
"""Least seconds of a stretch over which joules are divided, and least tokens that a request must write in it."""
_LONGEST_STRETCH_S = 30.0
_TOGETHER_S = 1.0
"""Requests that begin within this time count as begun together."""
_RECOVERED = 0.2
"""Largest part of a reading of running requests that may pay for too much charged to ended ones."""


@dataclass(frozen=True, slots=True)
class EnergyTotals:
    """Joules since the book was opened.

    Attributes:
        total_j: Joules metered.
        idle_j: Energy of the idle devices over the same time.
        requests_j: Joules charged to requests, those still being answered included.
        requests_g: Grams of ``requests_j``, as far as the intensity was known.
    """

    total_j: float = 0.0
    idle_j: float = 0.0
    requests_j: float = 0.0
    requests_g: float = 0.0

    @property
    def unattributed_j(self) -> float:
        """Joules that are neither idle nor of a request: other processes, the gateway, engines between requests."""
        return self.total_j - self.idle_j - self.requests_j


@dataclass(slots=True)
class _Energy:
    """Joules and their grams, and whether every joule and every intensity is known."""

    energy_j: float = 0.0
    carbon_g: float = 0.0
    energy_known: bool = True
    carbon_known: bool = True

    def add(self, other: _Energy, share: float = 1.0) -> None:
        """Add a share of another amount."""
        self.energy_j += share * other.energy_j
        self.carbon_g += share * other.carbon_g
        self.energy_known &= other.energy_known
        self.carbon_known &= other.carbon_known

    def rest(self, share: float) -> _Energy:
        """The remainder when a share is taken."""
        left = max(0.0, 1.0 - share)
        return _Energy(left * self.energy_j, left * self.carbon_g, self.energy_known, self.carbon_known)


@dataclass(slots=True)
class _Part:
    """A part of a stretch: the joules used in it, the seconds it lasts, and whether it began with a request."""

    number: int = 0
    spent: _Energy = field(default_factory=_Energy)
    lasts_s: float = 0.0
    begins: bool = False


@dataclass(slots=True)
class _Engine:
    """State of one engine.

    Attributes:
        requests, whole: Its requests; tokens of those that are answered whole.
        since: The first part in which each request has a share.
        moved: Tokens of its requests since the last reading.
        gone: Tokens since the last reading of requests that have ended.
        shared, written: Tokens of its requests in the present stretch up to the last reading, by their work; and those
            of them that were written.
        parts: The parts of the present stretch whose joules are not yet divided.
        ahead_j: Joules charged ahead to requests that have ended, less those that readings have covered.
        late: Joules and tokens between the latest readings.
        g_per_j: Grams of a joule at the last reading.
        own_ratio: Share of its joules that belongs to its requests.
    """

    requests: dict[int, _Energy] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)
    moved: dict[int, float] = field(default_factory=dict)
    whole: dict[int, float] = field(default_factory=dict)
    shared: dict[int, float] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    parts: list[_Part] = field(default_factory=lambda: [_Part()])
    ahead_j: float = 0.0
    gone: float = 0.0
    late: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_LATE_READINGS))
    g_per_j: float = math.nan
    own_ratio: float = 1.0

    def read(self, energy_j: float, g_per_j: float) -> _Energy:
        """Take a reading of the requests' joules; return the part of running ones. The rest pays for charges ahead."""
        moved, gone = math.fsum(self.moved.values()), self.gone
        self.gone, self.g_per_j = 0.0, g_per_j
        if math.isnan(energy_j):
            return _energy(energy_j, g_per_j)
        covers_j = min(energy_j, max(0.0, self.ahead_j))
        if moved + gone > 0:
            self.late.append((energy_j, moved + gone))
            fair_j = energy_j * gone / (moved + gone)
            covers_j = fair_j + min(_RECOVERED * (energy_j - fair_j), max(0.0, self.ahead_j - fair_j))
        self.ahead_j -= covers_j
        return _energy(energy_j - covers_j, g_per_j)

    def begin(self, number: int) -> None:
        """Add a request; it shares the part that another request began just before, or begins a new part."""
        self.requests[number] = _Energy()
        if self.comes_later:
            self.parts.append(_Part(self.parts[-1].number + 1, begins=True))
        self.since[number] = self.parts[-1].number

    def keep(self, spent: _Energy, lasts_s: float) -> None:
        """Keep the joules of a reading over ``lasts_s`` seconds, to be divided with those of the stretch."""
        self.parts[-1].lasts_s += lasts_s
        self.parts[-1].spent.add(spent)
        for number, tokens in self.moved.items():
            self.shared[number] = self.shared.get(number, 0.0) + tokens
        self.moved.clear()

    @property
    def comes_later(self) -> bool:
        """Whether a request that begins now comes later than those before it."""
        return not self.parts[-1].begins or self.parts[-1].lasts_s >= _TOGETHER_S

    @property
    def steps_seen(self) -> bool:
        """Whether its requests made enough steps in the stretch for their joules to be divided."""
        return max(self.written.values(), default=0) >= _STRETCH_TOKENS

    @property
    def all_whole(self) -> bool:
        """Whether all its requests are answered whole."""
        return len(self.whole) == len(self.requests)

    @property
    def stretch_is_over(self) -> bool:
        """Whether the joules of the stretch can be divided."""
        lasts_s = math.fsum(part.lasts_s for part in self.parts)
        if self.all_whole or lasts_s > _LONGEST_STRETCH_S:
            return True
        return lasts_s >= _STRETCH_S and self.steps_seen

    def shares(self, part: _Part) -> dict[int, float]:
        """The share of each request in a part; empty while no tokens moved."""
        weights = self.whole if self.all_whole else self.shared
        if not weights or (part.spent.energy_j == 0 and part.spent.energy_known):
            return {}
        there = {number for number, since in self.since.items() if since <= part.number} or self.requests
        found = {number: weight for number, weight in weights.items() if number in there and weight > 0}
        weight = math.fsum(found.values())
        return {number: moved / weight for number, moved in found.items()}

    @property
    def pending(self) -> _Energy:
        """Energy that is not divided yet and that the requests will pay for."""
        found = _Energy()
        if self.requests and (self.all_whole or any(self.shared.values())):
            for part in self.parts:
                found.add(part.spent)
        return found

    def forget(self, number: int) -> None:
        """Remove a request that has ended from the stretch."""
        self.since.pop(number, None)
        self.shared.pop(number, None)
        self.written.pop(number, None)

    @property
    def j_per_token(self) -> float:
        """Joules of a token over the latest readings; NaN while there are none."""
        tokens = math.fsum(tokens for _, tokens in self.late)
        return math.fsum(energy_j for energy_j, _ in self.late) / tokens if tokens > 0 else math.nan


class TokenBook:
    """Books the joules of the engines of one machine on their requests, which are identified by number."""

    __slots__ = ("_engines", "_idle_j", "_requests_g", "_requests_j", "_total_j")

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._total_j = self._idle_j = self._requests_j = self._requests_g = 0.0

    @property
    def totals(self) -> EnergyTotals:
        """The sums up to the last ``settle``; joules charged ahead of the meters are not included."""
        ahead_j = math.fsum(max(0.0, state.ahead_j) for state in self._engines.values())
        ahead_g = ahead_j * self._requests_g / self._requests_j if ahead_j > 0 else 0.0
        pending = [state.pending for state in self._engines.values()]
        requests_j = self._requests_j + math.fsum(each.energy_j for each in pending) - ahead_j
        requests_g = self._requests_g + math.fsum(each.carbon_g for each in pending) - ahead_g
        return EnergyTotals(self._total_j, self._idle_j, requests_j, requests_g)

    def busy(self, engine: str) -> bool:
        """Whether an engine has requests."""
        state = self._engines.get(engine)
        return state is not None and bool(state.requests)

    def can_charge_ahead(self, engine: str, number: int) -> bool:
        """Whether a request that ends now can be charged without a reading."""
        state = self._engines[engine]
        return number not in state.whole and not math.isnan(state.j_per_token)

    def began(self, engine: str, number: int, whole_tokens: float = 0.0) -> None:
        """Register a request that was given to an engine; call ``settle`` first.

        Args:
            engine, number: Where the request runs, and its number.
            whole_tokens: Its tokens, if it is answered whole; 0 for a request whose progress is seen.

        Raises:
            DataError: The request is registered already.
        """
        state = self._engines.setdefault(engine, _Engine())
        if number in state.requests:
            raise DataError(f"request {number} began twice")
        if state.comes_later and state.steps_seen:
            self._hand_out(state)
        state.begin(number)
        if whole_tokens > 0:
            state.whole[number] = whole_tokens

    def share_engine(self, engine: str, own_ratio: float) -> None:
        """Set the share of an engine's joules that is its requests'; the rest, of other clients, is unattributed.

        Raises:
            DataError: The share is not within 0 and 1.
        """
        if not 0.0 <= own_ratio <= 1.0:
            raise DataError(f"{own_ratio} is not a share of an engine's joules")
        self._engines.setdefault(engine, _Engine()).own_ratio = own_ratio

    def moved(self, engine: str, number: int, *, read: int = 0, written: int = 0) -> None:
        """Count the tokens of a request that its engine read or wrote since the last call for it.

        Args:
            engine, number: Where the request runs, and its number.
            read: Prompt tokens, of weight :data:`PROMPT_WEIGHT`.
            written: Answer tokens, of weight 1.
        """
        state = self._engines[engine]
        if number in state.requests:
            state.moved[number] = state.moved.get(number, 0.0) + PROMPT_WEIGHT * read + written
            state.written[number] = state.written.get(number, 0) + written

    def settle(
        self,
        total_j: float,
        idle_j: float,
        engines_j: Mapping[str, float],
        g_per_j: float = math.nan,
        lasts_s: Mapping[str, float] | None = None,
    ) -> None:
        """Book the joules since the last call.

        Args:
            total_j: Joules metered.
            idle_j: Idle part of it.
            engines_j: Joules of the rest that each engine used; NaN where not known.
            g_per_j: Grams of a joule, facility overhead included; NaN while unknown.
            lasts_s: Seconds since the last call, of engines whose joules are divided over stretches; those of the
                others are divided now.

        Raises:
            DataError: A part is negative, or the parts exceed the total.
        """
        used_j = math.fsum(each for each in engines_j.values() if not math.isnan(each))
        if not (idle_j >= 0 and used_j >= 0 and idle_j + used_j <= total_j * (1 + _ROUNDING) + _ROUNDING):
            raise DataError(f"{idle_j} J idle and {used_j} J of engines do not fit into {total_j} J")
        self._total_j += total_j
        self._idle_j += idle_j
        for name, energy_j in engines_j.items():
            state = self._engines.get(name)
            if state is None:
                continue
            left = state.read(energy_j * state.own_ratio, g_per_j)
            if state.requests:
                state.keep(left, math.inf if lasts_s is None else lasts_s.get(name, math.inf))
                if state.stretch_is_over:
                    self._hand_out(state)

    def ended(self, engine: str, number: int, unread_j: float = math.inf) -> tuple[float | None, float | None]:
        """Remove a request that left its engine; return its joules and its grams, None where unknown.

        Args:
            engine, number: Where it ran, and its number. ``settle`` first, or see :meth:`can_charge_ahead`.
            unread_j: Most joules that the engine can have used since the last reading: no more is charged ahead.
        """
        state = self._engines[engine]
        for part in state.parts:
            share = state.shares(part).get(number, 0.0)
            if share > 0:
                self._give(state.requests[number], part.spent, share)
                part.spent = part.spent.rest(share)
        spent = state.requests.pop(number)
        state.forget(number)
        tokens = state.moved.pop(number, 0.0)
        if state.whole.pop(number, None) is None and tokens > 0 and not math.isnan(state.j_per_token):
            unread_j = max(0.0, unread_j * state.own_ratio - state.ahead_j)
            ahead = _energy(min(tokens * state.j_per_token, unread_j), state.g_per_j)
            state.ahead_j += ahead.energy_j
            state.gone += tokens
            self._give(spent, ahead, 1.0)
        if not state.requests:
            # The only request: none of its tokens was counted, and no other request did work.
            for part in state.parts:
                self._give(spent, part.spent, 1.0)
            state.parts = [_Part()]
        energy_j = spent.energy_j if spent.energy_known else None
        return energy_j, spent.carbon_g if spent.energy_known and spent.carbon_known else None

    def _hand_out(self, state: _Engine) -> None:
        left = []
        for part in state.parts:
            shares = state.shares(part)
            for number, share in shares.items():
                self._give(state.requests[number], part.spent, share)
            if not shares:
                left.append(_Part(part.number, part.spent))
        state.parts = [*left, _Part(state.parts[-1].number + 1)]
        state.shared.clear()
        state.written.clear()

    def _give(self, spent: _Energy, pending: _Energy, share: float) -> None:
        spent.add(pending, share)
        self._requests_j += share * pending.energy_j
        self._requests_g += share * pending.carbon_g


def _energy(energy_j: float, g_per_j: float) -> _Energy:
    if math.isnan(energy_j):
        return _Energy(energy_known=False)
    if math.isnan(g_per_j):
        return _Energy(energy_j, carbon_known=energy_j == 0)
    return _Energy(energy_j, energy_j * g_per_j)
