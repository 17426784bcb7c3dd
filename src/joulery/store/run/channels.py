"""Convert channels to and from JSON objects. The sampler uses this module, so it imports little."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from joulery.domain.energy.channel import Channel, ReadingKind
from joulery.domain.errors import DataError
from joulery.domain.quality import Quality


def channel_to_dict(channel: Channel) -> dict[str, Any]:
    """The fields of a channel; unknown values (NaN) are null."""
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in channel._asdict().items()
    }


def channel_from_dict(value: Mapping[str, Any]) -> Channel:
    """The channel of an object that :func:`channel_to_dict` made; further keys are ignored.

    Raises:
        DataError: A key is missing or holds the wrong kind of value.
    """
    try:
        known: dict[str, Any] = {
            key: math.nan if v is None else v for key, v in value.items() if key in Channel._fields
        }
        known |= {"kind": ReadingKind(value["kind"]), "quality": Quality(value["quality"])}
        return Channel(**known)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"not a channel: {type(error).__name__} {error}") from error
