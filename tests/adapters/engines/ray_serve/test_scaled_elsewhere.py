"""Replica counts that someone else changes are set back, and said."""

from joulery.adapters.engines.ray_serve.cluster import RayPlace
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
    cluster = Scaled()
    engine = RayServeEngine(RaySettings(), cluster)
    await engine.apply([toy("double"), toy("double")])
    cluster.refuses = True
    await engine._set_back()
    assert cluster.target == 3 and engine.remarks() == (), "Ray does not answer: it is tried again later"
    cluster.refuses, engine._counts_seen_s = False, float("-inf")
    await engine._set_back()
    assert cluster.target == 2
    (text,) = engine.remarks()
    assert APP in text and "with 3 replicas" in text and "back to 2" in text and "maximum_replicas" in text
    cluster.target = 5
    await engine._set_back()
    assert cluster.target == 5, "not at every look"
    await engine.close()
