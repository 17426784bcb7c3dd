"""Program ``python -m joulery.app.sampler JSON``: opens the meters of this machine and samples them.

The argument is a :class:`~joulery.runtime.measuring.sampler_config.SamplerConfig`. Imports nothing heavy:
every measured run starts this process.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from joulery.app.wiring.meters import open_meters
from joulery.app.wiring.share import open_busy, open_threads, open_tree, remove_group
from joulery.domain.errors import JouleryError
from joulery.runtime.measuring.sampler import Sampler
from joulery.runtime.measuring.sampler_config import SamplerConfig

if TYPE_CHECKING:
    from joulery.domain.energy.channel import MeterSpec
    from joulery.runtime.measuring.share import BusyReader, OpenMeters, ThreadReader, TreeReader

_PR_SET_PDEATHSIG = 1


class MachineSources:
    """Opens the meters and the readers of CPU times of this machine."""

    def meters(self, specs: Sequence[MeterSpec] | None) -> OpenMeters:
        """Open the named meters, or the preferred ones that this machine has."""
        return open_meters(specs)

    def busy(self) -> BusyReader:
        """Reader of the busy times of the CPUs, from ``/proc/stat``."""
        return open_busy()

    def tree(self, config: SamplerConfig, sockets: tuple[int, ...]) -> TreeReader:
        """Reader of the run's CPU time, from its control group or from ``/proc``; the sampler's own is left out."""
        return open_tree(
            config.root,
            include_root=config.include_root,
            exclude=frozenset({os.getpid()}),
            sockets=sockets,
            group=config.group,
            also=config.also,
        )

    def threads(self) -> ThreadReader:
        """Reader of the CPU times of threads, from ``/proc``."""
        return open_threads()

    def remove_group(self, group: tuple[str, bool]) -> None:
        """Delete the control group of a run."""
        remove_group(group)


def main(argument: str) -> int:
    """Run a sampler to its end; return the exit code."""
    gc.disable()
    config = SamplerConfig.from_json(argument)
    _allow_many_files()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sampler = Sampler(config, _say, MachineSources())
        signal.signal(signal.SIGTERM, lambda *_: sampler.stop())
        signal.signal(signal.SIGUSR1, lambda *_: sampler.stop_if_orphaned())
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
        sampler.run()
    except JouleryError as error:
        _say({"error": error.as_dict()})
        return 1
    return 0


def _say(message: Mapping[str, Any]) -> None:
    try:
        os.write(1, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:  # the reader is gone; the files hold everything
        return


def _allow_many_files() -> None:
    """Raise the limit of open files: one stays open for every process of the run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
