"""Processes side by side as one run: later ones join, and nothing from before they joined counts."""

from joulery.runtime.measuring.joined_trees import JoinedTrees


class Tree:
    def __init__(self, root):
        self.root, self.busy_s, self.searched, self.closed = root, (10.0 * root, 0.0), 0, 0

    def discover(self):
        self.searched += 1

    def pids(self):
        return frozenset({self.root, 10 * self.root})

    def read(self):
        return self.busy_s

    def close(self):
        self.closed += 1


def test_later_processes_join_and_the_sum_never_falls():
    trees, roots = {}, {1}

    def open_tree(root):
        trees[root] = Tree(root)
        return trees[root]

    joined = JoinedTrees(lambda: roots, open_tree)
    assert joined.read() == (0.0, 0.0)
    trees[1].busy_s = (12.0, 1.0)
    assert joined.read() == (2.0, 1.0)
    roots.add(2)
    assert joined.pids() == {1, 10}
    joined.discover()
    assert joined.pids() == {1, 10, 2, 20}
    assert joined.read() == (2.0, 1.0)
    trees[2].busy_s = (20.5, 0.25)
    assert joined.read() == (2.5, 1.25)
    roots.clear()  # a process that ended has still used what it used
    joined.discover()
    assert joined.read() == (2.5, 1.25)
    assert trees[1].searched == 2
    joined.close()
    assert trees[1].closed == trees[2].closed == 1
