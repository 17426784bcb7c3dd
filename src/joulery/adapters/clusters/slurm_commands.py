"""All commands of Slurm that joulery may issue, and their runner.

Commands are defined only here; docs/how-to/slurm-commands.md lists them, and a test compares the two.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from joulery.domain.errors import ActuationError, CapabilityError, ConfigError

READS: Mapping[str, str] = MappingProxyType(
    {
        "jobs": "squeue --json --states=all",
        "jobs as text": "squeue -h -a -O {columns}",
        "job as text": "squeue -h -a -j {job} -O {columns}",
        "nodes": "sinfo -h -N -O {columns}",
        "nodes of partitions": "sinfo -h -N -p {partitions} -O {columns}",
        "configuration": "scontrol show config",
        "node": "scontrol show node {node}",
        "reservations": "scontrol -o show reservation",
        "priorities": "sprio -h -o %i|%Y|%S",
        "token": "scontrol token lifespan=86400",
        "script": "scontrol write batch_script {job} {file}",
    }
)
"""Commands that change nothing. ``script`` writes a job's script to a temporary file."""
CHANGES: Mapping[str, str] = MappingProxyType(
    {
        "mark": "scontrol update JobId={job} AdminComment={text}",
        "mark by comment": "scontrol update JobId={job} Comment={text}",
        "hold": "scontrol hold {job}",
        "release": "scontrol release {job}",
        "requeue": "scontrol requeuehold {job}",
        "rank": "scontrol update JobId={jobs} SiteFactor={points}",
        "resize": "scontrol update JobId={job} NumTasks={tasks} NumCPUs={cpus} NumNodes={nodes} TresPerNode={gpus}",
        "resize by job": "scontrol update JobId={job} TresPerJob={gpus} NumTasks={tasks} NumCPUs={cpus}",
        "submit again": "sbatch {flags} {file}",
        "cancel": "scancel {job}",
        "probe": "sbatch --parsable --hold --begin=now+7days --requeue --job-name=joulery-doctor --output=/dev/null "
        "--gres=gpu:1 {flags} --wrap=true",
    }
)
"""Commands that change jobs."""


@dataclass(frozen=True, slots=True)
class Done:
    """Result of a command."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The output, in one line."""
        return " ".join((self.err or self.out).split())[:300] or f"exit code {self.code}"

    @property
    def denied(self) -> bool:
        """Whether this user lacks the right."""
        return self.code != 0 and any(text in self.err for text in _DENIED)

    @property
    def away(self) -> bool:
        """Whether the controller did not answer."""
        return self.code != 0 and any(text in self.err for text in _AWAY)


class JobOverError(ActuationError):
    """Error for a change of a job that ended since the last snapshot."""


Runner = Callable[[Sequence[str]], Done]


def command(name: str, flags: Sequence[str] = (), **values: object) -> tuple[str, ...]:
    """The arguments of a command of :data:`READS` or :data:`CHANGES`; ``{flags}`` expands to all flags."""
    template = READS.get(name) or CHANGES[name]
    arguments: list[str] = []
    for word in template.split():
        arguments += flags if word == "{flags}" else (word.format(**values),)
    return tuple(arguments)


def command_runner(timeout_s: float, conf: Path | None = None) -> Runner:
    """A function that runs commands as processes.

    Args:
        timeout_s: Time limit of a command, seconds.
        conf: The cluster's slurm.conf; None for the one of the environment.

    Raises:
        ConfigError: ``conf`` is not a file; Slurm's commands would search for a controller until ``timeout_s``.
        CapabilityError: A command took longer than ``timeout_s``, or could not be started.
    """
    if conf is not None and not conf.is_file():
        raise ConfigError(
            "is not a file", pointer="jobs.slurm.conf", got=str(conf), expected="the cluster's slurm.conf"
        )
    environment = None if conf is None else {**os.environ, "SLURM_CONF": str(conf)}

    def run(arguments: Sequence[str]) -> Done:
        try:
            done = subprocess.run(
                arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False,
                encoding="utf-8", errors="replace", env=environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise CapabilityError(
                f"{' '.join(arguments[:3])} took longer than {timeout_s:g} s", resource=arguments[0]
            ) from error
        except OSError as error:
            raise CapabilityError(
                f"{arguments[0]} cannot be started: {error.strerror}", resource=arguments[0]
            ) from error
        return Done(done.returncode, done.stdout, done.stderr)

    return run


def raise_unless_done(done: Done, arguments: Sequence[str]) -> None:
    """Turn a command that did not succeed into an error.

    Raises:
        JobOverError: The job ended meanwhile.
        ActuationError: Slurm refuses the change.
        CapabilityError: The controller does not answer, or this user lacks the right.
    """
    raise_if_unreachable(done)
    if done.denied:
        raise CapabilityError(
            f"Slurm does not let this user change jobs of others: {done.message}", resource="scontrol", grant=GRANT
        )
    if done.code != 0:
        kind = JobOverError if any(text in done.err for text in _OVER) else ActuationError
        raise kind(f"{' '.join(arguments)}: {done.message}")


def raise_if_unreachable(done: Done) -> None:
    """Raise an error if the controller did not answer.

    Raises:
        CapabilityError: The controller did not answer.
    """
    if done.away:
        raise CapabilityError(
            f"the Slurm controller does not answer: {done.message}", resource="slurmctld", hint="try: scontrol ping"
        )


GRANT = "sacctmgr modify user where name=$USER set adminlevel=Operator"
"""Grants the right to change jobs of others."""
_AWAY = ("Unable to contact slurm controller", "Connection refused", "Socket timed out", "Zero Bytes were transmitted")
_OVER = ("Job has already finished", "Job/step already completing or completed")
_DENIED = ("Access/permission denied", "Invalid user id")
