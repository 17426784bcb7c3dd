"""Batches are timed by their size, where the rows of a batch are answered as each request is alone."""

from dataclasses import replace

import numpy as np
import pytest

from joulery.domain.serving.engine import Outcome, RequestError
from joulery.domain.serving.tensors import TensorSpec
from joulery.policies.serving.search.layout_space import cpu_slices
from joulery.runtime.profiling.slice_timings import Plan, batch_sizes, measure
from tests.runtime.profiling.test_slice_timings import MODELS, ToyEngine

PARTITIONS = [cpu_slices((1, 1))]
INPUTS = [{"x": np.array([[float(k)]])} for k in range(3)]
FREE = (TensorSpec("x", "FP64", (-1, 1)),)


class BatchEngine(ToyEngine):
    """A batch takes half of a request's time, and half for each of its requests."""

    def __init__(self, answer=lambda x: {"y": 2 * x}, declared=FREE) -> None:
        super().__init__()
        self.answer, self.declared, self.rows = answer, declared, []

    def replicas(self):
        return tuple(replace(view, inputs=self.declared) for view in self.views)

    async def infer(self, service, request):
        answer = await super().infer(service, request)
        rows = len(request.inputs["x"])
        self.rows.append(rows)
        wall_s = (answer.end_s - answer.start_s) * (1 + rows) / 2
        return answer._replace(
            end_s=answer.start_s + wall_s, cpu_s=answer.cpu_s * (1 + rows) / 2, outputs=self.answer(request.inputs["x"])
        )


async def run(engine, max_batch=8):
    found = await measure(engine, "toy", MODELS, PARTITIONS, INPUTS, Plan(2, 4, 4, 5), max_batch=max_batch)
    return {one.variant: one for one in found}


def test_the_sizes_that_are_timed_are_powers_of_two_and_the_largest():
    assert [batch_sizes(most) for most in (1, 2, 3, 8, 12)] == [(), (2,), (2, 3), (2, 4, 8), (2, 4, 8, 12)]


async def test_batches_are_timed_while_every_slice_works():
    engine = BatchEngine()
    found = await run(engine)
    for variant, one in found.items():
        assert sorted(one.batches) == [2, 4, 8] and {len(times) for times in one.batches.values()} == {10}
        for size, times in one.batches.items():
            assert times.mean_s == pytest.approx(one.loaded.mean_s * (1 + size) / 2, rel=0.05), variant
    assert max(engine.rows) == 8


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda x: {"y": x + len(x)}, id="rows depend on one another"),
        pytest.param(lambda x: {"y": x.sum(axis=0, keepdims=True)}, id="one row whatever goes in"),
        pytest.param(lambda x: {"y": np.float64(1.0) * np.ones(())}, id="no rows"),
        pytest.param(lambda x: {"y": np.array([[b"a"]] if len(x) == 1 else [[b"a"], [b"b"]])}, id="other text"),
    ],
)
async def test_a_model_whose_answers_change_in_a_batch_is_not_batched(answer):
    assert {one.variant: one.batches for one in (await run(BatchEngine(answer))).values()} == {"small": {}, "large": {}}


async def test_a_fixed_first_dimension_and_a_refusal_mean_no_batches():
    fixed = BatchEngine(declared=(TensorSpec("x", "FP64", (1, 1)),))
    assert not any(one.batches for one in (await run(fixed)).values()) and max(fixed.rows) == 1

    def refuses(x):
        if len(x) > 1:
            raise RequestError("one row", Outcome.INVALID)
        return {"y": x}

    assert not any(one.batches for one in (await run(BatchEngine(refuses))).values())
    assert not any(one.batches for one in (await run(BatchEngine(), max_batch=1)).values())


async def test_rounding_in_a_batch_is_no_difference():
    noisy = BatchEngine(lambda x: {"y": (2 * x + 1e-5 * len(x)).astype(np.float32)})
    assert all(one.batches for one in (await run(noisy)).values())
