"""Changes to the variants of a running Clover service: variants join or leave, and live answers correct their times."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from joulery.app.profiling.joining import JoiningTimes, live_ratio, with_joined
from joulery.app.serving.joined_answers import JoinedAnswers
from joulery.app.serving.service import free_memory_bytes, kept_loaded, objectives_from_config
from joulery.app.serving.split import check_places, with_former
from joulery.app.wiring.model_refs import model_ref
from joulery.config.services import ServiceConfig
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.engine import ModelRef, Outcome, ReplicaState, ReplicaView, RequestRecord
from joulery.domain.serving.profile import Profile, Timings
from joulery.domain.serving.service import ModelFamily, ModelVariant, Slice
from joulery.perf.blend import rescaled
from joulery.perf.layouts import Predictor
from joulery.policies.serving.search.layout_space import layouts, slice_menu, unfit_edges
from joulery.policies.serving.search.predictive_search import PredictiveSearch
from joulery.policies.serving.search.trial_search import TrialSearch
from joulery.policies.serving.variants.changes import family_of
from joulery.policies.serving.variants.newcomers import assumed
from joulery.runtime.serving.controller import Revision
from joulery.runtime.serving.running_service import RunningService, ServiceSetup

_ENOUGH = 30
"""Number of live answers of a variant on a slice from which its times are taken."""


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
        ConfigError: The baseline's variant leaves, a variant has changed under its old name, or it cannot join.
    """
    assert one.chosen is not None  # a service without a policy follows a plan
    check_places(one, config)
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
    one: RunningService,
    site: Site,
    config: ServiceConfig,
    cache: Path,
    joining: Mapping[str, JoiningTimes | None],
    *,
    steers: bool = True,
) -> Revision:
    """Revise a running service with a Clover policy to the variants of a changed site file.

    Profile entries and trials of the variants that stay are kept, and so is the baseline. A variant whose times are
    assumed is not in any layout at first, where requests can be steered to it.

    Args:
        one: The service.
        site: The changed site.
        config: Section of the service in the changed site.
        cache: Where built models are kept.
        joining: Times of the variants that join, where they were timed.
        steers: Whether the engine steers requests among the variants that a replica keeps loaded.

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
    former_unknown = assumed(chosen.policy.family)
    profile, remarks = _with_newcomers(one, family, models, joining)
    unknown = former_unknown.union(name for name, _ in remarks)
    former = with_former(one.setup.family, family)
    predictor = replace(
        chosen.predictor,
        profile=profile,
        accuracy_ratio={variant.name: variant.accuracy_ratio for variant in former.variants},
    )
    loaded, replica_bytes = kept_loaded(site, config, setup, profile, free_memory_bytes)
    held = unknown.intersection(loaded) if steers else ()
    policy = replace(
        chosen.policy,
        objectives=objectives_from_config(config, base_variant(one).accuracy_ratio),
        search=_search_over(chosen.policy.search, setup, predictor, unknown, held),
        family=family_of(names, unknown),
    )
    binding = replace(
        chosen,
        policy=policy,
        predictor=predictor,
        remark="; ".join(f"{setup.name}: {remark}, until its live times are known" for _, remark in remarks),
        loaded=loaded,
        replica_bytes=max(replica_bytes, chosen.replica_bytes),
    )
    return Revision(replace(setup, family=former), binding)


def _with_newcomers(
    one: RunningService,
    family: ModelFamily,
    models: Mapping[str, ModelRef],
    joining: Mapping[str, JoiningTimes | None],
) -> tuple[Profile, list[tuple[str, str]]]:
    """Add the missing variants to a service's profile; return it with each of them and a text on how it is planned."""
    assert one.chosen is not None  # asked before
    profile, remarks = one.chosen.predictor.profile, []
    profiled = {entry.variant for entry in profile.entries}
    for name in (variant.name for variant in family.variants):
        if name not in profiled:
            like = nearest(one.setup.family, family[name], profiled - assumed(one.chosen.policy.family))
            profile, remark = with_joined(profile, name, models[name], like, joining.get(name))
            remarks.append((name, remark))
    return profile, remarks


