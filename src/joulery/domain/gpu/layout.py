"""The layout of one device: its partition and the variant on each slice. Policies choose layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from joulery.domain.errors import ConfigError, DataError
from joulery.domain.serving.service import Slice

SliceAssignment = Mapping[tuple[Slice, ...], tuple[tuple[Slice, str], ...]]
"""Mapping from the sorted slices of a partition to the same slices, each with its GPU."""


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

    def names(self) -> list[str]:
        """The instances as JSON-ready texts: ``["lite2 on cpu:1", "lite0 on cpu:1"]``."""
        return [str(item) for item in self.instances]

    @classmethod
    def parse(cls, names: Iterable[str]) -> Layout:
        """Parse a layout from its :meth:`names`.

        Raises:
            DataError: A text is not the name of an instance, or there are none.
        """
        try:
            pairs = [str(name).rsplit(" on ", 1) for name in names]
            return cls(Instance(variant, Slice.parse(piece)) for variant, piece in pairs)
        except (ConfigError, TypeError, ValueError) as error:
            raise DataError(f"not a layout: {error}") from error

    def __str__(self) -> str:
        return " | ".join(str(item) for item in self.instances)
