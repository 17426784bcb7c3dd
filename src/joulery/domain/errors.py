"""Every error joulery raises on purpose.

::

    JouleryError                    exit 1
    ├── ConfigError                 exit 2   the site file or a flag is wrong: where, what was got, how to fix it
    ├── DataError                   exit 2   a series, trace or log is wrong: gap, order, unit, coverage
    │   └── StaleDataError          exit 2   the newest value is older than the caller allows
    ├── CapabilityError             exit 2   this machine cannot, or may not: how to grant it
    ├── InfeasibleError             exit 3   no plan satisfies the constraints: which one binds, the nearest plan
    └── ActuationError              exit 4   a change was tried and did not complete: what is left behind

Raise at the boundary, with what was got and how to fix it. Anything else that escapes is a bug (exit 1).
"""

from __future__ import annotations

from typing import Any


class JouleryError(Exception):
    """Base of all errors meant for a user; ``str(error)`` is one complete sentence, ``hint`` says how to fix it."""

    exit_code = 1
    kind = "error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def as_dict(self) -> dict[str, Any]:
        """The error as a JSON-ready object: ``kind``, ``message``, ``hint`` and the fields of its class."""
        fields = {k: v for k, v in vars(self).items() if k not in {"message", "hint"} and v is not None}
        return {"kind": self.kind, "message": self.message, "hint": self.hint, **fields}


class ConfigError(JouleryError):
    """A configuration file or flag is wrong.

    Args:
        message: What is wrong.
        file: The file, as the user named it.
        pointer: Dotted path of the key (``services.0.slo.latency``).
        line: 1-based line in the file.
        got: The offending value, as written.
        expected: What would be accepted.
        hint: How to fix it.
    """

    exit_code = 2
    kind = "config"

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        pointer: str | None = None,
        line: int | None = None,
        got: str | None = None,
        expected: str | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.file = file
        self.pointer = pointer
        self.line = line
        self.got = got
        self.expected = expected

    def __str__(self) -> str:
        where = self.file or ""
        if self.line is not None:
            where += f":{self.line}"
        if self.pointer:
            where += f" {self.pointer}" if where else self.pointer
        text = f"{where}: {self.message}" if where else self.message
        if self.got is not None:
            text += f" (got {self.got}" + (f", expected {self.expected})" if self.expected else ")")
        elif self.expected:
            text += f" (expected {self.expected})"
        return text


class DataError(JouleryError):
    """A series, trace or log cannot be used as it is.

    Args:
        message: What is wrong, with the offending value.
        file: The file, where there is one.
        row: 1-based line of the first offending row.
        hint: How to fix it.
    """

    exit_code = 2
    kind = "data"

    def __init__(self, message: str, *, file: str | None = None, row: int | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.file = file
        self.row = row

    def __str__(self) -> str:
        if self.file is None:
            return self.message
        return f"{self.file}{f':{self.row}' if self.row is not None else ''}: {self.message}"


class StaleDataError(DataError):
    """The newest value is older than the caller allows."""

    kind = "stale"


class CapabilityError(JouleryError):
    """This machine cannot do what was requested, or lacks the permission.

    Args:
        message: What was requested and what prevents it.
        resource: The file, device or package in question.
        grant: The exact command line that grants it, where one exists.
        hint: Anything else that helps.
    """

    exit_code = 2
    kind = "capability"

    def __init__(self, message: str, *, resource: str | None = None, grant: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint or (f"run: {grant}" if grant else ""))
        self.resource = resource
        self.grant = grant


class InfeasibleError(JouleryError):
    """No plan satisfies the constraints.

    Args:
        message: Which demand cannot be met.
        binding: The constraint that binds.
        nearest: The least-bad plan or value, JSON-ready, where one exists.
        hint: What to relax.
    """

    exit_code = 3
    kind = "infeasible"

    def __init__(self, message: str, *, binding: str | None = None, nearest: Any = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.binding = binding
        self.nearest = nearest


class ActuationError(JouleryError):
    """A change of hardware, engine or jobs did not complete.

    Args:
        message: What failed.
        applied: Steps that took effect and stand.
        rolled_back: Steps that were undone.
        left_dirty: Steps that could not be undone; a person has to check them.
        hint: How to put it right.
    """

    exit_code = 4
    kind = "actuation"

    def __init__(
        self,
        message: str,
        *,
        applied: tuple[str, ...] = (),
        rolled_back: tuple[str, ...] = (),
        left_dirty: tuple[str, ...] = (),
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.applied = applied
        self.rolled_back = rolled_back
        self.left_dirty = left_dirty
