"""Accounting for a test's Slurm: a MariaDB and a slurmdbd of its own, users, QOS and limits."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import slurm_suite
from tests.ports import free_ports
from tests.waiting import wait_until

_PROGRAMS = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db", "mariadb-admin")

_CONF = """\
AuthType=auth/none
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={db_port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
"""


def accounting_missing() -> str | None:
    """Why no slurmdbd can be started here; None when one can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"Slurm is not installed with accounting ({', '.join(absent)}): apt-get install slurmdbd mariadb-server" if (
        absent
    ) else None  # fmt: skip


@contextmanager
def slurm_database(folder: Path) -> Iterator[str]:
    """Lines of slurm.conf that make a Slurm account to a slurmdbd that runs until the end; limits are enforced.

    Args:
        folder: A scratch folder, also that of the cluster's slurm.conf.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, log = folder / "mariadb", (folder / "database.out").open("ab")
    db_port, port = free_ports(2)
    started: list[subprocess.Popen[bytes]] = []

    def spawn(*command: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        started.append(process)
        return process

    try:
        # Its own folder for temporary tables: a MariaDB that starts beside it removes those of /tmp.
        (tables := folder / "tables").mkdir()
        install = ("mariadb-install-db", "--no-defaults", f"--datadir={data}", f"--tmpdir={tables}", "--skip-test-db",
                   "--user=root")  # fmt: skip
        made = subprocess.run((*install, "--auth-root-authentication-method=normal"), capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"no database could be made: {made.stdout[-2000:]}{made.stderr[-2000:]}")
        setup = folder / "setup.sql"
        setup.write_text(
            "CREATE DATABASE slurm;\nCREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm';\n"
            "GRANT ALL ON slurm.* TO 'slurm'@'127.0.0.1';\n"
        )
        spawn(
            "mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--tmpdir={tables}",
            f"--socket={folder}/db.sock", f"--pid-file={folder}/db.pid", f"--port={db_port}",
            "--bind-address=127.0.0.1", "--innodb-buffer-pool-size=32M", f"--init-file={setup}", "--skip-name-resolve",
        )  # fmt: skip
        wait_until(lambda: _answers(db_port), "an answer of MariaDB")
        host = socket.gethostname().split(".")[0]
        conf = folder / "slurmdbd.conf"
        conf.touch(mode=0o600)
        text = _CONF.format(host=host, port=port, folder=folder, db_port=db_port)
        conf.write_text(text + slurm_suite.conf_lines(slurm_suite.use()))
        spawn("slurmdbd", "-D")
        wait_until(lambda: _answers(port), "an answer of slurmdbd")
        yield (
            f"AccountingStorageHost=127.0.0.1\nAccountingStoragePort={port}\n"
            "AccountingStorageTRES=gres/gpu\nAccountingStorageEnforce=limits,qos\n"
        )
    finally:
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(15)
        log.close()


def _answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
