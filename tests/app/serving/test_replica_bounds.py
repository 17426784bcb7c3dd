"""``minimum_replicas`` and ``maximum_replicas``: what a policy may try and run."""

import pytest

from joulery.app.serving.service import choose, consolidation, service_setup
from joulery.config import load
from joulery.domain.errors import ConfigError, InfeasibleError
from tests.app.serving.test_service import profile, two_cores  # noqa: F401 - a fixture
from tests.runtime.site_files import toy_site


def with_bounds(folder, bounds: str, **changed: str):
    return toy_site(folder, changed={"    slo:": f"    {bounds}\n    slo:", **changed})


@pytest.mark.parametrize(
    ("bounds", "sizes"),
    [
        ("minimum_replicas: 1", {1, 2}),
        ("minimum_replicas: 2", {2}),
        ("maximum_replicas: 1", {1}),
        ("maximum_replicas: 2", {1, 2}),
    ],
)
@pytest.mark.parametrize("engine", ["", "engine: {kind: ray}, "])
def test_every_layout_has_as_many_replicas_as_the_site_allows(tmp_path, bounds, sizes, engine):
    site = load(with_bounds(tmp_path, bounds, **{"serving: {": f"serving: {{{engine}"}))
    config = site.services[0]
    setup = service_setup(site, config, tmp_path)
    assert {len(cut) for cut in setup.partitions} == sizes
    assert {len(layout.instances) for layout in setup.candidates} == sizes
    made = choose(site, config, setup, profile())
    assert len(made.base.instances) in sizes
    assert {len(layout.instances) for layout in made.policy.candidates} == sizes


def test_bounds_that_no_partition_keeps_are_one_error_that_names_what_there_is(tmp_path):
    site = load(with_bounds(tmp_path, "minimum_replicas: 3"))
    with pytest.raises(InfeasibleError, match="at least 3 replicas"):
        service_setup(site, site.services[0], tmp_path)


@pytest.mark.parametrize(
    ("bounds", "fault"),
    [
        ("minimum_replicas: 2\n    maximum_replicas: 1", "below minimum_replicas"),
        ("minimum_replicas: 3\n    cpu: {slices: [1, 1]}", "cpu.slices are 2"),
        ("maximum_replicas: 1\n    cpu: {slices: [1, 1]}", "cpu.slices are 2"),
        ("maximum_replicas: 0", "must be at least 1"),
    ],
)
def test_bounds_that_contradict_the_file_are_found_when_it_is_read(tmp_path, bounds, fault):
    with pytest.raises(ConfigError, match=fault):
        load(with_bounds(tmp_path, bounds))


def test_replicas_are_not_parked_below_the_bound(tmp_path):
    parking = {"lambda: 10 %": "lambda: 10 %, consolidate: true"}
    with pytest.raises(ConfigError, match="minimum_replicas keeps them"):
        load(with_bounds(tmp_path, "minimum_replicas: 2", **parking))


@pytest.mark.parametrize(("key", "after_s"), [("", 30.0), (", consolidate_after: 90 s", 90.0)])
def test_demand_is_low_for_as_long_as_the_site_says_before_replicas_are_parked(tmp_path, key, after_s):
    site = load(toy_site(tmp_path, changed={"lambda: 10 %": f"lambda: 10 %, consolidate: true{key}"}))
    config = site.services[0]
    rule = consolidation(site, config, service_setup(site, config, tmp_path))
    assert rule is not None and rule.patience_s == after_s


def test_a_wait_for_a_rule_that_is_off_is_one_error(tmp_path):
    with pytest.raises(ConfigError, match="consolidate_after"):
        load(toy_site(tmp_path, changed={"lambda: 10 %": "lambda: 10 %, consolidate_after: 90 s"}))
