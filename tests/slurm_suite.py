"""Slurm of another Debian suite, unpacked beside what is installed: ``python -m tests.slurm_suite trixie FOLDER``.

Tests that start Slurm use it when ``JOULERY_SLURM`` names the folder. Nothing is installed and no chroot is entered:
the packages are unpacked, and Slurm's programs are set to the loader and the libraries of their own suite (patchelf).
Wants apt-get, dpkg-deb and patchelf; about 30 MB are downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

VARIABLE = "JOULERY_SLURM"
PLUGINS = "usr/lib/x86_64-linux-gnu/slurm-wlm"
_PACKAGES = ("slurm-wlm", "slurmdbd", "slurmrestd")
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_LOADER = f"{_LIBRARIES}/ld-linux-x86-64.so.2"
_FOLDERS = ("usr/bin", "usr/sbin")
_LEFT_OUT = ("libpam-", "libsystemd-shared", "libdebconf", "libsemanage", "libtext-", "libx11-data")
_CONF = """\
Dir::Etc::sourcelist "{apt}/sources.list";
Dir::Etc::sourceparts "{apt}/parts";
Dir::State "{apt}/state";
Dir::State::lists "{apt}/lists";
Dir::State::status "{apt}/status";
Dir::Cache "{apt}/cache";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
"""


def unpacked() -> Path | None:
    """The folder that ``JOULERY_SLURM`` names; None when the machine's own Slurm is tested.

    Raises:
        FileNotFoundError: There is no Slurm.
    """
    if not (named := os.environ.get(VARIABLE, "")):
        return None
    folder = Path(named).resolve()
    if not (folder / "usr/sbin/slurmctld").exists():
        raise FileNotFoundError(f"{VARIABLE}={named}: no Slurm there: python -m tests.slurm_suite trixie {named}")
    return folder


def use() -> Path | None:
    """Put the programs of :func:`unpacked` before all others; the folder, if there is one."""
    folder = unpacked()
    if folder is not None:
        before = [str(folder / name) for name in _FOLDERS]
        path = [entry for entry in os.environ.get("PATH", "").split(os.pathsep) if entry not in before]
        os.environ["PATH"] = os.pathsep.join((*before, *path))
    return folder


def conf_lines(folder: Path | None) -> str:
    """Lines of slurm.conf and slurmdbd.conf that lead to the plug-ins of an unpacked Slurm."""
    return "" if folder is None else f"PluginDir={folder / PLUGINS}\n"


def unpack(suite: str, folder: Path) -> None:
    """Download and unpack.

    Args:
        suite: Debian's name for it.
        folder: Made if need be; unpacked into anew.
    """
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    apt = folder / "apt"
    for part in ("parts", "state", "lists/partial", "cache/archives/partial"):
        (apt / part).mkdir(parents=True)
    (apt / "status").touch()
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (apt / "sources.list").write_text(f"deb [signed-by={keyring}] http://deb.debian.org/debian {suite} main\n")
    (apt / "apt.conf").write_text(_CONF.format(apt=apt))
    env = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
    for command in (("update",), ("--yes", "--download-only", "install", *_PACKAGES)):
        subprocess.run(("apt-get", "-qq", *command), env=env, stdout=subprocess.DEVNULL, check=True)
    for package in sorted((apt / "cache/archives").glob("*.deb")):
        name = package.name
        if name.startswith(("lib", "slurm", "zlib", "gcc", "ocl")) and not name.startswith(_LEFT_OUT):
            subprocess.run(("dpkg-deb", "--extract", str(package), str(folder)), check=True)
    shutil.rmtree(apt)
    _relocate(folder)


def _relocate(folder: Path) -> None:
    """Programs of Slurm find their own suite's loader and libraries; the rest of the programs goes."""
    search = f"{folder / PLUGINS}:{folder / _LIBRARIES}"
    for file in [file for name in _FOLDERS for file in (folder / name).iterdir()]:
        if not file.name.startswith("s") or file.is_symlink():
            file.unlink()
            continue
        patch = ("patchelf", "--set-interpreter", str(folder / _LOADER), "--force-rpath", "--set-rpath", search)
        subprocess.run((*patch, str(file)), check=True)
        if file.name.endswith("-wlm"):  # Debian's alternatives give it its name
            file.with_name(file.name.removesuffix("-wlm")).symlink_to(file.name)


if __name__ == "__main__":
    unpack(sys.argv[1], Path(sys.argv[2]))
