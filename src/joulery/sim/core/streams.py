"""Independent random streams by name, all from one seed.

Every source of randomness (the arrivals of one service, the noise of one instance) draws from a stream of its own. A
policy that makes one source draw more or fewer numbers therefore changes nothing that any other source draws: two
policies under one seed face the same workload, and only the policies differ (common random numbers).

>>> streams = Streams(7)
>>> streams("arrivals", "W1") is not streams("arrivals", "W1")  # every call starts the stream afresh
True
>>> bool(streams("arrivals", "W1").random() == streams("arrivals", "W1").random())
True
>>> bool(streams("arrivals", "W1").random() == streams("arrivals", "W2").random())
False
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from joulery.domain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Streams:
    """Random generators by name; equal ``(seed, name)`` give equal numbers on every machine.

    Attributes:
        seed: What a user sets to repeat or vary a run, 0 or larger.
    """

    seed: int

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError("a seed is a whole number of 0 or more", got=str(self.seed))

    def __call__(self, *name: str) -> np.random.Generator:
        """The stream called ``name``, from its beginning."""
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.entropy(*name))))

    def entropy(self, *name: str) -> tuple[int, ...]:
        """The numbers that seed the stream called ``name``."""
        digest = blake2b("\0".join(name).encode(), digest_size=16).digest()
        return (self.seed, *np.frombuffer(digest, "<u4").tolist())
