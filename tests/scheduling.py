"""Which tests share a worker, and the order in which workers get them.

The groups of xdist's own ``--dist loadgroup`` have no effect with pytest 9.2, whose node ids xdist cannot mark.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r'xdist_group\("(\w+)"\)')
"""Files of one group use something that only one of them may load: the machine, a browser."""
SHARED = re.compile(r'scope="module"|^@cache$', re.MULTILINE)
"""A file with such a fixture, or such a function, would compute it once in every worker."""
HOUSE = "tests/house/"
"""These files share the trees of all sources."""


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


def spread(nodeids: Sequence[str]) -> list[int]:
    """An order, as places in ``nodeids``: each folder is spread over the whole run, its largest groups first.

    Tests that wait for programs so run beside those that compute, and no long group is left for the end.
    """
    folders: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, nodeid in enumerate(nodeids):
        folders[nodeid.split("/")[1]][group_of(nodeid)].append(place)
    placed: list[tuple[float, list[int]]] = []
    for groups in folders.values():
        before, total = 0, sum(map(len, groups.values()))
        for group in sorted(groups.values(), key=len, reverse=True):
            placed.append((before / total, group))
            before += len(group)
    placed.sort(key=lambda entry: (entry[0], -len(entry[1])))
    return [place for _, group in placed for place in group]


class GroupScheduling(LoadScopeScheduling):
    """Hands out groups, and tests of none, in the order of the collection (``--no-loadscope-reorder``)."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
