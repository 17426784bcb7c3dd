"""A real Slurm on this machine for tests: slurmctld and slurmd of Debian's packages, fake GPUs, ports of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import slurm_suite
from tests.ports import free_ports
from tests.waiting import wait_until

SUITE = slurm_suite.use()
"""The folder of the Slurm that ``JOULERY_SLURM`` names; None for the one that is installed."""
SLURMD = ("slurmd",) if SUITE is None else ("slurmd", "-d", str(SUITE / "usr/sbin/slurmstepd"))
"""How slurmd is started: it would look for slurmstepd where it was built to be installed."""
_PROGRAMS = ("slurmctld", "slurmd", "squeue", "scontrol", "sbatch", "sinfo")

_CONF = """\
ClusterName={cluster}
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldParameters=enable_configless
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,bf_continue,sched_min_interval=0,batch_sched_delay=0
PriorityType=priority/multifactor
JobRequeue=1
GresTypes=gpu
KillWait={kill_wait}
MinJobAge=3600
{accounting}
JobCompType=jobcomp/none
{nodes}
PartitionName=train Nodes={name}[1-{count}] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no Slurm can be started here; None when one can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"Slurm is not installed ({', '.join(absent)}): apt-get install slurm-wlm"
    return None if os.geteuid() == 0 else "starting Slurm daemons for a test needs root"


