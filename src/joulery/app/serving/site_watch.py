"""The site file while its site runs: what changes in it is taken over without a restart, where that can be done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from joulery.app.profiling.joining import JoiningTimes, with_joined
from joulery.app.serving.service import free_memory_bytes, kept_loaded, objectives_from_config
from joulery.app.serving.split import revised, with_former
from joulery.app.wiring.model_refs import model_ref
from joulery.app.wiring.models import cache_folder
from joulery.config import load
from joulery.config.services import CloverPolicy, FixedPolicy, ServiceConfig, SplitPolicy
from joulery.config.site import Mode, Site
from joulery.domain.errors import ConfigError, JouleryError
from joulery.domain.serving.engine import ModelRef, Outcome, ReplicaView, RequestRecord
from joulery.domain.serving.profile import Timings
from joulery.domain.serving.service import ModelFamily, ModelVariant, Slice
from joulery.perf.blend import with_live_times
from joulery.perf.layouts import Predictor
from joulery.policies.family_change import family_of
from joulery.policies.serving.layout_space import layouts, misfits, slice_menu
from joulery.policies.serving.predictive_search import PredictiveSearch
from joulery.policies.serving.trial_search import TrialSearch
from joulery.runtime.serving.controller import Revision
from joulery.runtime.serving.running_service import RunningService, ServiceSetup
from joulery.steady_time import unix_s

_MAY_CHANGE = (
    "the SLO, lambda or accuracy_loss, and minimum_accuracy of a service are taken over, and in mode act its variants "
    "and the shares of a policy fixed or split"
)
_ENOUGH = 30
"""Live answers of a variant on a slice that its times can be taken from."""

TimeJoining = Callable[[RunningService, ServiceConfig, str, ModelRef], Awaitable[JoiningTimes | None]]
"""Loads a variant that is to join a service, and times it; None where it cannot be timed."""
Joining = dict[str, "JoiningTimes | None"]


@dataclass(slots=True)
class SiteWatch:
    """Notices when a site file was changed.

    Attributes:
        path: The file.
        cache: Where built models are kept.
        replicas: The replicas now.
        time_joining: Times a variant of a Clover policy before it joins; None to plan it as the one next to it.
        read: Its content as last read.
    """

    path: Path
    cache: Path = field(default_factory=cache_folder)
    replicas: Callable[[], Sequence[ReplicaView]] = lambda: ()
    time_joining: TimeJoining | None = None
    read: Site = field(init=False)
    _stamp: tuple[int, int] = field(init=False)
    _joining: dict[str, tuple[ServiceConfig, asyncio.Task[Joining]]] = field(default_factory=dict)

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
        joined, refused = self._joined(services)
        changed = {revision.setup.name for revision in (*found, *joined)}
        views = self.replicas()
        live = [live_revision(one, views, unix_s()) for name, one in services.items() if name not in changed]
        return [*found, *joined, *(one for one in live if one is not None)], [*warnings, *refused]

    def _joined(self, services: Mapping[str, RunningService]) -> tuple[list[Revision], list[str]]:
        """The services whose joining variants have been timed since; and why others do not join."""
        found, warnings = [], []
        for name, (config, task) in list(self._joining.items()):
            if not task.done():
                continue
            del self._joining[name]
            try:
                found.append(clover_revision(services[name], self.read, config, self.cache, task.result()))
            except JouleryError as error:
                warnings.append(f"the changed site file is not taken over: {error}")
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
        """The service with its changed variants; None while those that join are timed.

        Raises:
            JouleryError: They cannot be taken over.
        """
        joining = self._untimed(one, config)
        timing = self.time_joining
        if not joining or timing is None:
            return clover_revision(one, self.read, config, self.cache, {})

        async def timed() -> Joining:
            return {name: await timing(one, config, name, model) for name, model in joining.items()}

        self._joining[one.name] = config, asyncio.create_task(timed(), name=f"variants join {one.name}")
        return None

    def _untimed(self, one: RunningService, config: ServiceConfig) -> dict[str, ModelRef]:
        """Variants that the service's profile does not know, with what they load."""
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
        changed |= {"family_config": None} if acts else {}
    elif acts and _states_shares(config):
        changed |= {"policy": FixedPolicy(kind="fixed"), "family_config": None}
    return config.model_copy(update=changed)


