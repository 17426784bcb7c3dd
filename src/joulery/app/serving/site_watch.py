"""The site file while its site runs: what changes in it is taken over without a restart, where that can be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from joulery.app.serving.service import objectives_from_config
from joulery.app.serving.split import revised
from joulery.app.wiring.models import cache_folder
from joulery.config import load
from joulery.config.services import CloverPolicy, FixedPolicy, ServiceConfig, SplitPolicy
from joulery.config.site import Mode, Site
from joulery.domain.errors import ConfigError, JouleryError
from joulery.runtime.serving.controller import Revision
from joulery.runtime.serving.running_service import RunningService
from joulery.steady_time import unix_s

_MAY_CHANGE = (
    "the SLO, lambda or accuracy_loss, and minimum_accuracy of a service are taken over, and in mode act the variants "
    "and shares of a policy fixed or split"
)


@dataclass(slots=True)
class SiteWatch:
    """Notices when a site file was changed.

    Attributes:
        path: The file.
        cache: Where built models are kept.
        read: Its content as last read.
    """

    path: Path
    cache: Path = field(default_factory=cache_folder)
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
        return site, f"of a changed site file only {_MAY_CHANGE}; restart for the rest" if ignored else ""

    def revisions(self, services: Mapping[str, RunningService]) -> tuple[list[Revision], list[str]]:
        """What changes of running services, and warnings about what cannot be met."""
        before = {config.name: config for config in self.read.services}
        site, remark = self.changed()
        found, warnings = [], [remark] if remark else []
        for config in () if site is None else site.services:
            one = services.get(config.name)
            if one is None or one.chosen is None:
                continue
            try:
                revision = self._revision(one, before.get(config.name, config), config)
            except JouleryError as error:
                warnings.append(f"the changed site file is not taken over: {error}")
            else:
                found += [] if revision is None else [revision]
        return found, warnings

    def _revision(self, one: RunningService, before: ServiceConfig, config: ServiceConfig) -> Revision | None:
        """What changes of one service; None for nothing.

        Raises:
            JouleryError: It cannot be met.
        """
        chosen = one.chosen
        assert chosen is not None  # asked before
        if self.read.mode is Mode.ACT and _states_shares(before) and _states_shares(config):
            differs = (before.policy, before.family_config) != (config.policy, config.family_config)
            if differs:
                return revised(one, config, self.cache, unix_s())
        if type(before.policy) is not type(config.policy):
            return None
        asked = objectives_from_config(config, one.setup.family.largest.accuracy_ratio)
        if asked == chosen.policy.objectives:
            return None
        policy = replace(chosen.policy, objectives=asked)
        return Revision(replace(one.setup, slo=asked.slo), replace(chosen, policy=policy))

    def _now(self) -> tuple[int, int]:
        try:
            found = self.path.stat()
        except OSError:
            return (0, 0)
        return found.st_mtime_ns, found.st_size


def _states_shares(config: ServiceConfig) -> bool:
    """Whether its policy states who answers how much, on variants of its own."""
    return isinstance(config.policy, FixedPolicy | SplitPolicy) and config.family_config is not None


def _fixed(site: Site) -> Site:
    """A site without what may change while it runs."""
    services = tuple(_fixed_service(one, acts=site.mode is Mode.ACT) for one in site.services)
    return site.model_copy(update={"services": services})


def _fixed_service(config: ServiceConfig, *, acts: bool) -> ServiceConfig:
    changed: dict[str, Any] = {"slo": None, "minimum_accuracy_ratio": 0.0}
    if isinstance(config.policy, CloverPolicy):
        changed["policy"] = config.policy.model_copy(update={"lambda_ratio": 0.0, "accuracy_loss_ratio": None})
    elif acts and _states_shares(config):
        changed |= {"policy": FixedPolicy(kind="fixed"), "family_config": None}
    return config.model_copy(update=changed)
