"""The page of Slurm's commands against the commands that the adapter can issue."""

import re
from pathlib import Path

from joulery.adapters.clusters.slurm_commands import CHANGES, READS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/slurm-commands.md").read_text().replace("\\|", "|")
PROGRAMS = ("squeue", "sinfo", "scontrol", "sbatch", "scancel", "sacctmgr", "srun", "sprio")


def test_the_page_lists_exactly_the_commands_there_are() -> None:
    reads, changes = (
        {code for code in re.findall(r"`([^`]+)`", part) if code.startswith(PROGRAMS) and " " in code}
        for part in PAGE.split("## Commands that change jobs")
    )
    undone = {"scontrol release"}
    assert reads == set(READS.values())
    assert changes - undone == set(CHANGES.values())


def test_no_other_module_spells_a_command_of_slurm() -> None:
    found = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        if file.name in ("slurm_commands.py", "sacct.py"):
            continue
        for program in PROGRAMS:
            found += [f"{file.name}: {program}" for _ in re.finditer(rf'\(\s*"{program}",\s*["*]', file.read_text())]
    # open_slurm looks for the programs on PATH, in a tuple of names; job_place knows the launchers of users' programs.
    assert set(found) <= {"slurm.py: squeue", "job_place.py: srun"}
