"""Configuration of a sampler process, passed as one command-line argument."""

from __future__ import annotations

import json
from typing import NamedTuple

from joulery.domain.energy.channel import MeterSpec


class SamplerConfig(NamedTuple):
    """Configuration of a sampler.

    Attributes:
        folder: Existing folder for its files.
        parent: Process with which the sampler ends.
        root: Root of the process tree that is the run.
        include_root: Whether the root's own CPU time is the run's (it is not where joulery only starts the program).
        period_s: Time between two readings of a meter that always has a new value.
        max_cpu_ratio: Share of one core it may take before it reads less often.
        meters: Meters to open; None for those that this machine has.
        group: Control group of the run, and whether it counts each CPU; None where there is none.
        also: Further processes of the run, with their children.
        boards: GPUs that are the run's alone, whichever process computes there: those of an engine that was started
            elsewhere.
        threads: Folder of a traced program; the CPU times of threads are read while it records. None for none.
    """

    folder: str
    parent: int
    root: int
    include_root: bool
    period_s: float
    max_cpu_ratio: float
    meters: tuple[MeterSpec, ...] | None = None
    group: tuple[str, bool] | None = None
    threads: str | None = None
    also: tuple[int, ...] = ()
    boards: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The configuration as JSON, for one command-line argument."""
        meters = None if self.meters is None else [meter.as_dict() for meter in self.meters]
        return json.dumps({**self._asdict(), "meters": meters})

    @classmethod
    def from_json(cls, text: str) -> SamplerConfig:
        """The reverse of :meth:`to_json`."""
        fields = json.loads(text)
        if fields["meters"] is not None:
            fields["meters"] = tuple(MeterSpec(**spec) for spec in fields["meters"])
        for name in ("also", "boards"):
            fields[name] = tuple(fields.get(name, ()))
        return cls(**fields)