@dataclass
class SlurmCluster:
    """A running cluster.

    Attributes:
        folder: Its scratch folder.
        env: Environment in which Slurm's commands talk to it.
        nodes: Number of its nodes.
        name: Their names are this and a number.
    """

    folder: Path
    env: dict[str, str]
    nodes: int
    name: str = "g"
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self, *command: str) -> str:
        """The output of a command of Slurm."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def jobs(self) -> dict[int, dict[str, Any]]:
        """What ``squeue --json`` says of every job, ended ones too, in the plain form of 22.05 whatever the version."""
        jobs = json.loads(self.run("squeue", "--json", "--states=all"))["jobs"]
        return {job["job_id"]: {name: _plain(name, value) for name, value in job.items()} for job in jobs}

    def submit(self, script: Path, *options: str) -> str:
        """The id of a batch job; it may be requeued and its output goes on in the same file."""
        base = ("sbatch", "--parsable", "--requeue", "--open-mode=append", f"--chdir={self.folder}")
        return self.run(*base, *options, str(script)).strip()

    def start_controller(self) -> None:
        """slurmctld, answering."""
        conf = self.env["SLURM_CONF"]
        self._spawn("slurmctld", "slurmctld", "-D", "-f", conf)
        wait_until(lambda: "UP" in self._try("scontrol", "ping"), "an answer of slurmctld")

    def stop_controller(self) -> None:
        """End slurmctld, whose state stays on the disk."""
        self._end("slurmctld", signal.SIGTERM)

    def start_node(self, number: int) -> None:
        """One slurmd."""
        node = f"{self.name}{number}"
        self._spawn(node, *SLURMD, "-D", "-N", node, "-f", self.env["SLURM_CONF"])

    def stop_node(self, number: int) -> None:
        """End one slurmd at once, as a node that lost power."""
        self._end(f"{self.name}{number}", signal.SIGKILL)

    def close(self) -> None:
        """End everything: jobs first, then the daemons."""
        if self._try("scontrol", "ping"):
            subprocess.run(["scancel", "--user=root", "--signal=KILL"], env=self.env, check=False)
            subprocess.run(["scancel", "--user=root"], env=self.env, check=False)
            time.sleep(0.5)
        for name in list(self._processes):
            self._end(name, signal.SIGTERM if name == "slurmctld" else signal.SIGKILL)
        _end_inside(self.folder)

    def wait_idle(self) -> None:
        """Until every node is ready."""
        wait_until(
            lambda: (
                set(self._try("sinfo", "-h", "-N", "-o", "%N=%t").split())
                == {f"{self.name}{n}=idle" for n in range(1, self.nodes + 1)}
            ),
            "idle nodes",
        )

    def shown(self) -> str:
        """Jobs, nodes and the end of the controller's log, to find a fault by."""
        jobs = self._try("squeue", "-a", "-t", "all", "-o", "%i %T %N %r")
        nodes = self._try("sinfo", "-N", "-O", "nodelist,statelong,reason")
        log = self.folder / "slurmctld.log"
        return f"{jobs}\n{nodes}\n{log.read_text()[-4000:] if log.exists() else 'slurmctld has no log'}"

    def _spawn(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _end(self, name: str, number: signal.Signals) -> None:
        process = self._processes.pop(name)
        process.send_signal(number)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(15)

    def _try(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else ""


def _plain(name: str, value: Any) -> Any:
    """Newer versions write a number as ``{"set": true, "number": 7}`` and add flags to the state."""
    if name == "job_state" and isinstance(value, list):
        return "COMPLETING" if "COMPLETING" in value else value[0]
    if isinstance(value, dict) and "number" in value:
        return value["number"] if value.get("set") else 0
    return value


def _end_inside(folder: Path) -> None:
    """End what still runs in the cluster's folder: steps and jobs whose slurmd is gone."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes()
            where = str((entry / "cwd").readlink())
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        ours = str(folder).encode()
        if (
            int(entry.name) != os.getpid()
            and (b"slurmstepd" in line or where.startswith(str(folder)))
            and (ours in environment or where.startswith(str(folder)))
        ):
            try:
                os.kill(int(entry.name), signal.SIGKILL)
            except ProcessLookupError:
                continue


@contextmanager
def slurm_cluster(
    folder: Path,
    nodes: int = 4,
    gpus: int = 2,
    kill_wait: int = 3,
    submit_lua: str = "",
    conf_lines: str = "",
    types: Sequence[str] = (),
    accounting: str = "",
    name: str = "g",
    cluster: str = "joulery",
) -> Iterator[SlurmCluster]:
    """Nodes ``g1`` … with fake GPUs (null devices), torn down at the end.

    Args:
        folder: Scratch folder.
        nodes, gpus: Number of nodes, and of GPUs of each.
        kill_wait: Seconds from SIGTERM to SIGKILL.
        submit_lua: Its job_submit.lua.
        conf_lines: Further lines of slurm.conf.
        types: GPU type of each node; ``fake`` for all when empty. A node's type is its feature, too.
        accounting: Lines of slurm.conf from :func:`tests.slurm_accounting.slurm_database`, in the same folder; none
            without accounting.
        name: What the nodes are called, with a number: one letter, for socket paths are short; one of its own where an
            agent runs, which sees the jobs of every node of that name on this machine.
        cluster: Its ClusterName.
    """
    types = types or ("fake",) * nodes
    for part in ("state", "dev", *(f"spool/{name}{n}" for n in range(1, nodes + 1))):
        (folder / part).mkdir(parents=True)
    for gpu in range(gpus):
        os.mknod(folder / f"dev/gpu{gpu}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    host = socket.gethostname().split(".")[0]
    port, *node_ports = free_ports(nodes + 1)
    lines = [
        f"NodeName={name}{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_ports[n - 1]} CPUs=4 RealMemory=1000 "
        f"Gres=gpu:{types[n - 1]}:{gpus} Features={types[n - 1]}"
        for n in range(1, nodes + 1)
    ]
    conf = folder / "slurm.conf"
    conf.write_text(
        _CONF.format(
            host=host,
            port=port,
            folder=folder,
            kill_wait=kill_wait,
            nodes="\n".join(lines),
            count=nodes,
            name=name,
            cluster=cluster,
            accounting=f"AccountingStorageType=accounting_storage/{'slurmdbd' if accounting else 'none'}",
        )
    )
    conf.write_text(conf.read_text() + accounting + slurm_suite.conf_lines(SUITE) + conf_lines)
    if submit_lua:
        (folder / "job_submit.lua").write_text(submit_lua)
        conf.write_text(conf.read_text() + "JobSubmitPlugins=lua\n")
    (folder / "gres.conf").write_text(
        "AutoDetect=off\n"
        + "".join(
            f"NodeName={name}{n} Name=gpu Type={kind} File={folder}/dev/gpu[0-{gpus - 1}]\n"
            for n, kind in enumerate(types, 1)
        )
    )
    made = SlurmCluster(folder, {**os.environ, "SLURM_CONF": str(conf)}, nodes, name)
    try:
        made.start_controller()
        for number in range(1, nodes + 1):
            made.start_node(number)
        made.wait_idle()
        yield made
    except BaseException as error:
        error.add_note(made.shown())
        raise
    finally:
        made.close()
