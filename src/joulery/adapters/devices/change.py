"""Changes that are whole or undone: converge on the new state, or back on the old one, and look which it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from joulery.domain.errors import ActuationError, JouleryError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Surface(Generic[T]):
    """Functions that set and observe one knob. ``T`` is everything it sets, comparable by ``==``.

    Attributes:
        what: The device, for messages.
        converge: Bring it to a state from whatever state it is in; calling it again does no harm.
        observe: The state it is in.
        failures: What either may raise when the vendor refuses.
        refused: The error for a person where this process may not do it at all, or the device is gone; None otherwise.
    """

    what: str
    converge: Callable[[T], None]
    observe: Callable[[], T]
    failures: tuple[type[Exception], ...]
    refused: Callable[[Exception], JouleryError | None]


def change(surface: Surface[T], old: T, new: T, asked: str) -> float:
    """Bring a device from ``old`` to ``new``, verified; seconds it took.

    Where anything fails it is brought back to ``old``, and the error says whether that is what it is set to.

    Raises:
        CapabilityError: ``surface.refused`` says so, and nothing was changed.
        ActuationError: It is set to ``old`` again (``rolled_back``), or its setting is unknown (``left_dirty``).
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
    """A device that reads otherwise than it was set, without an error."""


def _back(surface: Surface[T], old: T, asked: str, error: Exception) -> None:
    """Undo, then raise what became of it."""
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
