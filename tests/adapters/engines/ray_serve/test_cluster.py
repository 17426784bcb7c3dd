"""A cluster that does not start is one clear error, whatever Ray raises; a busy machine gets time to start one."""

import os
import sys
from types import SimpleNamespace

import pytest

from joulery.adapters.engines.ray_serve.cluster import RayCluster, RayPlace
from joulery.domain.errors import CapabilityError

LOG = "The last 20 lines of /tmp/ray/logs/dashboard.log (it contains the error message from the dashboard): "


def a_ray_that(monkeypatch: pytest.MonkeyPatch, error: Exception, **environ: str) -> list[str]:
    """Install a package ``ray`` that cannot start; the timeout of the dashboard that it sees."""
    seen: list[str] = []
    monkeypatch.setattr(os, "environ", dict(environ))

    def init(**_: object) -> None:

        seen.append(os.environ["RAY_DASHBOARD_STARTUP_TIMEOUT_S"])
        raise error

    fake = SimpleNamespace(init=init, serve=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray", fake)
    return seen


@pytest.mark.parametrize(
    ("place", "error", "facts"),
    [
        (RayPlace(), Exception(f"\n{LOG}\n2026 INFO head.py\n2026 INFO head.py"), ("this machine", "dashboard.log")),
        (RayPlace(), TimeoutError(), ("this machine", "TimeoutError")),
        (RayPlace("10.0.0.9:6379", "http://10.0.0.9:8265"), ConnectionError("refused"), ("10.0.0.9:6379", "refused")),
    ],
)
async def test_a_cluster_that_does_not_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, place: RayPlace, error: Exception, facts: tuple[str, ...]
) -> None:
    seen = a_ray_that(monkeypatch, error)
    with pytest.raises(CapabilityError) as caught:
        await RayCluster(place).open()
    message = str(caught.value)
    assert all(fact in message for fact in facts) and len(message.splitlines()) == 1 and "INFO" not in message
    assert int(seen[0]) > 60, "Ray's own minute is too short on a busy machine"


async def test_what_the_environment_says_of_ray_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = a_ray_that(monkeypatch, RuntimeError("no"), RAY_DASHBOARD_STARTUP_TIMEOUT_S="7")
    with pytest.raises(CapabilityError, match="no"):
        await RayCluster(RayPlace()).open()
    assert seen == ["7"]
