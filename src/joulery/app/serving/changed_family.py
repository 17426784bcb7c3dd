"""A running Clover service whose variants change: some join, some leave, live answers correct the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from joulery.app.profiling.joining import JoiningTimes, live_ratio, with_joined
from joulery.app.serving.service import free_memory_bytes, kept_loaded, objectives_from_config
from joulery.app.serving.split import with_former
from joulery.app.wiring.model_refs import model_ref
from joulery.config.services import ServiceConfig
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.domain.serving.engine import Outcome, ReplicaView, RequestRecord
from joulery.domain.serving.profile import Timings
from joulery.domain.serving.service import ModelFamily, ModelVariant, Slice
from joulery.perf.blend import rescaled
from joulery.perf.layouts import Predictor
from joulery.policies.family_change import family_of
from joulery.policies.serving.layout_space import layouts, misfits, slice_menu
from joulery.policies.serving.predictive_search import PredictiveSearch
from joulery.policies.serving.trial_search import TrialSearch
from joulery.runtime.serving.controller import Revision
from joulery.runtime.serving.running_service import RunningService, ServiceSetup

_ENOUGH = 30
"""Live answers of a variant on a slice that its times can be taken from."""


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
    known = {entry.variant for entry in profile.entries} - still
    for name in assumed:
        if (ratio := live_ratio(profile, name, seen, known)) > 0:
            profile = rescaled(profile, name, ratio)
            words.append(f"{one.name}: {name} takes {ratio:.2f} times what was planned, by its live answers")
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
