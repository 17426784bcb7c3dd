"""Requests answered together on Ray: joined in joulery's queue, split again, each with its part of the cost."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from joulery.adapters.engines.ray_serve.applications import apps_of
from joulery.adapters.engines.ray_serve.cluster import RayPlace, ReplicaGoneError
from joulery.adapters.engines.ray_serve.engine import RayServeEngine, RaySettings
from joulery.domain.serving.engine import InferRequest, Outcome, RequestError
from tests.adapters.engines.ray_serve.fake_cluster import FakeCluster
from tests.adapters.engines.support import toy
from tests.waiting import eventually

FOUR = replace(toy("double"), batch=4)
COST_S = 0.7


class Doubling(FakeCluster):
    """Doubles; a negative number is an error of the whole call. Answers when it may."""

    def __init__(self) -> None:
        super().__init__(RayPlace())
        self.lost = ""
        self.may = asyncio.Event()
        self.sizes: list[int] = []
        self.variants: list[str] = []
        self.dies = 0

    def environ(self) -> dict[str, str]:
        return {}

    async def infer(self, application, replica, request, call=""):
        x = request.inputs["x"]
        self.sizes.append(len(x))
        self.variants.append(request.variant)
        await self.may.wait()
        if self.dies:
            self.dies -= 1
            raise ReplicaGoneError("ActorDiedError")
        if (x < 0).any():
            return {"variant": "v", "s": 0.1, "c": 0.1, "e": "negative", "o": Outcome.INVALID.value}
        return {"variant": "v", "s": COST_S, "c": COST_S, "y": {"y": x * 2}}


async def served(*specs):
    cluster = Doubling()
    engine = RayServeEngine(RaySettings(), cluster)
    await engine.apply(specs)
    return engine, cluster


def asked(engine, *rows: float, variant: str = ""):
    x = np.array(rows, np.float32)[:, None]
    return asyncio.ensure_future(engine.infer("toy", InferRequest({"x": x}, variant=variant)))


async def test_requests_that_wait_are_answered_together_each_with_its_rows_and_its_part_of_the_cost():
    engine, cluster = await served(FOUR)
    first = asked(engine, 1.0)
    await eventually(lambda: cluster.sizes == [1], "the first call")
    rest = [asked(engine, 2.0), asked(engine, 3.0, 4.0, 5.0), asked(engine, 6.0, variant="v"), asked(engine, 7.0)]
    last = asked(engine, 8.0)
    await eventually(lambda: len(engine.backlog()) == 6, "all requests")
    cluster.may.set()
    answers = await asyncio.gather(first, *rest, last)
    assert cluster.sizes == [1, 6, 1] and cluster.variants == ["", "v", ""]
    assert [answer.batch for answer in answers] == [1, 4, 4, 4, 4, 1]
    assert [answer.outputs["y"].ravel().tolist() for answer in answers[1:5]] == [[4], [6, 8, 10], [12], [14]]
    costs = [answer.cpu_s for answer in answers[1:5]]
    assert sum(costs) == COST_S and costs[1] == pytest.approx(COST_S / 2)
    assert all(answer.service_s == COST_S for answer in answers)
    assert engine.replicas()[0].served == 6
    await engine.close()


async def test_requests_of_other_shapes_and_a_replica_without_batches_go_alone():
    engine, cluster = await served(FOUR)
    held = asked(engine, 1.0)
    wide = [asyncio.ensure_future(engine.infer("toy", InferRequest({"x": np.ones((1, width))}))) for width in (2, 3)]
    await eventually(lambda: len(engine.backlog()) == 3, "all requests")
    cluster.may.set()
    assert [answer.batch for answer in await asyncio.gather(held, *wide)] == [1, 1, 1]
    await engine.apply([toy("double")])
    assert [answer.batch for answer in await asyncio.gather(*(asked(engine, 1.0) for _ in range(3)))] == [1, 1, 1]
    await engine.apply([FOUR])
    cluster.sizes.clear()
    together = await asyncio.gather(*(asked(engine, 1.0) for _ in range(5)))
    assert max(answer.batch for answer in together) == 4, "another batch is taken over without another process"
    await engine.close()


async def test_a_batch_that_is_not_full_goes_when_it_has_waited():
    engine, cluster = await served(replace(FOUR, max_delay_s=0.02))
    cluster.may.set()
    answer = await asked(engine, 1.0)
    assert (answer.batch, cluster.sizes) == (1, [1])
    await engine.close()


async def test_a_batch_that_fails_is_answered_one_by_one():
    engine, cluster = await served(FOUR)
    first = asked(engine, 1.0)
    await eventually(lambda: cluster.sizes == [1], "the first call")
    rest = [asked(engine, 2.0), asked(engine, -3.0), asked(engine, 4.0)]
    await eventually(lambda: len(engine.backlog()) == 4, "all requests")
    cluster.may.set()
    good, bad, other = await asyncio.gather(*rest, return_exceptions=True)
    assert (await first).batch == 1 and cluster.sizes == [1, 3, 1, 1, 1]
    assert good.outputs["y"].tolist() == [[4.0]] and other.outputs["y"].tolist() == [[8.0]]
    assert isinstance(bad, RequestError) and bad.outcome is Outcome.INVALID
    await engine.close()


async def test_the_requests_of_a_replica_that_dies_are_tried_again_alone():
    engine, cluster = await served(FOUR, FOUR)
    cluster.dies = 2
    first = [asked(engine, 1.0), asked(engine, 2.0)]
    await eventually(lambda: cluster.sizes == [1, 1], "the first calls")
    rest = [asked(engine, float(number)) for number in range(3, 7)]
    await eventually(lambda: len(engine.backlog()) == 6, "all requests")
    cluster.may.set()
    answers = await asyncio.gather(*first, *rest)
    assert [answer.outputs["y"].tolist() for answer in answers] == [[[2.0 * number]] for number in range(1, 7)]
    assert [answer.attempts for answer in answers[:2]] == [2, 2]
    await engine.close()


def test_a_rank_distinguishes_replicas_that_differ_in_their_batch_alone():
    (app,) = apps_of([FOUR, replace(FOUR, batch=8)], {}).values()
    (entry,) = {str(item): item for item in app.config({}, 0.5)["deployments"][0]["user_config"]["plan"]}.values()
    assert [app.spec(entry, rank).batch for rank in (0, 1, 7)] == [4, 8, 4]