def base_variant(one: RunningService) -> ModelVariant:
    """The variant of a service's baseline."""
    assert one.chosen is not None  # a service without a policy follows a plan
    (name,) = one.chosen.base.counts
    return one.setup.family[name]


def changes_family(one: RunningService, config: ServiceConfig, cache: Path) -> bool:
    """Whether variants join or leave a service with a Clover policy.

    Args:
        one: The service.
        config: Its changed section.
        cache: Where built models are kept.

    Raises:
        ConfigError: The baseline's variant leaves, or a variant is another under its old name.
    """
    assert one.chosen is not None  # a service without a policy follows a plan
    now, base = {name for name, _ in one.chosen.policy.family}, base_variant(one).name
    names = {variant.name for variant in config.family.variants}
    at = f"services.{one.name}.family.variants"
    if base not in names:
        raise ConfigError(
            f"{base} is the baseline that savings of this run are compared with, and cannot leave",
            pointer=at,
            got=", ".join(sorted(names)),
            expected=f"{base} among them",
            hint="keep it; or restart to compare with another baseline",
        )
    for variant in config.family.variants:
        if variant.name not in one.setup.models:
            continue
        same_model = model_ref(variant.model, cache) == one.setup.models[variant.name]
        if not same_model or variant.accuracy_ratio != one.setup.family[variant.name].accuracy_ratio:
            what = "accuracy" if same_model else "model"
            raise ConfigError(
                f"{variant.name} has another {what} than the variant of that name that this run has measured",
                pointer=at,
                got=variant.name,
                expected="a name of its own",
                hint=f"add it under another name and leave {variant.name} out; or restart",
            )
    return names != now


def clover_revision(
    one: RunningService, site: Site, config: ServiceConfig, cache: Path, joining: Mapping[str, JoiningTimes | None]
) -> Revision:
    """A running service with a Clover policy and the variants of a changed site file.

    What the profile and the trials know of the variants that stay is kept, and so is the baseline.

    Args:
        one: The service.
        site: The changed site.
        config: Its section of it.
        cache: Where built models are kept.
        joining: Times of the variants that join, where they were timed.

    Raises:
        JouleryError: A model is missing, or the objectives cannot be met.
    """
    chosen = one.chosen
    assert chosen is not None  # a service without a policy follows a plan
    changes_family(one, config, cache)
    family = config.family.as_family(config.name)
    names = [variant.name for variant in family.variants]
    models = {variant.name: model_ref(variant.model, cache) for variant in config.family.variants}
    loads, candidates = {**one.setup.models, **models}, layouts(one.setup.partitions, names)
    setup = replace(one.setup, family=family, models=loads, slo=config.slo.as_slo(), candidates=candidates)
    profile = chosen.predictor.profile
    assumed = {name for name, unknown in chosen.policy.family if unknown}
    profiled, words = {entry.variant for entry in profile.entries}, []
    known = profiled - assumed
    for name in names:
        if name not in profiled:
            like = nearest(one.setup.family, family[name], known)
            profile, said = with_joined(profile, name, models[name], like, joining.get(name))
            assumed.add(name)
            words.append(f"{setup.name}: {said}, until its live times are known")
    former = with_former(one.setup.family, family)
    predictor = replace(
        chosen.predictor,
        profile=profile,
        accuracy_ratio={variant.name: variant.accuracy_ratio for variant in former.variants},
    )
    policy = replace(
        chosen.policy,
        objectives=objectives_from_config(config, base_variant(one).accuracy_ratio),
        search=_search_over(chosen.policy.search, setup, predictor),
        family=family_of(names, assumed),
    )
    loaded, replica_bytes = kept_loaded(site, config, setup, profile, free_memory_bytes)
    binding = replace(
        chosen,
        policy=policy,
        predictor=predictor,
        remark="; ".join(words),
        loaded=loaded,
        replica_bytes=max(replica_bytes, chosen.replica_bytes),
    )
    return Revision(replace(setup, family=former), binding)


