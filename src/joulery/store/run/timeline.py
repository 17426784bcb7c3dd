"""Ticks, labels and decisions in a run directory: logged one by one, written as three series at the end.

::

    manifest.json      "site": the SiteLabel
    log.jsonl          {"kind": "tick", ...} and {"kind": "decision", "decision": {...}, "outcome": ...}
    timeline.parquet   a row a tick: every number of Tick, quality as text
    serving.parquet    a row a tick and service: t_s, service, requests, failed, latency_s, attainment_ratio,
                       accuracy_ratio; of language models tokens, first_token_s, energy_per_token_j
    mix.parquet        a row a tick, service and variant: t_s, service, variant, share_ratio

A live driver calls :func:`log_tick` and :func:`log_decision` while it runs and :func:`write_ticks` when it ends; a
reader calls :func:`read_site`, :func:`read_ticks` and :func:`read_decisions`, which work for a killed run too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from joulery.domain.decisions import Decision
from joulery.domain.energy.carbon import Scope, Signal
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality
from joulery.domain.renames import DECISION_KINDS, POLICY_NAMES, warn_renamed
from joulery.domain.serving.timeline import (
    CarbonBasis,
    CarbonLabel,
    DecisionRecord,
    ServiceLabel,
    ServiceTick,
    SiteLabel,
    Tick,
)
from joulery.store.fields import instant, known, number, pairs, text, whole
from joulery.store.run.directory import Run, RunWriter

_NUMBERS = tuple(f.name for f in dataclasses.fields(Tick) if f.name not in {"quality", "services"})
_SERVICE = tuple(f.name for f in dataclasses.fields(ServiceTick) if f.name != "mix")


def write_site(run: RunWriter, site: SiteLabel) -> None:
    """Write the labels of a site into the manifest."""
    run.describe(site=dataclasses.asdict(site))


def log_tick(run: RunWriter, tick: Tick) -> None:
    """Append a tick to the log."""
    fields = dataclasses.asdict(tick)
    run.log("tick", t_s=fields.pop("t_s"), **fields)


def log_decision(run: RunWriter, record: DecisionRecord) -> None:
    """Append a decision to the log."""
    decision = dataclasses.asdict(record.decision)
    run.log("decision", t_s=record.t_s, decision=decision, outcome=record.outcome, detail=record.detail)


def write_ticks(run: RunWriter, ticks: Sequence[Tick]) -> None:
    """Write the three series; later corrections (a baseline computed at the end) replace the logged values."""
    timeline: dict[str, list[Any]] = {name: [float(getattr(t, name)) for t in ticks] for name in _NUMBERS}
    timeline["quality"] = [tick.quality.value for tick in ticks]
    rows = [(tick.t_s, service) for tick in ticks for service in tick.services]
    serving: dict[str, list[Any]] = {"t_s": [t_s for t_s, _ in rows]}
    serving.update({name: [getattr(service, name) for _, service in rows] for name in _SERVICE})
    shares = [(t_s, s.service, variant, ratio) for t_s, s in rows for variant, ratio in s.mix]
    columns: list[list[Any]] = [[row[at] for row in shares] for at in range(4)]
    run.write_series("timeline", timeline)
    run.write_series("serving", serving)
    run.write_series("mix", dict(zip(("t_s", "service", "variant", "share_ratio"), columns, strict=True)))


def read_site(run: Run) -> SiteLabel | None:
    """The labels; None when the run is not of a site.

    Raises:
        DataError: They are damaged.
    """
    value = run.manifest.get("site")
    if value is None:
        return None
    try:
        carbon = value["carbon"]
        return SiteLabel(
            name=text(value["name"]),
            mode=text(value["mode"]),
            simulated=bool(value["simulated"]),
            carbon=None if carbon is None else _carbon(carbon),
            services=tuple(
                ServiceLabel(
                    text(service["name"]),
                    number(service["slo_s"]),
                    number(service["quantile_ratio"]),
                    pairs(service["variants"]),
                    number(service["minimum_accuracy_ratio"]),
                    bool(service.get("language_model", False)),
                )
                for service in value["services"]
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(run, "manifest.json: site", error) from error


def _carbon(value: Mapping[str, Any]) -> CarbonLabel:
    return CarbonLabel(
        zone=text(value["zone"]),
        source=text(value["source"]),
        basis=CarbonBasis(value["basis"]),
        signal=Signal(value["signal"]),
        scope=Scope(value["scope"]),
        speed=number(value["speed"]),
    )


def read_ticks(run: Run) -> tuple[Tick, ...]:
    """The ticks of a run: from its series, or from the log while there are none.

    Raises:
        DataError: They are damaged.
    """
    try:
        if "timeline" in run.series_names:
            return tuple(_ticks_of_series(run))
        return tuple(_tick_of_log(entry) for entry in run.log("tick"))
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(run, "ticks", error) from error


def read_decisions(run: Run) -> tuple[DecisionRecord, ...]:
    """The decisions of a run, from its log.

    Raises:
        DataError: They are damaged.
    """
    entries = list(run.log("decision"))
    try:
        records = tuple(
            DecisionRecord(
                instant(entry["t_s"]), _decision(entry["decision"]), text(entry["outcome"]), text(entry["detail"])
            )
            for entry in entries
        )
        old = sorted({entry["decision"]["kind"] for entry in entries} & DECISION_KINDS.keys())
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(run, "decisions", error) from error
    for kind in old:
        warn_renamed(kind, DECISION_KINDS[kind], f"{run.path}: decision")
    return records


def _decision(value: Mapping[str, Any]) -> Decision:
    return Decision(
        kind=DECISION_KINDS.get(text(value["kind"]), value["kind"]),
        target=text(value["target"]),
        value=value["value"],
        policy=POLICY_NAMES.get(text(value["policy"]), value["policy"]),
        reason=text(value["reason"]),
        cause=text(value["cause"]),
    )


def _damaged(run: Run, what: str, error: Exception) -> DataError:
    return DataError(f"{what}: {type(error).__name__} {error}", file=str(run.path))


def _ticks_of_series(run: Run) -> Iterable[Tick]:
    mixes: dict[tuple[float, str], list[tuple[str, float]]] = {}
    mix = run.series("mix")
    for t_s, service, variant, ratio in zip(*(mix[name].tolist() for name in mix), strict=True):
        mixes.setdefault((t_s, service), []).append((variant, ratio))
    services: dict[float, list[ServiceTick]] = {}
    serving = run.series("serving")
    names = [name for name in _SERVICE if name in serving]  # runs before language models had ticks lack their columns
    for t_s, *values in zip(*(serving[name].tolist() for name in ("t_s", *names)), strict=True):
        fields = dict(zip(names, values, strict=True))
        fields["mix"] = tuple(mixes.get((t_s, fields["service"]), ()))
        services.setdefault(t_s, []).append(ServiceTick(**fields))
    timeline = run.series("timeline")
    quality = timeline["quality"].tolist()
    for row, cells in enumerate(zip(*(timeline[name].tolist() for name in _NUMBERS), strict=True)):
        numbers = dict(zip(_NUMBERS, cells, strict=True))
        served = tuple(services.get(numbers["t_s"], ()))
        yield Tick(**numbers, quality=Quality(quality[row]), services=served)


def _tick_of_log(entry: Mapping[str, Any]) -> Tick:
    numbers = {name: known(entry[name]) for name in _NUMBERS}
    services = tuple(
        ServiceTick(
            service=text(service["service"]),
            requests=whole(service["requests"]),
            failed=whole(service["failed"]),
            latency_s=known(service["latency_s"]),
            attainment_ratio=known(service["attainment_ratio"]),
            accuracy_ratio=known(service["accuracy_ratio"]),
            mix=pairs(service["mix"]),
            tokens=whole(service.get("tokens", 0)),
            first_token_s=known(service.get("first_token_s")),
            energy_per_token_j=known(service.get("energy_per_token_j")),
        )
        for service in entry["services"]
    )
    return Tick(**numbers, quality=Quality(entry["quality"]), services=services)
