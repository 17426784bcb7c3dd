"""Which tests share a worker, and the order in which workers get them.

The groups of xdist's own ``--dist loadgroup`` have no effect with pytest 9.2, whose node ids xdist cannot mark.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.once_more import STARTS_PROGRAMS

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r'xdist_group\("(\w+)"\)')
"""Files of one group use something that only one of them may load: the machine, a browser."""
SHARED = re.compile(r'scope="module"|^@cache$', re.MULTILINE)
"""A file with such a fixture, or such a function, would compute it once in every worker."""
HOUSE = "tests/house/"
"""These files share the trees of all sources."""
UP = "up"
"""The group of tests that start a whole service."""
WAIT = (*STARTS_PROGRAMS, "tests/gateway/", "tests/runtime/measuring/")
"""They wait for programs that they start, for samples of a meter, for answers."""
WAITING = "waiting"


@cache
def group_of_file(name: str) -> str:
    """The group of a file's tests; empty where each may run in any worker."""
    if name.startswith(HOUSE):
        return HOUSE
    text = (ROOT / name).read_text(encoding="utf-8")
    marked = MARKED.search(text)
    return marked[1] if marked else name if SHARED.search(text) else ""


def group_of(nodeid: str) -> str:
    """What is handed to one worker as a whole: a group, or the test itself."""
    return group_of_file(nodeid.partition("::")[0]) or nodeid


def waits(nodeid: str) -> bool:
    """Whether a test mostly waits."""
    return nodeid.startswith(WAIT) or group_of(nodeid) == UP


def spread(nodeids: Sequence[str]) -> list[int]:
    """An order, as places in ``nodeids``: what computes first, what waits for programs last.

    Of what computes each folder is spread over the whole run, its largest groups first, so that no long group is left
    for the end. What waits is taken from the end (:class:`GroupScheduling`): its largest groups are the last.
    """
    folders: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, nodeid in enumerate(nodeids):
        folders[WAITING if waits(nodeid) else nodeid.split("/")[1]][group_of(nodeid)].append(place)
    waiting = sorted(folders.pop(WAITING, {}).values(), key=len)
    placed: list[tuple[float, list[int]]] = []
    for groups in folders.values():
        before, total = 0, sum(map(len, groups.values()))
        for group in sorted(groups.values(), key=len, reverse=True):
            placed.append((before / total, group))
            before += len(group)
    placed.sort(key=lambda entry: (entry[0], -len(entry[1])))
    return [place for group in (*(group for _, group in placed), *waiting) for place in group]


def computes(worker: str) -> bool:
    """Whether a worker takes what computes first: every other one does, ``gw0`` among them."""
    return int(worker.removeprefix("gw")) % 2 == 0


class GroupScheduling(LoadScopeScheduling):
    """Hands out groups, and tests of none, in the order of the collection (``--no-loadscope-reorder``).

    Half of the workers take them from its end, until both halves meet: while some wait for programs, as many compute.
    Two workers that wait at the same time would leave a core idle, and three that compute make programs late.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """A worker has ended a test. What it has ended as a whole is forgotten: all it holds is counted every time."""
        super().mark_test_complete(node, item_index, duration)
        group, held = group_of(self.registered_collections[node][item_index]), self.assigned_work[node]
        if all(held[group].values()):
            del held[group]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not computes(node.gateway.id):
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)
