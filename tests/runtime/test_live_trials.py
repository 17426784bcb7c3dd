"""Live trials with a real engine and real workers, on MIG instances of a driver that is not there."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from joulery.adapters.engines.local import LocalEngine, LocalSettings
from joulery.domain.device import MigSetting
from joulery.domain.engine import EnergyShare, InferRequest, Outcome, RequestError, RequestRecord
from joulery.domain.errors import ActuationError
from joulery.domain.layout import Layout
from joulery.domain.mig import A100_40GB, GIB
from joulery.domain.quality import Quality
from joulery.domain.serving import Slo
from joulery.policies.trial_search import TrialProblem
from joulery.policies.trial_space import misfits
from joulery.policies.trial_state import Budget, TrialTerms
from joulery.policies.trials import TrialPolicy
from joulery.policies.variants import short
from joulery.runtime.controller import LayoutActuator, RequestWindow, ServiceEye, running_layout
from joulery.runtime.drive import APPLIED, FAILED, LiveDriver
from joulery.runtime.live_sample import LiveSample
from joulery.runtime.replay import POLICY, STEP, decide_again, policy_entry, step_entry
from tests.adapters.engines.support import toy
from tests.adapters.engines.test_local_gpus import cutting
from tests.fakes.nvml import NvmlFake, gpu

ACCURACY = {"small": 0.7, "large": 0.8}
JOULES = {"small": 1.0, "large": 4.0}
MODELS = {name: toy("gpu").model for name in ACCURACY}
BASE = Layout.parse(["large on 7g.40gb"])


def trying(search: str, **budget: Any) -> TrialPolicy:
    disabled = misfits(A100_40GB, {"small": 1 * GIB, "large": 15 * GIB})
    problem = TrialProblem(ACCURACY, A100_40GB, 1, BASE, 200.0, disabled=disabled, search=search)
    terms = TrialTerms(0.5, Slo(1.0, 0.5))
    limits = Budget(**{"count": 4, "longest_s": 20.0, "fewest": 20, **budget})
    return TrialPolicy("toy", problem, terms, 50.0, settle_s=0.2, budget=limits)


class Live:
    """A policy, its driver, an engine on an invented A100, and clients that never stop asking."""

    def __init__(self, policy: TrialPolicy) -> None:
        self.nvml = NvmlFake(gpu())
        self.places = cutting(self.nvml)
        self.engine = LocalEngine(LocalSettings(drain_s=5.0), places=self.places)
        self.window, self.sample = RequestWindow("toy", 1e9), LiveSample("toy", 0.9, warm_up_s=0.0)
        self.g_per_kwh, self.failed = 300.0, 0
        self.records: list[Any] = []
        self.log: list[dict[str, Any]] = [{"kind": POLICY, **policy_entry(policy)}]
        eye = ServiceEye(
            self.window, self.engine, policy.terms.slo, lambda now_s: self.g_per_kwh, lambda: 0.0, self.sample
        )
        self.driver: LiveDriver[Any, Any] = LiveDriver(
            policy,
            eye.look,
            LayoutActuator(self.engine, "toy", MODELS).carry_out,
            watch=lambda seen, step: self.log.append({"kind": STEP, **step_entry("toy", seen, step)}),
            record=self._record,
        )

    def _record(self, record: Any) -> None:
        self.records.append((record, running_layout(self.engine, "toy"), self.cut()))

    def cut(self) -> Counter[str]:
        """How the board is cut now."""
        return Counter(name for name, _, _ in self.nvml.layout()[1])

    async def client(self) -> None:
        while True:
            at_s = time.time()
            try:
                answer = await self.engine.infer("toy", InferRequest({}))
            except RequestError as error:
                self.failed += error.outcome is not Outcome.UNKNOWN
                await asyncio.sleep(0.01)
                continue
            joules = EnergyShare(JOULES[answer.variant], None, Quality.MODELLED)
            self.sample.add(
                RequestRecord(
                    "toy", answer.variant, answer.replica, at_s, at_s, time.time(), Outcome.OK, 0.0, 0.0, 1, joules
                )
            )
            await asyncio.sleep(0.002)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(3000):
            await self.driver.step(time.time())
            if condition():
                return
            await asyncio.sleep(0.02)
        raise AssertionError([str(record.decision.reason) for record, _, _ in self.records])

    def settled(self) -> bool:
        return bool(self.records) and self.driver.state.trying is None

    async def __aenter__(self) -> "Live":
        self.clients = [asyncio.ensure_future(self.client()) for _ in range(3)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            client.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await client
        await self.engine.close()


def cut_of(layout: Layout) -> Counter[str]:
    return Counter(piece.profile for piece in layout.slices)


async def test_partitions_are_tried_on_a_gpu_and_settled_on_without_losing_a_request():
    async with Live(trying("learning")) as live:
        await live.until(live.settled)
        assert live.failed == 0, "requests wait while the GPU is cut"
        assert all(record.outcome == APPLIED for record, _, _ in live.records)
        for record, running, cut in live.records:
            layout = Layout.parse(record.decision.value)
            assert running == layout and not cut_of(layout) - cut, "what was decided runs, on instances that are there"
        tried = [Layout.parse(record.decision.value) for record, _, _ in live.records[:-1]]
        assert tried[0] == BASE and 1 < len(set(tried)) == len(tried) <= 4
        small_slices = {"2g.10gb", "1g.5gb"}
        assert not any(
            item.variant == "large" and item.slice.profile in small_slices for each in tried for item in each.instances
        ), "what does not fit is never tried"
        assert set(live.driver.state.layout.counts) == {"small"}, "a dirty grid, and half the weight on carbon"
        replayed = decide_again(json.loads(json.dumps(live.log)))
        assert replayed.differences == () and replayed.decisions == len(live.records)


async def test_a_gpu_that_refuses_to_be_cut_stays_as_it_was_and_the_log_says_which():
    async with Live(trying("clover")) as live:
        await live.until(lambda: len(live.records) == 1)
        before = live.cut()

        def busy(device: Any, spec: Any, wanted: MigSetting, reason: str) -> object:
            if Counter(wanted.profiles) != before:
                raise ActuationError("the GPU is in use by another client", left_dirty=())
            return device.apply(wanted)

        live.places.turn = busy
        await live.until(live.settled)
        ran = BASE
        assert any(record.outcome == FAILED for record, _, _ in live.records), "other cuts were tried"
        for record, running, cut in live.records:
            if record.outcome == FAILED:
                assert "in use by another client" in record.detail
                assert record.detail.endswith(f"{short(ran)} serves on")
                assert (running, cut) == (ran, before), "never between: the old layout, on the old cut"
            ran = running
        again = next(r for r, _, _ in live.records if "could not be run" in r.decision.reason)
        assert again is not None and live.failed == 0
        assert live.driver.state.layout == running_layout(live.engine, "toy"), "it settled on what does run"
        assert decide_again(json.loads(json.dumps(live.log))).differences == ()
