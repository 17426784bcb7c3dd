"""Traces of running programs: the steps to record, and the recorded sessions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from joulery.domain.errors import ConfigError
from joulery.domain.trace.events import EventTrace

_ENTRY = re.compile(r"^(skip|warmup|active|repeat)=(\d+)$")


@dataclass(frozen=True, slots=True)
class Steps:
    """Recorded steps of a program: ``repeat`` cycles of ``skip``, ``warmup`` and ``active`` steps.

    Attributes:
        skip: Steps before each cycle that run untouched.
        warmup: Steps in which the profiler settles; they are not kept.
        active: Steps that are recorded.
        repeat: Cycles; 0 for as many as the program has.

    Raises:
        ConfigError: No step would be recorded, or a number is negative.
    """

    skip: int = 1
    warmup: int = 1
    active: int = 3
    repeat: int = 3

    def __post_init__(self) -> None:
        if self.active < 1 or min(self.skip, self.warmup, self.repeat) < 0:
            raise ConfigError(
                "not a schedule of steps",
                pointer="steps",
                got=f"skip={self.skip},warmup={self.warmup},active={self.active},repeat={self.repeat}",
                expected="active at least 1, nothing below 0",
            )

    @classmethod
    def parse(cls, text: str) -> Steps:
        """Parse ``skip=10,warmup=2,active=5,repeat=3``; omitted entries have their defaults.

        Raises:
            ConfigError: The text is not such a list.
        """
        found: dict[str, int] = {}
        for entry in filter(None, text.split(",")):
            match = _ENTRY.match(entry.strip())
            if match is None or match[1] in found:
                raise ConfigError(
                    "not a schedule of steps", pointer="steps", got=text, expected="skip=10,warmup=2,active=5,repeat=3"
                )
            found[match[1]] = int(match[2])
        return cls(**found)


@dataclass(frozen=True, slots=True)
class ClockFit:
    """Fit of the clock of a trace to the clock of the power readings.

    Attributes:
        offset_ns: Added to the stamps of the trace; None without a clock mark (then nothing was added).
        residual_ns: Largest distance of a mark from that offset.
        uncertainty_ns: Half the time that taking a mark took: no offset can be more exact.
    """

    offset_ns: int | None
    residual_ns: int
    uncertainty_ns: int


@dataclass(frozen=True, slots=True)
class TracedSession:
    """One recorded period of a program.

    Attributes:
        trace: Its events, on the clock of the power readings.
        window_ns: From its first to its last step, Unix nanoseconds.
        steps: Steps recorded.
        process: Process id.
        clock: Fit of the trace's clock to the clock of the power readings.
        kind: Kind of its steps: ``training`` (an optimizer's), ``evaluation`` (calls without gradients) or ``other``.
        uuids: UUID by the device name that the program gave (``GPU:0``).
        rank: Rank of the process in a distributed program; None elsewhere.
        samples: Samples that data loaders gave for these steps; None where that is not known.
        tokens: Tokens of these steps, padding included; None where that is not known.
    """

    trace: EventTrace
    window_ns: tuple[int, int]
    steps: int
    process: int
    clock: ClockFit
    kind: str = "other"
    uuids: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None
    samples: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Steps of a traced program, recorded or not.

    Attributes:
        training: Steps of an optimizer.
        evaluation: Calls of a model without gradients.
        other: Steps of neither kind, such as calls of compiled functions.
    """

    training: int = 0
    evaluation: int = 0
    other: int = 0

    def __add__(self, more: StepCounts) -> StepCounts:
        return StepCounts(self.training + more.training, self.evaluation + more.evaluation, self.other + more.other)
