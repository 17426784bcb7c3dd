"""Open the devices of this machine whose power limit may be set: its GPUs and its CPUs."""

from __future__ import annotations

import time
from collections.abc import Callable

from joulery.app.wiring.devices import open_device, open_power, rapl_spec
from joulery.domain.errors import CapabilityError, ConfigError
from joulery.domain.gpu.device import DeviceSpec, lease_name
from joulery.runtime.leasing.leases import LeaseHolder
from joulery.runtime.leasing.limited_device import Activity, LimitedDevice
from joulery.runtime.leasing.watchdog import revert_lease
from joulery.store.leases import LeaseBook, LeaseState, lease_state


def limited_gpus(holder: LeaseHolder, leases: LeaseBook) -> list[LimitedDevice]:
    """Open the GPUs of this machine whose power limit this process may set.

    Raises:
        CapabilityError: There is no such GPU, this process may not set it, or its container has no guard outside.
    """
    found: list[LimitedDevice] = []
    trouble: CapabilityError | None = None
    number = 0
    while True:
        try:
            found.append(limited_gpu(number, holder, leases))
        except ConfigError:  # no such board
            break
        except CapabilityError as error:
            if not (error.resource or "").startswith("gpu:") or error.grant:
                raise
            trouble = error  # this board alone: it has no power management, or is lost
        number += 1
    if not found:
        raise trouble or CapabilityError("this machine has no GPU", resource="nvml")
    return found


def limited_gpu(number: int | str, holder: LeaseHolder, leases: LeaseBook) -> LimitedDevice:
    """Open a GPU, with its power limit without any lease.

    Raises:
        CapabilityError: Its power limit may not or cannot be set.
        ConfigError: There is no such GPU.
    """
    from joulery.adapters.devices.power.nvidia_activity import NvidiaActivity

    spec = DeviceSpec("nvidia-power", {"gpu": number})
    index = number if isinstance(number, int) else 0
    return _limited(index, spec, holder, leases, lambda: NvidiaActivity(number))


def limited_cpus(holder: LeaseHolder, leases: LeaseBook) -> LimitedDevice:
    """Open the CPUs of this machine as one device, with their power limit without any lease.

    Raises:
        CapabilityError: Their power limit may not or cannot be set, or their energy cannot be read.
    """
    from joulery.adapters.devices.power.rapl_activity import RaplActivity

    spec = rapl_spec()
    return _limited(0, spec, holder, leases, lambda: RaplActivity(spec.options.get("root")))


def _limited(
    number: int, spec: DeviceSpec, holder: LeaseHolder, leases: LeaseBook, activity: Callable[[], Activity]
) -> LimitedDevice:
    device = open_power(spec)
    able = device.capability()
    if not able.settable:
        raise CapabilityError(f"{able.device}: {able.detail}", resource=able.device, grant=able.grant or None)
    holder.require_guard(able)
    now_s = time.time()
    name = lease_name(able.uuid or able.device, spec.knob)
    revert_lease(leases, name, open_device, lambda lease: lease_state(lease, now_s) is not LeaseState.HELD)
    if (held := leases.read(name)) is not None:
        owner = f"process {held.owner.pid} ({held.owner.program})"
        raise CapabilityError(f"the power limit of {able.device} is leased by {owner}", resource=able.device)
    set_w = device.observe().setting.limit_w
    full_w = able.default_w if set_w is None else set_w
    return LimitedDevice(
        number, able.device, device, spec, activity(), able.name, able.uuid, full_w, able.limits_w[0], able.parts
    )
