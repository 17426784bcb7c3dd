"""Where replicas go on a cluster's nodes while others are empty."""

from joulery.runtime.serving.nodes.places import NodePlaces
from tests.runtime.serving.nodes.test_sleep import ONE, World, on


def test_nodes_that_cannot_sleep_come_first_then_cleaner_grids_then_those_in_use():
    world = World()
    places = NodePlaces("abc", world.sleep, lambda: world.running)
    places.ranks = {"a": 1, "b": 0, "c": 0}
    world.running = [on("c")]
    assert places.order() == ("a", "c", "b")
    places.ranks = {"a": 2, "b": 0, "c": 1}
    assert places.order() == ("a", "b", "c")
    everywhere, part = (ONE, ONE, ONE), (ONE, ONE)
    used = {
        everywhere: tuple((ONE, f"node:{name}") for name in "abc"),
        part: ((ONE, "node:a"), (ONE, "node:b")),
        (ONE,): ((ONE, "node:a"),),
    }
    places.ranks = {"b": 1, "c": 0}
    assert {node for _, node in places.assigned(used, part)} == {"node:a", "node:c"}
    assert places.assigned(used, everywhere) == used[everywhere]
