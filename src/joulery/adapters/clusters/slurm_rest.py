"""Reader of Slurm through slurmrestd: HTTP requests for all jobs and all nodes, without starting processes.

Changes still use ``scontrol``: up to 22.05's v0.0.38 the service supports neither SiteFactor nor AdminComment, and no
version requeues a job on hold. The same plug-in produces ``squeue --json`` and the service's answer, so the same parser
reads both.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joulery.adapters.clusters.slurm_commands import Done, Runner, command
from joulery.adapters.clusters.slurm_nodes import FIELDS
from joulery.domain.errors import CapabilityError, DataError

if TYPE_CHECKING:
    import httpx

_VERSION = re.compile(r"/slurm/v(\d+)\.(\d+)\.(\d+)/jobs/?")
_OLDEST, _NEWEST = (0, 0, 38), (0, 0, 45)
_TOKEN = re.compile(r"SLURM_JWT=(\S+)")
_UNANSWERED = "NOT_RESPONDING"
_FLAGS = (
    ("DRAIN", "drained"),
    ("MAINTENANCE", "maint"),
    ("REBOOT", "boot"),
    ("RESERVED", "reserved"),
    ("FAIL", "fail"),
)


@dataclass(frozen=True, slots=True)
class RestPlace:
    """Address and user of slurmrestd.

    Attributes:
        url: Its TCP address; empty where a socket is used.
        socket: Its UNIX socket.
        user: User of the token; this user when empty.
        token: Returns the token; empty where the socket identifies the user.
        timeout_s: Time limit of an answer, seconds.
    """

    url: str = ""
    socket: Path | None = None
    user: str = ""
    token: Callable[[], str] = lambda: os.environ.get("SLURM_JWT", "")
    timeout_s: float = 30.0


class SlurmRest:
    """Client of a slurmrestd.

    Args:
        place: Address and user of the service.
        run: Runs a command of Slurm, for a new token when the old one has expired.
    """

    def __init__(self, place: RestPlace, run: Runner) -> None:
        self._place, self._run = place, run
        self._token, self._version = place.token(), ""
        self._client: httpx.Client | None = None

    def run(self, arguments: Sequence[str]) -> Done:
        """Run a command of Slurm: the service answers ``squeue --json`` and ``sinfo``, other commands run as usual.

        Raises:
            CapabilityError: The service does not answer, or refuses access.
            DataError: Its answer is not understood.
        """
        if tuple(arguments) == command("jobs"):
            return Done(0, self._get("jobs"), "")
        if arguments[0] == "sinfo":
            partitions = arguments[arguments.index("-p") + 1].split(",") if "-p" in arguments else []
            return Done(0, _as_sinfo(self._get("nodes"), self._get("partitions"), partitions), "")
        return self._run(arguments)

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()

    def _get(self, what: str) -> str:
        if not self._version:
            self._version = newest_version(self._ask("/openapi/v3"))
        return self._ask(f"/slurm/{self._version}/{what}")

    def _ask(self, path: str, *, again: bool = True) -> str:
        import httpx

        try:
            answer = self._open().get(path, headers=self._headers())
        except httpx.HTTPError as error:
            where = self._place.url or str(self._place.socket)
            raise CapabilityError(
                f"slurmrestd at {where} does not answer: {type(error).__name__} {error}",
                resource="slurmrestd",
                hint="leave jobs.slurm.rest out to read Slurm through its commands",
            ) from error
        if answer.status_code in (401, 403) or "Authentication" in answer.text[:2000]:
            if again and self._renewed():
                return self._ask(path, again=False)
            raise CapabilityError(
                f"slurmrestd refuses access (HTTP {answer.status_code})",
                resource="slurmrestd",
                grant="export $(scontrol token lifespan=86400)",
            )
        if answer.status_code != 200:
            message = " ".join(answer.text.split())[:200]
            raise CapabilityError(
                f"slurmrestd answered {path} with HTTP {answer.status_code}: {message}", resource="slurmrestd"
            )
        return answer.text

    def _headers(self) -> Mapping[str, str]:
        if not self._token:
            return {}
        user = {"X-SLURM-USER-NAME": self._place.user} if self._place.user else {}
        return {**user, "X-SLURM-USER-TOKEN": self._token}

    def _renewed(self) -> bool:
        """Request a new token, because tokens expire; False where Slurm gave none."""
        found = _TOKEN.search(self._run(command("token")).out)
        if found is None or found[1] == self._token:
            return False
        self._token = found[1]
        return True

    def _open(self) -> httpx.Client:
        if self._client is None:
            import httpx

            place = self._place
            transport = None if place.socket is None else httpx.HTTPTransport(uds=str(place.socket))
            base = place.url or "http://localhost"
            self._client = httpx.Client(transport=transport, base_url=base, timeout=place.timeout_s, trust_env=False)
        return self._client


def newest_version(openapi: str) -> str:
    """The newest version of the interface that the service offers and joulery supports, such as ``v0.0.38``.

    Raises:
        DataError: The service offers no supported version, or its answer is not understood.
    """
    try:
        paths = list(json.loads(openapi)["paths"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"slurmrestd's /openapi/v3 is not understood: {error!r}") from error
    offered = sorted({tuple(map(int, match.groups())) for path in paths if (match := _VERSION.fullmatch(path))})
    known = [version for version in offered if _OLDEST <= version <= _NEWEST]
    if not known:
        versions = ", ".join("v" + ".".join(map(str, version)) for version in offered) or "no interface of Slurm"
        raise DataError(f"slurmrestd offers {versions}; v0.0.38 to v0.0.45 are known here")
    return "v" + ".".join(map(str, known[-1]))


def _as_sinfo(text: str, tiers_text: str, partitions: Sequence[str]) -> str:
    """Format the nodes like ``sinfo -N -O`` with :data:`~joulery.adapters.clusters.slurm_nodes.FIELDS`.

    Raises:
        DataError: A text is not such a document.
    """
    try:
        nodes = json.loads(text)["nodes"]
        tiers = {one["name"]: _tier(one) for one in json.loads(tiers_text)["partitions"]}
        lines = [
            _line(node, partition, tiers.get(partition, ""))
            for node in nodes
            for partition in node.get("partitions") or ("",)
            if not partitions or partition in partitions
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"slurmrestd's nodes are not understood: {error!r}") from error
    return "".join(lines)


def _tier(partition: Mapping[str, Any]) -> str:
    """The PriorityTier of a partition: a separate field in 22.05, within ``priority`` in newer versions."""
    within = partition.get("priority")
    tier = within.get("tier") if isinstance(within, Mapping) else partition.get("priority_tier")
    return "" if tier is None else str(tier)


def _line(node: Mapping[str, Any], partition: str, tier: str) -> str:
    features = node.get("active_features") or ""
    cells = {
        "nodelist": node["name"],
        "statelong": _state(node),
        "gres": node.get("gres") or "(null)",
        "gresused": node.get("gres_used") or "(null)",
        "partitionname": partition,
        "features_act": features if isinstance(features, str) else ",".join(features),
        "cpusstate": _cpus_state(node),
        "memory": node.get("real_memory", ""),
        "allocmem": node.get("alloc_memory", ""),
        "prioritytier": tier,
    }
    return "".join(str(cells[name]).ljust(width) for name, width in FIELDS) + "\n"


def _cpus_state(node: Mapping[str, Any]) -> str:
    """The CPU state in sinfo's format; empty where the service does not report it. 23.11 renamed idle_cpus."""
    idle, cpus = node.get("alloc_idle_cpus", node.get("idle_cpus")), node.get("cpus")
    return "" if idle is None or cpus is None else f"{cpus - idle}/{idle}/0/{cpus}"


def _state(node: Mapping[str, Any]) -> str:
    """The state in sinfo's words: older versions give a state and flags, newer ones a list of both."""
    state = node["state"]
    states = [state] if isinstance(state, str) else list(state)
    flags = [str(flag).upper() for flag in (*states[1:], *(node.get("state_flags") or ()))]
    base = next((word for flag, word in _FLAGS if any(flag in name for name in flags)), states[0].lower())
    if _UNANSWERED in flags or "NO_RESPOND" in flags:
        return base + "*"
    return base + ("~" if "POWERED_DOWN" in flags or "POWER_DOWN" in flags else "")
