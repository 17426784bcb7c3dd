"""The outcome of every request of a load, as columns."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.errors import DataError

ANSWERED, UNSENT, ABANDONED = "answered", "unsent", "abandoned"
DELAY_S = 0.05
"""A request sent this many seconds or more after it was due had to wait for a connection or for the generator."""
_TEXTS = ("error", "variant", "quality")
_TIMES = ("intended_s", "sent_s", "end_s", "energy_j", "carbon_g")
_NAN = float("nan")


class Outcomes:
    """Outcomes of the requests of a load: one row for each request, in the order of their times.

    Columns: ``input`` (row of the inputs), ``intended_s``, ``sent_s``, ``end_s`` (Unix seconds; NaN where that never
    happened), ``status`` (HTTP; 0 without an answer), ``error`` (``answered``, ``timeout``, ``refused``, ``reset``;
    after a stop ``abandoned`` or ``unsent``), and from the answer's headers: ``variant``, ``energy_j``,
    ``carbon_g`` (NaN where they have none), ``quality``.
    """

    def __init__(self) -> None:
        self.input = array("l")
        self.status = array("l")
        self.numbers = {name: array("d") for name in _TIMES}
        self.texts: dict[str, list[str]] = {name: [] for name in _TEXTS}

    def __len__(self) -> int:
        return len(self.input)

    def add(self, which: int, intended_s: float) -> int:
        """Add a request that is due; return its row."""
        self.input.append(which)
        self.status.append(0)
        for name in _TIMES:
            self.numbers[name].append(_NAN)
        self.numbers["intended_s"][-1] = intended_s
        for name in _TEXTS:
            self.texts[name].append("")
        self.texts["error"][-1] = UNSENT
        return len(self.input) - 1

    def column(self, name: str) -> FloatArray:
        """A column of numbers, float64[n]."""
        return np.array(self.numbers[name] if name in self.numbers else getattr(self, name), np.float64)

    @property
    def latency_s(self) -> FloatArray:
        """Seconds from a request's due time to its answer, float64[n]; NaN without an answer."""
        answered = np.array([error == ANSWERED for error in self.texts["error"]], bool)
        return np.where(answered, self.column("end_s") - self.column("intended_s"), _NAN)

    def summary(self, slo_s: float = _NAN) -> dict[str, Any]:
        """Counts of outcomes, and latency quantiles of the requests answered with 200.

        ``sent`` is ``answered`` (200), ``failed`` (any other answer, a timeout, a lost connection; ``refused`` of them
        with 429) and ``abandoned`` (sent, and without an answer when the load was stopped). ``late`` are those of
        ``answered`` whose latency, from when they were due, exceeds ``slo_s``. ``delayed`` were sent :data:`DELAY_S` or
        more after they were due, for want of a free connection: there the load was not open-loop.

        Args:
            slo_s: Latency of the SLO; NaN for none.
        """
        fine = self.column("status") == 200
        latency_s = self.latency_s[fine]
        ends_s = self.column("end_s")[fine]
        span_s = float(np.max(ends_s) - np.min(self.column("intended_s"))) if len(ends_s) else 0.0
        marks = np.quantile(latency_s, (0.5, 0.95, 0.99)) if len(latency_s) else (_NAN,) * 3
        sent_s = self.column("sent_s")
        sent = np.isfinite(sent_s)
        errors = np.array(self.texts["error"], object)
        delay_s = (sent_s - self.column("intended_s"))[sent]
        counts: dict[str, int] = {}
        for status, error in zip(self.status, self.texts["error"], strict=True):
            kind = str(status) if error == ANSWERED else error
            counts[kind] = counts.get(kind, 0) + 1
        return {
            "requests": len(self),
            "ok": int(np.count_nonzero(fine)),
            "sent": int(np.count_nonzero(sent)),
            "answered": int(np.count_nonzero(fine)),
            "failed": int(np.count_nonzero(sent & ~fine & (errors != ABANDONED))),
            "refused": int(np.count_nonzero(sent & (self.column("status") == 429))),
            "abandoned": int(np.count_nonzero(sent & (errors == ABANDONED))),
            "late": int(np.count_nonzero(latency_s > slo_s)),
            "delayed": int(np.count_nonzero(delay_s >= DELAY_S)),
            "delay_max_s": float(delay_s.max()) if len(delay_s) else 0.0,
            "by_outcome": dict(sorted(counts.items())),
            "ok_rps": len(latency_s) / span_s if span_s > 0 else 0.0,
            **{f"p{p}_s": None if np.isnan(q) else float(q) for p, q in zip((50, 95, 99), marks, strict=True)},
        }

    def write(self, path: Path) -> None:
        """Write the columns as Parquet, whole or not at all.

        Raises:
            DataError: The file cannot be written.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns: dict[str, Any] = {
            "input": pa.array(self.input, pa.int32()),
            "status": pa.array(self.status, pa.int16()),
        }
        columns |= {name: pa.array(np.array(values, np.float64)) for name, values in self.numbers.items()}
        columns |= {name: pa.array(values).dictionary_encode() for name, values in self.texts.items()}
        partial = path.with_name(f".{path.name}.partial")
        try:
            pq.write_table(pa.table(columns), partial)
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise DataError(f"the outcomes cannot be written: {error.strerror or error}", file=str(path)) from error


def read_outcomes(path: Path) -> Outcomes:
    """Read the outcomes that ``Outcomes.write`` wrote.

    Raises:
        DataError: The file cannot be read, or contains something else.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        columns = {name: table.column(name).to_pylist() for name in ("input", "status", *_TIMES, *_TEXTS)}
    except (OSError, KeyError, pa.ArrowException) as error:
        raise DataError(f"not outcomes of a load: {error}", file=str(path)) from error
    outcomes = Outcomes()
    outcomes.input, outcomes.status = array("l", columns["input"]), array("l", columns["status"])
    outcomes.numbers = {name: array("d", columns[name]) for name in _TIMES}
    outcomes.texts = {name: columns[name] for name in _TEXTS}
    return outcomes
