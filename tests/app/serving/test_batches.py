"""``max_batch`` of a service: what its replicas are started with, and what is said where that is less."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from joulery.app.profiling.service_profile import obtain_profile, write_profile
from joulery.app.serving.service import batch_remarks, choose, service_setup
from joulery.config import load
from joulery.domain.errors import ConfigError, DataError
from joulery.domain.gpu.layout import Layout
from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.domain.serving.profile import Profile, Timings
from joulery.policies.serving.observation import Observation
from joulery.policies.serving.search.layout_space import cpu_slices
from joulery.runtime.serving.controller import batched, occupied_s
from joulery.runtime.serving.layout_actuator import LayoutActuator
from joulery.ui.reports.profile_text import service_profile_view
from tests.app.serving.test_service import profile, two_cores  # noqa: F401 - a fixture
from tests.runtime.site_files import toy_site

ONE = cpu_slices((1,))[0]
BATCHES = {"    slo:": "    max_batch: 8\n    slo:"}


def with_batches(**sizes: tuple[int, ...]) -> Profile:
    """The profile with batches that take half of a request's time, and half for each of their requests."""
    entries = [
        replace(
            entry,
            batches={
                size: Timings(entry.loaded.service_s * (1 + size) / 2, entry.loaded.cpu_s * (1 + size) / 2)
                for size in sizes.get(entry.variant, (2, 4, 8))
            },
        )
        for entry in profile().entries
    ]
    return replace(profile(), entries=tuple(entries))


def chosen(tmp_path, found: Profile, slo: str = "500 ms", **more: str):
    site = load(toy_site(tmp_path, changed={**BATCHES, "500 ms": slo, **more}))
    config = site.services[0]
    setup = service_setup(site, config, tmp_path)
    return setup, choose(site, config, setup, found)


def record(variant: str, took_s: float, batch: int = 1) -> RequestRecord:
    return RequestRecord("sums", variant, "r", 0.0, 1.0, 1.0 + took_s, Outcome.OK, took_s, took_s, 1, None, batch)


class Engine:
    def replicas(self):
        return ()


def test_replicas_answer_as_many_together_as_the_slo_leaves_time_for(tmp_path):
    """A batch of 8 takes 18 ms of small and 50 ms of large on one core: 30 % of 100 ms are enough for 4 of large."""
    setup, made = chosen(tmp_path, with_batches(), "100 ms")
    assert (made.batches["small", ONE], made.batches["large", ONE]) == (8, 4)
    models = setup.models
    specs = LayoutActuator(
        Engine(), "sums", models, loaded=made.loaded, batches=made.batches, batch_delay_s=0.001
    ).specs(Layout.parse(["small on cpu:1", "large on cpu:1"]))
    assert sorted((spec.variant, spec.batch, spec.max_delay_s) for spec in specs) == [
        ("large", 4, 0.001),
        ("small", 8, 0.001),
    ]
    assert all(spec.warm for spec in specs), "leaner variants stay loaded"
    assert {spec.variant: dict(spec.warm_batches) for spec in specs} == {"large": {"small": 8}, "small": {"large": 4}}
    assert made.predictor.profile.entry("large", ONE).max_batch == 4, "predictions hold to the same"
    (remark,) = batch_remarks(setup, with_batches(), made.predictor.profile)
    words = "sums: a batch takes at most 30 % of the SLO's latency, so fewer are answered together: large 4 on cpu:1"
    assert remark == words


def test_a_batching_layout_carries_more_for_fewer_joules(tmp_path):
    _, one = chosen(tmp_path, profile())
    _, many = chosen(tmp_path, with_batches())
    both = Layout.parse(["large on cpu:1"] * 2)
    assert many.predictor.utilisation_ratio(both, 150.0) < 0.6 * one.predictor.utilisation_ratio(both, 150.0)
    assert many.predictor.predict(both, 150.0).energy_j < 0.9 * one.predictor.predict(both, 150.0).energy_j
    assert many.predictor.predict(both, 250.0).latency_s < 0.5 < one.predictor.predict(both, 250.0).latency_s


def test_a_model_that_takes_no_batches_is_named_and_answers_alone(tmp_path):
    setup, made = chosen(tmp_path, with_batches(large=()))
    assert ("large", ONE) not in made.batches and made.batches["small", ONE] == 8
    (remark,) = batch_remarks(setup, with_batches(large=()), made.predictor.profile)
    assert remark == "sums: large answer one request at a time, for their models take no batches"
    assert batch_remarks(replace(setup, max_batch=1), profile(), profile()) == []


async def test_a_given_profile_without_batches_is_one_clear_error(tmp_path):
    setup, _ = chosen(tmp_path, with_batches())
    write_profile(tmp_path / "p.json", profile())
    with pytest.raises(DataError, match="max_batch is 8"):
        await obtain_profile(setup, given=tmp_path / "p.json", cache=tmp_path, folder=None, meters=None)
    timed = replace(with_batches(), machine={"max_batch": 8})
    write_profile(tmp_path / "p.json", timed)
    obtained = await obtain_profile(setup, given=tmp_path / "p.json", cache=tmp_path, folder=None, meters=None)
    assert obtained.profile.entry("large", ONE).max_batch == 8, "written and read"


def test_a_profile_shows_what_batches_are_worth():
    def shown(found: Profile) -> str:
        console = Console(width=140, record=True, file=io.StringIO())
        for part in service_profile_view(found):
            console.print(part)
        return console.export_text()

    text = shown(with_batches(small=()))
    assert "in batches" in text and "6.19 ms each, up to 8" in text and text.count(" no") == 2
    assert "in batches" not in shown(profile())


def test_the_policy_decides_the_same_again_from_its_log(tmp_path):
    _, made = chosen(tmp_path, with_batches(), "100 ms", **{"    max_batch": "    batch_delay: 2 ms\n    max_batch"})
    policy = made.driven
    again = type(policy).from_dict(policy.as_dict())
    assert again.as_dict() == policy.as_dict() and again.policy.search.predictor.batch_delay_s == 0.002
    seen = Observation(0.0, 200.0, 90.0, 0.02, 50, {"large": 50}, 50.0, None, batched={"large": 2.5})
    assert Observation.from_dict(seen.as_dict()) == seen
    assert again.step(again.initial(), seen).decisions == policy.step(policy.initial(), seen).decisions


def test_a_request_occupies_its_part_of_a_batch():
    pair = [record("v", 1.0, batch=2)] * 2
    assert occupied_s([*pair, record("v", 0.7)]) == {"v": pytest.approx((0.5 + 0.5 + 0.7) / 3)}
    assert batched([*pair, record("v", 0.7)]) == {"v": pytest.approx(3 / 2)} and batched([record("v", 1.0)]) == {}


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("max_batch: 8", "max_batch: 0", "must be at least 1"),
        ("max_batch: 8", "batch_delay: 1 ms", "max_batch allows none"),
        ("max_batch: 8", "max_batch: 8\n    batch_delay: 1 s", "not below the SLO's latency"),
        (
            "policy: {kind: clover, lambda: 10 %, base_intensity: 200 g/kWh}",
            "policy: {kind: split, shares: {small: 100 %}}",
            "one by one",
        ),
    ],
)
def test_batches_that_cannot_be_formed_are_one_clear_error(tmp_path, old, new, fault):
    path = toy_site(tmp_path, changed=BATCHES)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=fault):
        load(path)
