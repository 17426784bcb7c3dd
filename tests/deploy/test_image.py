"""The image of the exporter, built and run for real where buildah and its base image are here."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/Dockerfile"
BASE = "python:3.12-slim-bookworm"
PORT = 9107
SERVE = 'joulery export --listen 0.0.0.0 & for i in $(seq 120); do "$@" 2>/dev/null && exit 0; sleep 0.5; done; exit 1'
"""The image's own command, and its health check until it passes."""

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def buildah(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Without a daemon and without privileges of its own: files as they are, programs in a chroot."""
    environment = {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}
    line = ["buildah", *map(str, arguments)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=900, check=False)


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    if shutil.which("buildah") is None:
        pytest.skip("no container engine here: buildah is not installed")
    if buildah("inspect", "--type", "image", BASE).returncode:
        pytest.skip(f"no container engine here that has the base image: buildah pull {BASE}")
    name = f"joulery-test-{os.getpid()}"
    built = buildah(
        "bud", "--pull-never", "--format", "docker", "--network", "host", "-f", DOCKERFILE, "-t", name, ROOT
    )
    assert built.returncode == 0, built.stderr
    yield name
    buildah("rmi", name)


@pytest.fixture(scope="module")
def container(image: str) -> Iterator[str]:
    name = buildah("from", "--pull-never", image).stdout.strip()
    yield name
    buildah("rm", name)


def inside(container: str, *command: str) -> str:
    """What a command of the image prints."""
    done = buildah("run", "--network", "host", container, "--", *command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_image_is_no_roots_and_reads_this_machine(container: str) -> None:
    assert inside(container, "id", "-u").strip() == "10107"
    checks = json.loads(inside(container, "joulery", "doctor", "--json"))
    assert checks
    families = {
        family.name for family in text_string_to_metric_families(inside(container, "joulery", "export", "--once"))
    }
    assert {"joulery_node_energy_joules", "joulery_power_watts"} <= families


def test_its_own_command_passes_its_own_health_check(image: str, container: str) -> None:
    with socket.socket() as free:
        if free.connect_ex(("127.0.0.1", PORT)) == 0:
            pytest.skip(f"no container engine here that is alone: port {PORT} is in use")
    config = json.loads(buildah("inspect", "--type", "image", image).stdout)["Docker"]["config"]
    assert [*config["Entrypoint"], *config["Cmd"]] == ["joulery", "export", "--listen", "0.0.0.0"]
    kind, *check = config["Healthcheck"]["Test"]
    assert kind == "CMD"
    inside(container, "sh", "-c", SERVE, "sh", *check)
