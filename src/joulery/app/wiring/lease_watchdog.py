"""Entry point of the watchdog of leases: ``python -m joulery.app.wiring.lease_watchdog FOLDER PID START``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from joulery.app.wiring.devices import open_device
from joulery.domain.gpu.device import Owner
from joulery.runtime.leasing.watchdog import watch_leases
from joulery.store.leases import LeaseBook, owner_of


def main() -> int:
    """Watch the process named on the command line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a supervisor that ends the holder may signal its whole group
    folder, pid, start_ticks = sys.argv[1:]
    me = owner_of(os.getpid())
    owner = Owner(int(pid), int(start_ticks), me.boot_id, "", me.pid_namespace) if me else Owner(int(pid), 0, "")
    return watch_leases(LeaseBook(Path(folder)), owner, open_device)


if __name__ == "__main__":
    sys.exit(main())
