"""The site file while its site runs: objectives that change in it are taken over without a restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from joulery.app.serving.service import objectives_from_config
from joulery.config import load
from joulery.config.services import CloverPolicy, ServiceConfig
from joulery.config.site import Site
from joulery.domain.errors import ConfigError, JouleryError
from joulery.runtime.serving.controller import Revision
from joulery.runtime.serving.running_service import RunningService

_MAY_CHANGE = "the SLO, lambda or accuracy_loss, and minimum_accuracy of a service"


@dataclass(slots=True)
class SiteWatch:
    """Notices when a site file was changed.

    Attributes:
        path: The file.
        read: Its content as last read.
    """

    path: Path
    read: Site = field(init=False)
    _stamp: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self._stamp, self.read = self._now(), load(self.path)

    def changed(self) -> tuple[Site | None, str]:
        """The site of a changed file, None for an unchanged one; and a warning, empty for none.

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

    def revisions(self, services: Mapping[str, RunningService]) -> tuple[list[Revision], list[str]]:
        """New objectives of running services, and warnings about those that cannot be met."""
        site, remark = self.changed()
        found, warnings = [], [remark] if remark else []
        for config in () if site is None else site.services:
            one = services.get(config.name)
            if one is None or one.chosen is None:
                continue
            asked = objectives_from_config(config, one.setup.family.largest.accuracy_ratio)
            if asked == one.chosen.policy.objectives:
                continue
            try:
                found.append(Revision(one.name, replace(one.chosen.policy, objectives=asked), asked.slo))
            except JouleryError as error:
                warnings.append(f"the changed site file is not taken over: {error}")
        return found, warnings

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