def _search_over(
    search: PredictiveSearch | TrialSearch,
    setup: ServiceSetup,
    predictor: Predictor,
    unknown: Collection[str] = (),
    held: Collection[str] = (),
) -> PredictiveSearch | TrialSearch:
    """Adapt a search to the present variants of a service.

    Args:
        search: The search.
        setup: The service.
        predictor: Predicts its layouts.
        unknown: Variants whose times are assumed; a predicted layout has at most one instance of them.
        held: Those among them that are kept out of every layout.
    """
    if isinstance(search, PredictiveSearch):

        def fits(layout: Layout) -> bool:
            counts = layout.counts
            return not counts.keys() & set(held) and sum(counts.get(name, 0) for name in unknown) <= 1

        return replace(search, candidates=tuple(filter(fits, setup.candidates)), predictor=predictor)
    variants = [variant for variant in setup.family.variants if variant.name not in held]
    accuracy = {variant.name: variant.accuracy_ratio for variant in variants}
    memory = {variant.name: variant.memory_bytes for variant in setup.family.variants}
    return search.over(accuracy, unfit_edges(slice_menu(setup.partitions), memory), predictor)


def nearest(former: ModelFamily, variant: ModelVariant, known: Collection[str]) -> str:
    """Find the measured variant closest to another in accuracy; of two equally close, the more accurate one, which is
    rarely faster.

    Args:
        former: The variants of the service so far.
        variant: The other one.
        known: Those that were measured.
    """
    others = [one for one in former.variants if one.name in known]
    return min(others, key=lambda one: (abs(one.accuracy_ratio - variant.accuracy_ratio), -one.accuracy_ratio)).name


def live_revision(
    one: RunningService, views: Sequence[ReplicaView], now_s: float, answers: JoinedAnswers
) -> Revision | None:
    """Replace a service's assumed times with live ones where there are enough answers; None for no change.

    A variant that replicas fail to keep loaded cannot answer a share of requests: layouts with it are then chosen by
    its assumed times.

    Args:
        one: The service.
        views: The present replicas.
        now_s: Unix seconds.
        answers: Collects the answers of variants whose times are assumed.
    """
    chosen = one.chosen
    unknown = frozenset() if chosen is None else assumed(chosen.policy.family)
    records = answers.of(one.name, unknown, one.window.since(now_s) if unknown else (), now_s)
    if chosen is None or not unknown:
        return None
    profile, remarks, still = chosen.predictor.profile, [], set(unknown)
    seen = live_slices(records, {view.id: view.spec.slice for view in views})
    known = {entry.variant for entry in profile.entries} - still
    for name in sorted(unknown):
        if (ratio := live_ratio(profile, name, seen, known)) > 0:
            profile = rescaled(profile, name, ratio)
            remarks.append(f"{one.name}: {name} takes {ratio:.2f} times what was planned, by its live answers")
            still.discard(name)
    mine = [view for view in views if view.spec.service == one.name and view.state is ReplicaState.READY]
    loaded = set.intersection(*({view.spec.variant, *view.warm} for view in mine)) if mine else set()
    if mine and answers.overdue(one.name, now_s) and not still <= loaded and not _tries(chosen.policy.search, still):
        absent = ", ".join(sorted(still - loaded))
        remarks.append(f"{one.name}: replicas do not keep {absent} loaded; its layouts are planned with assumed times")
        held: frozenset[str] | set[str] = frozenset()
    else:
        held = {name for name in still if not _tries(chosen.policy.search, {name})}
    if not remarks:
        return None
    setup = replace(one.setup, family=replace(one.setup.family, variants=_present(one)))
    predictor = replace(chosen.predictor, profile=profile)
    over = _search_over(chosen.policy.search, setup, predictor, still, held)
    policy = replace(chosen.policy, search=over, family=family_of((name for name, _ in chosen.policy.family), still))
    return Revision(one.setup, replace(chosen, policy=policy, predictor=predictor, remark="; ".join(remarks)))


def _tries(search: PredictiveSearch | TrialSearch, names: Collection[str]) -> bool:
    """Whether a search may choose layouts with any of these variants."""
    if isinstance(search, TrialSearch):
        return not search.accuracy_ratio.keys().isdisjoint(names)
    return any(not layout.counts.keys().isdisjoint(names) for layout in search.candidates)


def _present(one: RunningService) -> tuple[ModelVariant, ...]:
    """The variants that a service may choose from, without those that left."""
    assert one.chosen is not None  # asked before
    names = dict(one.chosen.policy.family)
    return tuple(variant for variant in one.setup.family.variants if variant.name in names)


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
