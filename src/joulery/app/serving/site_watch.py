"""Watch the site file of a running site: changes are applied without a restart where possible."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from joulery.app.profiling.joining import JoiningTimes
from joulery.app.serving.changed_family import base_variant, changes_family, clover_revision, live_revision
from joulery.app.serving.joined_answers import JoinedAnswers
from joulery.app.serving.service import objectives_from_config
from joulery.app.serving.split import revised
from joulery.app.wiring.model_refs import model_ref
from joulery.app.wiring.models import cache_folder
from joulery.config import load
from joulery.config.services import CloverPolicy, FixedPolicy, ServiceConfig, SplitPolicy
from joulery.config.site import Mode, Site
from joulery.domain.errors import ConfigError, JouleryError
from joulery.domain.serving.engine import ModelRef, ReplicaView
from joulery.runtime.serving.controller import Revision
from joulery.runtime.serving.running_service import RunningService
from joulery.steady_time import unix_s

_MAY_CHANGE = (
    "the SLO, lambda or accuracy_loss, and minimum_accuracy of a service are taken over, and in mode act its variants "
    "and the shares of a policy fixed or split"
)

TimeJoining = Callable[[RunningService, ServiceConfig, str, ModelRef], Awaitable[JoiningTimes | None]]
"""Loads and times a variant before it joins a service; None where it cannot be timed."""
Joining = dict[str, "JoiningTimes | None"]


@dataclass(slots=True)
class SiteWatch:
    """Detects changes of a site file and converts them to revisions of running services.

    Attributes:
        path: The file.
        cache: Where built models are kept.
        replicas: Returns the present replicas.
        time_joining: Times a variant of a Clover policy before it joins; None to plan it like the variant next to it in
            accuracy.
        steers: Whether the engine steers requests among the variants that a replica keeps loaded.
        read: Content of the file as last read.
    """

    path: Path
    cache: Path = field(default_factory=cache_folder)
    replicas: Callable[[], Sequence[ReplicaView]] = lambda: ()
    time_joining: TimeJoining | None = None
    steers: bool = True
    read: Site = field(init=False)
    _stamp: tuple[int, int] = field(init=False)
    _joining: dict[str, tuple[ServiceConfig, asyncio.Task[Joining]]] = field(default_factory=dict)
    _answers: JoinedAnswers = field(default_factory=JoinedAnswers)

    def __post_init__(self) -> None:
        self._stamp, self.read = self._now(), load(self.path)

    def changed(self) -> tuple[Site | None, str]:
        """Read the file if it has changed: return the site, None if unchanged, and a warning, empty for none.

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
        """Changes of running services, and warnings about changes that cannot be applied."""
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
        joined, refused = self._joined(services)
        changed = {revision.setup.name for revision in (*found, *joined)}
        views = self.replicas()
        others = [one for name, one in services.items() if name not in changed]
        live = [live_revision(one, views, unix_s(), self._answers) for one in others]
        return [*found, *joined, *(one for one in live if one is not None)], [*warnings, *refused]

    def _joined(self, services: Mapping[str, RunningService]) -> tuple[list[Revision], list[str]]:
        """Revisions of services whose joining variants were timed, and warnings about variants that cannot join."""
        found, warnings = [], []
        for name, (config, task) in list(self._joining.items()):
            if not task.done():
                continue
            del self._joining[name]
            try:
                found.append(self._taken_over(services[name], config, task.result()))
            except JouleryError as error:
                warnings.append(f"the changed site file is not taken over: {error}")
        return found, warnings

    def _revision(self, one: RunningService, before: ServiceConfig, config: ServiceConfig) -> Revision | None:
        """Changes of one service; None for nothing.

        Raises:
            JouleryError: The change cannot be applied.
        """
        chosen = one.chosen
        assert chosen is not None  # asked before
        if self.read.mode is Mode.ACT and _states_shares(before) and _states_shares(config):
            differs = (before.policy, before.family_config) != (config.policy, config.family_config)
            if differs:
                return revised(one, config, self.cache, unix_s())
        if type(before.policy) is not type(config.policy):
            return None
        if self.read.mode is Mode.ACT and isinstance(config.policy, CloverPolicy) and config.family_config is not None:
            if (former := self._joining.pop(one.name, None)) is not None:
                former[1].cancel()
            if changes_family(one, config, self.cache):
                return self._with_variants(one, config)
        asked = objectives_from_config(config, base_variant(one).accuracy_ratio)
        if asked == chosen.policy.objectives:
            return None
        policy = replace(chosen.policy, objectives=asked)
        return Revision(replace(one.setup, slo=asked.slo), replace(chosen, policy=policy))

    def _with_variants(self, one: RunningService, config: ServiceConfig) -> Revision | None:
        """Revise the service to its changed variants; None while joining variants are timed.

        Raises:
            JouleryError: The variants cannot be applied.
        """
        joining = self._untimed(one, config)
        timing = self.time_joining
        if not joining or timing is None:
            return self._taken_over(one, config, {})

        async def timed() -> Joining:
            return {name: await timing(one, config, name, model) for name, model in joining.items()}

        self._joining[one.name] = config, asyncio.create_task(timed(), name=f"variants join {one.name}")
        return None

    def _taken_over(self, one: RunningService, config: ServiceConfig, joining: Joining) -> Revision:
        """Revise the service to its changed variants, with these times for those that join.

        Raises:
            JouleryError: The variants cannot be applied.
        """
        return clover_revision(one, self.read, config, self.cache, joining, steers=self.steers)

    def _untimed(self, one: RunningService, config: ServiceConfig) -> dict[str, ModelRef]:
        """Variants that are missing from the service's profile, with their models."""
        assert one.chosen is not None  # a service without a policy follows a plan
        known = {entry.variant for entry in one.chosen.predictor.profile.entries}
        variants = {variant.name: variant.model for variant in config.family.variants}
        return {name: model_ref(model, self.cache) for name, model in variants.items() if name not in known}

    def _now(self) -> tuple[int, int]:
        try:
            found = self.path.stat()
        except OSError:
            return (0, 0)
        return found.st_mtime_ns, found.st_size


def _states_shares(config: ServiceConfig) -> bool:
    """Whether the policy states the shares of requests of its variants (fixed or split), and the service has models."""
    return isinstance(config.policy, FixedPolicy | SplitPolicy) and config.family_config is not None


def _fixed(site: Site) -> Site:
    """The site without the settings that may change while it runs."""
    services = tuple(_fixed_service(one, acts=site.mode is Mode.ACT) for one in site.services)
    return site.model_copy(update={"services": services})


def _fixed_service(config: ServiceConfig, *, acts: bool) -> ServiceConfig:
    changed: dict[str, Any] = {"slo": None, "minimum_accuracy_ratio": 0.0}
    if isinstance(config.policy, CloverPolicy):
        changed["policy"] = config.policy.model_copy(update={"lambda_ratio": 0.0, "accuracy_loss_ratio": None})
        changed |= {"family_config": None} if acts else {}
    elif acts and _states_shares(config):
        changed |= {"policy": FixedPolicy(kind="fixed"), "family_config": None}
    return config.model_copy(update=changed)