def _search_over(
    search: PredictiveSearch | TrialSearch, setup: ServiceSetup, predictor: Predictor
) -> PredictiveSearch | TrialSearch:
    """The same search over the variants of a service as it is now."""
    if isinstance(search, PredictiveSearch):
        return replace(search, candidates=setup.candidates, predictor=predictor)
    accuracy = {variant.name: variant.accuracy_ratio for variant in setup.family.variants}
    memory = {variant.name: variant.memory_bytes for variant in setup.family.variants}
    return search.over(accuracy, misfits(slice_menu(setup.partitions), memory), predictor)


def nearest(former: ModelFamily, variant: ModelVariant, known: Collection[str]) -> str:
    """The measured variant next to another in accuracy; of two the more accurate one, which is rarely faster.

    Args:
        former: The variants of the service so far.
        variant: The other one.
        known: Those that were measured.
    """
    others = [one for one in former.variants if one.name in known]
    return min(others, key=lambda one: (abs(one.accuracy_ratio - variant.accuracy_ratio), -one.accuracy_ratio)).name


def live_revision(one: RunningService, views: Sequence[ReplicaView], now_s: float) -> Revision | None:
    """A service whose assumed times are replaced by live ones, where enough answers show them; None for no change.

    Args:
        one: The service.
        views: Replicas now.
        now_s: Unix seconds.
    """
    chosen = one.chosen
    assumed = [] if chosen is None else [name for name, unknown in chosen.policy.family if unknown]
    if chosen is None or not assumed:
        return None
    profile, words, still = chosen.predictor.profile, [], set(assumed)
    seen = live_slices(one.window.since(now_s), {view.id: view.spec.slice for view in views})
    for name in assumed:
        pieces = {entry.slice for entry in profile.entries if entry.variant == name}
        mine = {piece: times for (variant, piece), times in seen.items() if variant == name and piece in pieces}
        if mine:
            profile = with_live_times(profile, name, mine)
            shown = ", ".join(f"{1e3 * times.mean_s:.3g} ms on {piece}" for piece, times in sorted(mine.items()))
            words.append(f"{one.name}: {name} is planned with its live times from now on, {shown}")
            still.discard(name)
    if not words:
        return None
    predictor, search = replace(chosen.predictor, profile=profile), chosen.policy.search
    over: PredictiveSearch | TrialSearch
    if isinstance(search, TrialSearch):
        over = search.over(search.accuracy_ratio, search.disabled, predictor)
    else:
        over = replace(search, predictor=predictor)
    policy = replace(chosen.policy, search=over, family=family_of((name for name, _ in chosen.policy.family), still))
    return Revision(one.setup, replace(chosen, policy=policy, predictor=predictor, remark="; ".join(words)))


def live_slices(records: Sequence[RequestRecord], slices: Mapping[str, Slice]) -> dict[tuple[str, Slice], Timings]:
    """Times in the replica and CPU times of live answers outside batches, by variant and slice, where there are enough.

    Args:
        records: Requests that ended.
        slices: The slice of each replica.
    """
    found: dict[tuple[str, Slice], list[RequestRecord]] = {}
    for record in records:
        counts = record.outcome is Outcome.OK and record.end_s > record.start_s and record.batch == 1
        if counts and record.replica in slices:
            found.setdefault((record.variant, slices[record.replica]), []).append(record)
    return {
        key: Timings([one.end_s - one.start_s for one in mine], [max(one.cpu_s, 0.0) for one in mine])
        for key, mine in found.items()
        if len(mine) >= _ENOUGH
    }
