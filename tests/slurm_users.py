"""Slurm's commands as another user of this machine."""

from __future__ import annotations

import os
import shutil

from tests.slurm_cluster import SlurmCluster

_COMMANDS = ("scontrol", "squeue", "sinfo", "sprio", "sbatch", "scancel")


def commands_of(cluster: SlurmCluster, user: str) -> dict[str, str]:
    """An environment in which Slurm's commands run as that user."""
    folder = cluster.folder / f"bin-{user}"
    folder.mkdir(exist_ok=True)
    for name in _COMMANDS:
        real = shutil.which(name)
        (folder / name).write_text(
            f'#!/bin/sh\nexec setpriv --reuid={user} --regid={user} --clear-groups {real} "$@"\n'
        )
        (folder / name).chmod(0o755)
    return {**cluster.env, "PATH": f"{folder}:{os.environ['PATH']}", "LOGNAME": user}
