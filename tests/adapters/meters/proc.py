"""A /proc and a /sys on disk, as far as meters read them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

GENOA = {"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "17", "stepping": "1", "model name": "AMD EPYC"}


class Machine:
    """``sockets`` lists the socket of each logical CPU; -1 where the machine does not say."""

    def __init__(self, root: Path, sockets: Sequence[int], cpuinfo: Mapping[str, str] = GENOA) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        self.proc.mkdir(parents=True)
        for cpu, socket in enumerate(sockets):
            topology = self.sys / f"devices/system/cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "physical_package_id").write_text(f"{socket}\n")
        (self.sys / "devices/system/cpu/cpufreq").mkdir(parents=True)
        block = "".join(f"{key}\t: {value}\n" for key, value in cpuinfo.items())
        (self.proc / "cpuinfo").write_text(f"processor\t: 0\n{block}\nprocessor\t: 1\n{block.replace('25', '99')}\n")
        self.busy([0] * len(sockets))

    def busy(self, ticks: Sequence[int], *, offline: Sequence[int] = ()) -> None:
        """Let each CPU have been busy for so many ticks, all in user mode; the other columns must not count."""
        lines = ["cpu  1 2 3 4 5 6 7 8 9 10"]
        lines += [f"cpu{cpu} {t} 0 0 90000 777 0 0 555 {t} 0" for cpu, t in enumerate(ticks) if cpu not in offline]
        (self.proc / "stat").write_text("\n".join([*lines, "intr 1 2 3", "ctxt 5", ""]))
