"""Replica counts that someone else changes are set back, and said."""

from joulery.adapters.engines.ray_serve.applications import apps_of
from joulery.adapters.engines.ray_serve.cluster import RayPlace
from joulery.adapters.engines.ray_serve.counts import SET_BACK_S, ReplicaCounts
from joulery.adapters.engines.ray_serve.engine import RayServeEngine
from joulery.adapters.engines.ray_serve.settings import RaySettings
from joulery.domain.errors import ActuationError
from tests.adapters.engines.ray_serve.fake_cluster import FakeCluster
from tests.adapters.engines.support import toy

APP = "joulery.toy.cpu-1"


class Scaled(FakeCluster):
    """Another scaler asks for three replicas."""

    def __init__(self) -> None:
        super().__init__(RayPlace())
        self.lost, self.target, self.refuses = "", 3, False

    def environ(self) -> dict[str, str]:
        return {}

    async def applications(self):
        found = {"status": "RUNNING", "deployments": {"Instances": {"target_num_replicas": self.target}}}
        return dict.fromkeys(self.declared, found)

    async def scale(self, application, deployment, replicas):
        if self.refuses:
            raise ActuationError("no")
        self.target = replicas


async def test_a_count_changed_by_another_scaler_is_set_back_and_said():
    cluster, now_s = Scaled(), [0.0]
    (app,) = apps_of([toy("double"), toy("double")], {}).values()
    cluster.declared = {APP: {}}
    counts = ReplicaCounts(cluster, lambda: now_s[0])
    cluster.refuses = True
    await counts.set_back({APP: app})
    assert cluster.target == 3 and counts.remarks == {}, "Ray does not answer: it is tried again later"
    cluster.refuses, now_s[0] = False, SET_BACK_S
    await counts.set_back({APP: app})
    assert cluster.target == 2
    (text,) = counts.remarks.values()
    assert APP in text and "with 3 replicas" in text and "back to 2" in text and "maximum_replicas" in text
    cluster.target, now_s[0] = 5, 2 * SET_BACK_S - 0.1
    await counts.set_back({APP: app})
    assert cluster.target == 5, "not at every look"
    now_s[0] = 2 * SET_BACK_S
    await counts.set_back({APP: app})
    assert cluster.target == 2


async def test_the_engine_passes_on_what_was_set_back():
    cluster = Scaled()
    engine = RayServeEngine(RaySettings(), cluster)
    await engine.apply([toy("double"), toy("double")])
    await engine._counts.set_back(engine._apps)
    assert [APP in text for text in engine.remarks()] == [True]
    await engine.close()
