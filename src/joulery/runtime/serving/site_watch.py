"""The site file while its site runs: what may change without a restart is taken over, once the file is whole again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from joulery.config import load
from joulery.config.services import CloverPolicy, ServiceConfig
from joulery.config.site import Site
from joulery.domain.errors import ConfigError

_MAY_CHANGE = "the SLO, lambda or accuracy_loss, and minimum_accuracy of a service"


@dataclass(slots=True)
class SiteWatch:
    """Notices when a site file was changed.

    Attributes:
        path: The file.
        read: What it said last.
    """

    path: Path
    read: Site = field(init=False)
    _stamp: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self._stamp, self.read = self._now(), load(self.path)

    def changed(self) -> tuple[Site | None, str]:
        """The site as it is now, None where the file is as it was; and what a person should know, empty for nothing.

        A file that cannot be read or is wrong changes nothing.
        """
        stamp = self._now()
        if stamp == self._stamp:
            return None, ""
        self._stamp = stamp
        try:
            site = load(self.path)
        except ConfigError as error:
            return None, f"the changed site file is not taken over: {error}"
        before, self.read = self.read, site
        ignored = _fixed(site) != _fixed(before)
        return (
            site,
            f"of a changed site file only {_MAY_CHANGE} are taken over; restart for the rest" if ignored else "",
        )

    def _now(self) -> tuple[int, int]:
        try:
            found = self.path.stat()
        except OSError:
            return (0, 0)
        return found.st_mtime_ns, found.st_size


def _fixed(site: Site) -> Site:
    """A site without what may change while it runs."""
    return site.model_copy(update={"services": tuple(_fixed_service(one) for one in site.services)})


def _fixed_service(config: ServiceConfig) -> ServiceConfig:
    changed: dict[str, Any] = {"slo": None, "minimum_accuracy_ratio": 0.0}
    if isinstance(config.policy, CloverPolicy):
        changed["policy"] = config.policy.model_copy(update={"lambda_ratio": 0.0, "accuracy_loss_ratio": None})
    return config.model_copy(update=changed)
