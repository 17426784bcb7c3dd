"""Live trials with a real engine and real workers, on MIG instances of a driver that is not there."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from joulery.adapters.engines.embedded.engine import LocalEngine, LocalSettings
from joulery.app.runs.replay import decide_again
from joulery.domain.errors import ActuationError
from joulery.domain.gpu.device import MigSetting
from joulery.domain.gpu.layout import Layout
from joulery.domain.gpu.mig import A100_40GB, GIB
from joulery.domain.serving.service import Slo
from joulery.policies.serving.messages import short
from joulery.policies.serving.objective import ReplanTrigger, ServiceObjectives
from joulery.policies.serving.policy import ServicePolicy
from joulery.policies.serving.search.layout_space import unfit_edges
from joulery.policies.serving.search.trial_search import TrialSearch
from joulery.policies.serving.search.trials import TrialBudget
from joulery.runtime.serving.layout_actuator import running_layout
from joulery.runtime.session.driver import APPLIED, FAILED
from tests.adapters.engines.embedded.test_engine_gpus import cutting
from tests.adapters.engines.support import toy
from tests.fakes.nvml import NvmlFake, gpu
from tests.runtime.serving.live_trials import Live

ACCURACY = {"small": 0.7, "large": 0.8}
JOULES = {"small": 1.0, "large": 4.0}
MODELS = {name: toy("gpu").model for name in ACCURACY}
BASE = Layout.parse(["large on 7g.40gb"])


def trying(search: str, **budget: Any) -> ServicePolicy:
    disabled = unfit_edges(A100_40GB, {"small": 1 * GIB, "large": 15 * GIB})
    limits = TrialBudget(**{"count": 4, "longest_s": 20.0, "min_requests": 20, **budget})
    problem = TrialSearch(ACCURACY, A100_40GB, 1, BASE, 200.0, disabled=disabled, method=search, budget=limits)
    terms = ServiceObjectives(0.5, Slo(1.0, 0.5))
    return ServicePolicy("toy", problem, terms, 50.0, ReplanTrigger(200.0, settle_s=0.2))


class OnGpu(Live):
    """The same on an A100 that is not there."""

    def __init__(self, policy: ServicePolicy) -> None:
        self.nvml = NvmlFake(gpu())
        self.places = cutting(self.nvml)
        super().__init__(policy, LocalEngine(LocalSettings(drain_s=5.0), places=self.places), toy("gpu").model)
        self.cuts: list[Counter[str]] = []

    def cut(self) -> Counter[str]:
        """How the board is cut now."""
        return Counter(name for name, _, _ in self.nvml.layout()[1])

    async def until(self, condition: Callable[[], bool]) -> None:
        def noted() -> bool:
            while len(self.cuts) < len(self.records):
                self.cuts.append(self.cut())
            return condition()

        await super().until(noted)

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        await self.engine.close()


def cut_of(layout: Layout) -> Counter[str]:
    return Counter(piece.profile for piece in layout.slices)


@pytest.mark.slow
async def test_partitions_are_tried_on_a_gpu_and_settled_on_without_losing_a_request():
    async with OnGpu(trying("learning")) as live:
        await live.until(live.settled)
        assert live.failed == 0, "requests wait while the GPU is cut"
        assert all(record.outcome == APPLIED for record, _ in live.records)
        for (record, running), cut in zip(live.records, live.cuts, strict=True):
            layout = Layout.parse(record.decision.value)
            assert running == layout and not cut_of(layout) - cut, "what was decided runs, on instances that are there"
        tried = [Layout.parse(record.decision.value) for record, _ in live.records[:-1]]
        assert tried[0] == BASE and 1 < len(set(tried)) == len(tried) <= 4
        small_slices = {"2g.10gb", "1g.5gb"}
        assert not any(
            item.variant == "large" and item.slice.profile in small_slices for each in tried for item in each.instances
        ), "what does not fit is never tried"
        assert set(live.driver.state.layout.counts) == {"small"}, "a dirty grid, and half the weight on carbon"
        replayed = decide_again(json.loads(json.dumps(live.log)))
        assert replayed.differences == () and replayed.decisions == len(live.records)


async def test_a_gpu_that_refuses_to_be_cut_stays_as_it_was_and_the_log_says_which():
    async with OnGpu(trying("clover")) as live:
        await live.until(lambda: len(live.records) == 1)
        before = live.cut()

        def busy(device: Any, spec: Any, wanted: MigSetting, reason: str) -> object:
            if Counter(wanted.profiles) != before:
                raise ActuationError("the GPU is in use by another client", left_dirty=())
            return device.apply(wanted)

        live.places.turn = busy
        await live.until(live.settled)
        ran = BASE
        assert any(record.outcome == FAILED for record, _ in live.records), "other cuts were tried"
        for (record, running), cut in zip(live.records, live.cuts, strict=True):
            if record.outcome == FAILED:
                assert "in use by another client" in record.detail
                assert record.detail.endswith(f"{short(ran)} serves on")
                assert (running, cut) == (ran, before), "never between: the old layout, on the old cut"
            ran = running
        again = next(r for r, _ in live.records if "failed to start" in r.decision.reason)
        assert again is not None and live.failed == 0
        assert live.driver.state.layout == running_layout(live.engine, "toy"), "it settled on what does run"
        assert decide_again(json.loads(json.dumps(live.log))).differences == ()
