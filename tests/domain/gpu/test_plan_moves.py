"""Moves between two plans, counted by hand."""

import pytest

from joulery.domain.gpu.plan_moves import continued, gpu_moves, moves_between, shape_of
from joulery.domain.gpu.provisioning import LatencyParts, PlannedGpu, PlannedInstance


def instance(service, share=0.5, batch=4, replica=0, model="resnet50"):
    parts = LatencyParts(0.0, 0.0, 0.01, 0.0, 0.0)
    return PlannedInstance(service, model, replica, 1, 10.0, share, batch, 0.0, 0.0, parts, 0.02, 100.0, 0.04)


def gpu(*instances, clock_mhz=1200.0, kind="V100"):
    return PlannedGpu(kind, 3.0, clock_mhz, 1530.0, 100.0, 100.0, instances, clock_set_mhz=clock_mhz)


A, B, C = instance("a"), instance("b", 0.3), instance("c", 0.2)


@pytest.mark.parametrize(
    ("old", "new", "started", "stopped", "changed"),
    [
        ((A, B), (A, B), 0, 0, 0),
        ((A, B), (A,), 0, 1, 0),
        ((A,), (A, B), 1, 0, 0),
        ((A, B), (A, C), 1, 1, 0),
        ((A, B), (instance("a", 0.6), instance("b", 0.3, 8)), 0, 0, 2),
        ((A, A), (A, instance("a", 0.4)), 0, 0, 1),
        ((A,), (instance("a", model="alexnet"),), 1, 1, 0),
    ],
)
def test_moves_on_one_gpu(old, new, started, stopped, changed):
    assert gpu_moves([shape_of(e) for e in old], [shape_of(e) for e in new]) == (started, stopped, changed)


def test_gpus_are_paired_so_that_the_fewest_instances_move():
    old = [gpu(A, B), gpu(C)]
    new = [gpu(C, B), gpu(A), gpu(A, kind="T4")]
    found = moves_between(old, new)
    assert found.same_gpu == (1, 0, None)
    assert (found.started, found.stopped, found.changed, found.moves) == (2, 1, 0, 3)
    assert (found.opened, found.closed) == (1, 0)


def test_a_clock_is_no_move():
    found = moves_between([gpu(A, B)], [gpu(A, B, clock_mhz=900.0)])
    assert (found.moves, found.reclocked) == (0, 1)


def test_what_goes_on_keeps_its_place_and_its_number():
    old = [gpu(instance("a", replica=0), B), gpu(instance("a", replica=1), C)]
    new = [gpu(instance("a", 0.9), replica0 := instance("c", 0.2)), gpu(A, B), gpu(instance("a"))]
    ordered = continued(old, new)
    assert [[(e.workload, e.replica) for e in each.instances] for each in ordered] == [
        [("a", 0), ("b", 0)],
        [("a", 1), ("c", 0)],
        [("a", 2)],
    ]
    assert ordered[1].instances[1].share_ratio == replica0.share_ratio


def test_nothing_ran_before():
    found = moves_between([], [gpu(A, B)])
    assert (found.started, found.opened, found.same_gpu) == (2, 1, (None,))
    assert moves_between([gpu(A, B)], []).stopped == 2
