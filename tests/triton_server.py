"""A real Triton server on the CPU, with models of a few lines of Python.

``make .venv-triton/.done`` installs it. ``JOULERY_TRITON`` names another, in an environment with numpy 1:
``…/site-packages/pytriton/tritonserver``.
"""

import os
import signal
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from joulery.adapters.engines.remote.triton import TritonModel, TritonProcess, config_text
from tests.ports import free_ports
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[1]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def home() -> Path:
    """The server's folder."""
    inside = Path("lib") / f"python{VERSION}" / "site-packages" / "pytriton" / "tritonserver"
    named = os.environ.get("JOULERY_TRITON")
    found = Path(named) if named else ROOT / ".venv-triton" / inside
    if not found.is_dir():
        pytest.skip("no Triton here: make .venv-triton/.done, or name its folder in JOULERY_TRITON")
    return found


def stub(triton: Path) -> Path:
    """What runs models written in Python."""
    return triton / "python_backend_stubs" / VERSION / "triton_python_backend_stub"


@contextmanager
def triton_server(folder: Path, models: Mapping[TritonModel, str]) -> Iterator[str]:
    """A server that holds models and has loaded none; its address.

    Args:
        folder: An empty folder.
        models: The ``model.py`` of each.
    """
    triton = home()
    if not (triton / "bin" / "tritonserver").exists() or not stub(triton).exists():
        pytest.skip(f"no Triton for Python {VERSION} in {triton}")
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    for file in (*(triton / "backends" / "python").iterdir(), stub(triton)):
        (backend / file.name).symlink_to(file)
    for model, text in models.items():
        place = folder / "models" / model.name
        (place / "1").mkdir(parents=True)
        (place / "config.pbtxt").write_text(config_text(model))
        (place / "1" / "model.py").write_text(text)
    process = TritonProcess(str(folder / "models"), (), None, 1.0, free_ports(3)[0])
    line = [*process.arguments(str(triton / "bin" / "tritonserver")), f"--backend-directory={folder / 'backends'}"]
    library = sysconfig.get_config_var("LIBDIR")
    environment = {
        **os.environ,
        "PATH": f"{triton.parents[3] / '..' / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(triton.parents[1]),
        "LD_LIBRARY_PATH": f"{library}:{os.environ.get('LD_LIBRARY_PATH', '')}",
    }
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen(line, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_ready(f"http://127.0.0.1:{process.port}", running, folder / "log")
        yield f"http://127.0.0.1:{process.port}"
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def wait_ready(url: str, running: subprocess.Popen[bytes], log: Path) -> None:
    def ready() -> bool:
        assert running.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=PATIENCE_S):
                return True
        except (urllib.error.URLError, OSError):
            return False

    wait_until(ready, "a Triton that is ready")
