"""Entry point of the watchdog of leases: ``python -m joulery.app.wiring.lease_watchdog FOLDER PID``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from joulery.app.wiring.devices import open_device
from joulery.runtime.leasing.watchdog import watch
from joulery.store.leases import LeaseBook


def main() -> int:
    """Watch the process named on the command line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a supervisor that ends the holder may signal its whole group
    return watch(LeaseBook(Path(sys.argv[1])), int(sys.argv[2]), open_device)


if __name__ == "__main__":
    sys.exit(main())
