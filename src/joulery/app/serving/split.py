"""``policy: {kind: split}``, and changes to the variants of a running service with a fixed policy or a split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from joulery.app.wiring.model_refs import model_ref
from joulery.config.services import FixedPolicy, ServiceConfig, SplitPolicy
from joulery.domain.errors import ConfigError
from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.domain.serving.mix import Weights
from joulery.domain.serving.profile import Timings
from joulery.domain.serving.service import ModelFamily
from joulery.perf.blend import blended, with_assumed_variant
from joulery.policies.serving.search.layout_space import layouts, slice_menu
from joulery.policies.serving.search.predictive_search import PredictiveSearch
from joulery.runtime.serving.controller import Revision
from joulery.runtime.serving.running_service import PolicyBinding, RunningService, ServiceSetup

_ENOUGH = 10
"""Number of live answers of a variant from which its times are taken."""


def shares_of(config: ServiceConfig, family: ModelFamily) -> Weights:
    """Share of the requests of each variant under a fixed policy or a split, without variants of share 0.

    Raises:
        TypeError: The policy is neither a fixed one nor a split.
    """
    rule = config.policy
    if isinstance(rule, FixedPolicy):
        return ((rule.variant or family.largest.name, 1.0),)
    if not isinstance(rule, SplitPolicy):
        raise TypeError(f"policy {rule.kind} states no shares")
    return tuple((name, share) for name, share in rule.shares.items() if share > 0)


def main_of(shares: Weights) -> str:
    """The variant of the largest share, the first among equals: the main variant of every replica."""
    return max(shares, key=lambda one: one[1])[0]


def split_binding(binding: PolicyBinding, setup: ServiceSetup, shares: Weights) -> PolicyBinding:
    """Bind the policy of a service whose variants answer stated shares of its requests.

    Args:
        binding: The policy of the service, with the variant of the largest share alone to choose from.
        setup: The service.
        shares: The shares.

    Raises:
        ConfigError: The variants together do not fit a slice of the GPUs.
        DataError: There is no slice on which all variants were measured.
    """
    names, search = tuple(sorted(name for name, _ in shares)), binding.policy.search
    assert isinstance(search, PredictiveSearch)  # what a fixed choice of variants is searched with
    _fit_together(setup, names)
    mixed = replace(search, predictor=blended(binding.predictor, shares, main_of(shares)))
    return replace(
        binding,
        policy=replace(binding.policy, search=mixed),
        loaded=names,
        replica_bytes=0,
        shares=shares,
        audit=None,
    )


def revised(one: RunningService, config: ServiceConfig, cache: Path, now_s: float) -> Revision:
    """Revise a running service to the variants and the shares of a changed site file.

    A variant without a profile is planned with the times of its live answers, or of the variant that most replicas
    serve now. The baseline is unchanged.

    Args:
        one: The service, under a fixed policy or a split.
        config: Its changed section, with such a policy.
        cache: Where built models are kept.
        now_s: Unix seconds.

    Raises:
        JouleryError: A model is missing, or the variants do not fit.
    """
    chosen = one.chosen
    assert chosen is not None  # a service without a policy follows a plan
    check_places(one, config)
    search = chosen.policy.search
    assert isinstance(search, PredictiveSearch)
    models = {variant.name: model_ref(variant.model, cache) for variant in config.family.variants}
    family = with_former(one.setup.family, config.family.as_family(config.name))
    setup = replace(one.setup, family=family, models={**one.setup.models, **models}, slo=config.slo.as_slo())
    shares = shares_of(config, config.family.as_family(config.name))
    like = _serving(one)
    profile, times, unknown = chosen.predictor.profile, live_times(one.window.since(now_s)), []
    for name, _ in shares:
        if not any(entry.variant == name for entry in profile.entries):
            unknown += [] if name in times else [name]
            profile = with_assumed_variant(profile, name, like, times)
    accuracy = {variant.name: variant.accuracy_ratio for variant in family.variants}
    predictor = replace(chosen.predictor, profile=profile, accuracy_ratio=accuracy)
    candidates = layouts(setup.partitions, [main_of(shares)])
    policy = replace(
        chosen.policy,
        search=replace(search, candidates=candidates, predictor=predictor),
        objectives=replace(
            chosen.policy.objectives, slo=setup.slo, minimum_accuracy_ratio=config.minimum_accuracy_ratio
        ),
    )
    remark = ""
    if unknown:
        remark = (
            f"{setup.name}: {', '.join(unknown)} joined without a profile and is planned as if it took the time of "
            f"{like}; its joules are those of its CPU seconds"
        )
    binding = replace(chosen, policy=policy, predictor=predictor, remark=remark)
    return Revision(setup, split_binding(binding, setup, shares), resets_state=True)


def check_places(one: RunningService, config: ServiceConfig) -> None:
    """Raise if a variant joins a service with variants both on this machine and on other servers.

    The times of such a variant cannot be derived from those of another one: it needs a profile.

    Raises:
        ConfigError: A variant joins.
    """
    joining = [variant.name for variant in config.family.variants if variant.name not in one.setup.models]
    if joining and (config.family.is_mixed or one.setup.replica_cores):
        raise ConfigError(
            f"{', '.join(joining)} cannot join without a restart: some variants of {one.name} run on this machine, "
            "others on other servers, and each needs a profile of its own",
            pointer=f"services.{one.name}.family.variants",
            hint="restart to profile and serve it",
        )


def live_times(records: Sequence[RequestRecord]) -> dict[str, Timings]:
    """Times in the replica and CPU times of live answers, by variant, where there are enough."""
    found: dict[str, list[RequestRecord]] = {}
    for record in records:
        if record.outcome is Outcome.OK and record.service_s > 0:
            found.setdefault(record.variant, []).append(record)
    return {
        name: Timings([one.service_s for one in mine], [max(one.cpu_s, 0.0) for one in mine])
        for name, mine in found.items()
        if len(mine) >= _ENOUGH
    }


def _serving(one: RunningService) -> str:
    """The variant that most replicas serve now."""
    counts: Mapping[str, int] = one.layouts[-1][1].counts if one.layouts else {}
    return max(counts, key=counts.__getitem__) if counts else one.setup.family.largest.name


def with_former(before: ModelFamily, now: ModelFamily) -> ModelFamily:
    """Add the variants that were served earlier to a family, since their answers are still counted."""
    names = {variant.name for variant in now.variants}
    gone = tuple(variant for variant in before.variants if variant.name not in names)
    return replace(now, variants=(*now.variants, *gone))


def _fit_together(setup: ServiceSetup, names: Sequence[str]) -> None:
    """Raise if the variants of a split together need more memory than the smallest slice of the GPUs has."""
    if not setup.gpus:
        return
    needed = sum(setup.family[name].memory_bytes for name in names)
    room = [profile.memory_bytes for profile in slice_menu(setup.partitions).profiles if profile.memory_bytes > 0]
    if room and needed > min(room):
        raise ConfigError(
            f"{', '.join(names)} need {needed / 2**30:.1f} GiB together, a part of the GPUs has "
            f"{min(room) / 2**30:.1f}",
            pointer=f"services.{setup.name}.policy.shares",
            hint="fewer variants at once, or larger parts of the GPUs",
        )
