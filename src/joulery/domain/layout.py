"""How one device is cut and which variant runs on each piece: the unit that policies choose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from joulery.domain.errors import DataError
from joulery.domain.serving import Slice


@dataclass(frozen=True, slots=True, order=True)
class Instance:
    """One variant on one slice."""

    variant: str
    slice: Slice

    def __str__(self) -> str:
        return f"{self.variant} on {self.slice}"


@dataclass(frozen=True, slots=True)
class Layout:
    """The instances on one device. A multiset: layouts with the same instances are equal, whatever their order.

    Attributes:
        instances: Largest slices first, then by variant.

    Raises:
        DataError: No instances.
    """

    instances: tuple[Instance, ...]

    def __init__(self, instances: Iterable[Instance]) -> None:
        ordered = tuple(sorted(instances, key=lambda item: (-item.slice.cores, -item.slice.share_ratio, item)))
        if not ordered:
            raise DataError("a layout needs at least one instance")
        object.__setattr__(self, "instances", ordered)

    @property
    def counts(self) -> dict[str, int]:
        """Number of instances of each variant."""
        return dict(sorted(Counter(item.variant for item in self.instances).items()))

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The slices, in the order of the instances."""
        return tuple(item.slice for item in self.instances)

    def as_list(self) -> list[dict[str, Any]]:
        """JSON-ready: one object an instance."""
        return [{"variant": item.variant, "slice": item.slice.as_dict()} for item in self.instances]

    @classmethod
    def from_list(cls, items: Iterable[Mapping[str, Any]]) -> Layout:
        """The inverse of :meth:`as_list`.

        Raises:
            DataError: It is not what ``as_list`` writes.
        """
        try:
            return cls(Instance(str(item["variant"]), Slice.from_dict(item["slice"])) for item in items)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a layout: {error!r}") from error

    def __str__(self) -> str:
        return " | ".join(str(item) for item in self.instances)
