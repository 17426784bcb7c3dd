"""Handles changes of a service's variants while it serves: one joins, one leaves, or its times become known.

A policy names the variants that it chooses from (its *family*); its state holds those of its last step. Where the two
differ, the trial that runs ends, what trials showed of layouts without the variants that left stays known, and a search
over the new family begins. While the SLO is threatened that search waits; a layout whose own variant left is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.mix import OWN
from joulery.policies.serving.observation import KEEP_LAYOUT, SET_LAYOUT, Observation
from joulery.policies.serving.state import Family, ServiceState
from joulery.policies.serving.variants.newcomers import assumed, unshared

FAMILY = "family"
"""Cause of the searches that begin because the variants changed."""


def family_of(variants: Iterable[str], assumed: Iterable[str] = ()) -> Family:
    """A family in the form that policies and their states hold, sorted.

    Args:
        variants: Names of its variants.
        assumed: Those among them whose times are taken from another variant until their own are known.
    """
    unknown = frozenset(assumed)
    return tuple((name, name in unknown) for name in sorted(variants))


def family_from(data: Mapping[str, Any]) -> Family:
    """The family in a policy's dictionary; empty where it has none.

    Raises:
        TypeError, ValueError: The entry is not a family.
    """
    return tuple((str(name), bool(assumed)) for name, assumed in data.get(FAMILY, ()))


def change_text(then: Family, now: Family) -> str:
    """The change as text: ``third joined and small left`` or ``the times of third are known``; empty for no change."""
    before, after = dict(then), dict(now)
    joined, left = [name for name in after if name not in before], [name for name in before if name not in after]
    parts = [f"{', '.join(joined)} joined"] * bool(joined) + [f"{', '.join(left)} left"] * bool(left)
    if parts:
        return " and ".join(parts)
    known = [name for name, assumed in now if before[name] and not assumed]
    return f"the times of {', '.join(known)} are known" if known else ""


def followed(state: ServiceState, now: Family) -> ServiceState:
    """The state after a change of the policy's family since its last step.

    Args:
        state: The state.
        now: The family; empty for one that never changes.
    """
    if not now or state.family == now:
        return state
    text = change_text(state.family, now) if state.family else ""
    if {name for name, _ in state.family} == {name for name, _ in now} or not text:
        return replace(state, family=now, changes=text)
    names = frozenset(name for name, _ in now)

    def stays(layout: Layout) -> bool:
        return names.issuperset(layout.counts)

    known = tuple(item for item in state.known if stays(item.layout))
    return replace(
        state,
        family=now,
        changes=text,
        whole=state.whole if state.whole is not None and stays(state.whole) else None,
        roomy_s=math.inf,
        trying=None,
        weights=(),
        mix=(OWN, None),
        baseline=state.baseline if state.baseline is not None and stays(state.baseline.layout) else None,
        known=known,
        known_before=len(known),
        asked=(),
        failures=tuple(filter(stays, state.failures)),
        skipped=frozenset(filter(stays, state.skipped)),
        excluded=frozenset(filter(stays, state.excluded)),
    )


def seen_by(family: Family, seen: Observation) -> Observation:
    """The observation without variants that left: no request is steered to them, and they measure no layout.

    Variants whose times are assumed are left out of steering and of the measure of how slow the machine is.
    """
    if not family:
        return seen
    names, unknown = dict(family), assumed(family)
    if seen.sample is not None and not names.keys() >= seen.sample.served.keys():
        seen = replace(seen, sample=None)
    if not names.keys() - unknown >= set(seen.loaded):
        seen = replace(seen, loaded=tuple(name for name in seen.loaded if name in names and name not in unknown))
    if unknown.intersection(seen.occupied_s):
        seen = replace(seen, occupied_s={name: s for name, s in seen.occupied_s.items() if name not in unknown})
    mix = unshared(seen.mix)
    return seen if mix is seen.mix else replace(seen, mix=mix)


def has_left(family: Family, layout: Layout | None) -> bool:
    """Whether a layout runs a variant that left."""
    return bool(family) and layout is not None and not dict(family).keys() >= set(layout.counts)


def decision_kind(state: ServiceState, seen: Observation) -> str:
    """Kind of the decision: keep the layout that runs, or set it, as after a change of the family."""
    return KEEP_LAYOUT if state.layout == seen.running and state.cause != FAMILY else SET_LAYOUT
