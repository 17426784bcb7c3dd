"""Changes of a device that take full effect or are rolled back, and are verified by reading the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from joulery.domain.errors import ActuationError, JouleryError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Surface(Generic[T]):
    """Functions that set and observe one knob. ``T`` is its whole state, comparable by ``==``.

    Attributes:
        what: The device, for messages.
        converge: Brings the device to a state from any other state; safe to repeat.
        observe: Returns the current state.
        failures: Exceptions that either function may raise when the vendor refuses.
        refused: Returns the error for the user where this process may not do it at all, or the device is gone; None
            otherwise.
    """

    what: str
    converge: Callable[[T], None]
    observe: Callable[[], T]
    failures: tuple[type[Exception], ...]
    refused: Callable[[Exception], JouleryError | None]


def change(surface: Surface[T], old: T, new: T, asked: str) -> float:
    """Change a device from ``old`` to ``new``, verify the change, and return the seconds it took.

    If a step fails, the device is set back to ``old``, and the error states whether that succeeded.

    Raises:
        CapabilityError: ``surface.refused`` returned it, and the device is set to ``old``.
        ActuationError: The device is set to ``old`` (``rolled_back``), or its setting is unknown (``left_dirty``).
    """
    start = time.monotonic()
    try:
        surface.converge(new)
        found = surface.observe()
    except surface.failures as error:
        _back(surface, old, asked, error)
    else:
        if found != new:
            _back(surface, old, asked, Unlike(f"it reads {found} afterwards"))
    return time.monotonic() - start


class Unlike(Exception):  # noqa: N818 - what was seen, not what was raised
    """Error for a device that reads otherwise than it was set."""


def _back(surface: Surface[T], old: T, asked: str, error: Exception) -> None:
    """Set a device back to its old state, then raise an error that states the outcome."""
    trouble: Exception | None = None
    try:
        surface.converge(old)
    except surface.failures as second:
        trouble = second
    try:
        restored = surface.observe() == old
    except surface.failures as third:
        restored, trouble = False, trouble or third
    if restored:
        refused = surface.refused(error)
        if refused is not None:
            raise refused from error
        raise ActuationError(
            f"{surface.what} could not be set to {asked}: {error}; it is set as it was before",
            rolled_back=(asked,),
        ) from error
    raise ActuationError(
        f"{surface.what} could not be set to {asked}: {error}; and not be set back: {trouble or 'it reads otherwise'}",
        left_dirty=(surface.what,),
        hint="see what it is set to (joulery doctor), then: joulery doctor --reset",
    ) from error
