"""``joulery plan --envelope`` as one types it: made once, kept in a file, looked up by a later run; what it refuses."""

import json

import pytest
from click.testing import CliRunner

from joulery.app.planning.envelope import SURE_RATIO, look_up, point_of, site_envelope
from joulery.app.planning.envelope_files import envelope_document, read_envelope
from joulery.config import load
from joulery.domain.errors import ConfigError, DataError, InfeasibleError
from joulery.policies.placement.joint.frontier import LOADS, EnvelopeEffort
from joulery.store.plans import read_plan
from joulery.ui.cli import plan as plan_command
from joulery.ui.reports.plan.envelope_view import envelope_page, sentences
from tests.app.planning.test_joint import site_file

EFFORT = EnvelopeEffort(first=4, loads=6)


def run(*arguments):
    return CliRunner().invoke(plan_command.command, [str(each) for each in arguments], catch_exceptions=True)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("envelope")
    site = site_file(folder, plan=", intensity: 300 g/kWh")
    made = site_envelope(load(str(site)), effort=EFFORT)
    file = folder / "envelope.json"
    file.write_text(json.dumps(envelope_document(made)))
    return site, file, made


def test_a_file_is_read_back_as_it_was(kept):
    _, file, made = kept
    read = read_envelope(file)
    assert envelope_document(read) == envelope_document(made)
    for price, at in ((0.0, 0.3), (12.0, 0.8), (900.0, 1.2)):
        assert read.lookup(price, at)[1] == pytest.approx(made.lookup(price, at)[1], rel=1e-9)


def test_the_document_says_what_is_best_where_and_how_sure_it_is(kept):
    document = json.loads(kept[1].read_text())
    assert document["schema"] == "joulery.plan-envelope/1"
    assert (document["price"]["what"], document["price"]["unit"]) == ("carbon", "USD/kg")
    names = {each["name"] for each in document["plans"]}
    for part in document["frontier"]:
        assert {each["name"] for each in part["plans"]} <= names
        for each in part["plans"]:
            assert each["carbon_g_per_hour"] == pytest.approx(0.3 * each["power_w"])
            assert 0.75 <= each["accuracy_ratio"] <= 1
    assert [part["load"] for part in document["frontier"]] == document["loads"]
    assert 0 <= document["gap_ratio"] < 1


def test_a_later_run_looks_a_plan_up_and_it_is_a_plan(kept, tmp_path):
    site, file, made = kept
    out = tmp_path / "plan.json"
    found = run(site, "--envelope", file, "--at", "0.7,50", "--as-kept", "--json", "--out", out)
    assert found.exit_code == 0, found.output
    document = json.loads(found.output)
    assert document["value"] == pytest.approx(made.lookup(50.0, 0.7)[1])
    read = read_plan(out).plan()
    rates = {"photos": 0.0, "video": 0.0}
    for gpu in read.gpus:
        for each in gpu.instances:
            rates[each.workload] += each.rate_rps
    assert rates == pytest.approx({"photos": 350.0, "video": 70.0})
    assert read.certificate.rates_rps == pytest.approx(rates)
    proven = made.regret(50.0, 0.7).proven_ratio
    assert document["bound"]["value"] == pytest.approx(document["value"] / (1 + proven))
    assert document["bound"]["gap_ratio"] == pytest.approx(proven / (1 + proven))
    said = run(site, "--envelope", file, "--at", "0.7,50", "--as-kept").output
    assert "modelled, not simulated" in said
    assert "above any plan, as far as the plans made for the envelope are the best" in " ".join(said.split())
    assert "V100" not in said or "GPU 1" in said


def test_where_the_envelope_is_coarse_a_look_up_plans_again(kept, tmp_path):
    site, file, made = kept
    at, price = next((load, 50.0) for load in (0.7, 0.3, 0.55, 0.9) if made.regret(50.0, load).known_ratio > SURE_RATIO)
    asked, cost = load(str(site)), made.lookup(price, at)[1]
    again = look_up(asked, file, at, price)
    assert again.saved_ratio is not None
    assert again.plan.certificate.value == pytest.approx(cost * (1 - again.saved_ratio), rel=1e-9)
    assert again.plan.certificate.bound <= again.plan.certificate.value
    assert again.regret.proven_ratio <= made.regret(price, at).proven_ratio * (1 + 1e-9)
    assert again.plan.certificate.rates_rps == pytest.approx({"photos": 500 * at, "video": 100 * at})
    assert look_up(asked, file, at, price, as_kept=True).plan.certificate.value == pytest.approx(cost)
    said = run(site, "--envelope", file, "--at", f"{at},{price}").output
    assert "planned again for this load and price, where the envelope is coarse" in " ".join(said.split())


def test_where_the_envelope_is_sure_nothing_is_planned_again(kept, monkeypatch):
    site, file, made = kept
    load_at, price, _ = made.points[0]
    monkeypatch.setattr("joulery.app.planning.envelope.planned_again", lambda *_: pytest.fail("planned again"))
    assert look_up(load(str(site)), file, load_at, price).saved_ratio is None


def test_the_command_makes_keeps_and_draws_one(tmp_path):
    site, out, page = site_file(tmp_path), tmp_path / "e.json", tmp_path / "e.html"
    found = run(site, "--envelope", "--intensity", "300 g/kWh", "--limit", "1 us", "--out", out, "--html", page)
    assert found.exit_code == 0, found.output
    assert "loads and prices that plans were made for: no plan costs less" in " ".join(found.output.split())
    assert list(read_envelope(out).loads) == list(LOADS), "the limit ends it after the lowest and the highest load"
    assert page.read_text().count("<figure") == 3


def test_a_file_without_points_is_read_by_those_of_its_plans(kept, tmp_path):
    document = json.loads(kept[1].read_text())
    del document["points"]
    older = tmp_path / "older.json"
    older.write_text(json.dumps(document))
    read = read_envelope(older)
    assert read.points == ()
    assert len(read.planned) == len(read.plans)
    assert read.regret(50.0, 0.7).proven_ratio >= kept[2].regret(50.0, 0.7).proven_ratio * (1 - 1e-9)


def test_without_an_intensity_energy_is_priced(tmp_path):
    made = site_envelope(load(str(site_file(tmp_path))), effort=EnvelopeEffort(first=2, loads=2))
    assert made.axis.what == "energy"
    assert made.axis.unit == "USD/kWh"


def test_the_limit_is_of_cpu_time_as_given(tmp_path):
    ticks = iter(range(100))
    made = site_envelope(
        load(str(site_file(tmp_path))),
        limit_s=2.5,
        effort=EnvelopeEffort(first=2, loads=50, error_ratio=-1.0, narrowest_ratio=0.0),
        cpu_s=lambda: float(next(ticks)),
    )
    assert len(made.loads) == 4


def test_words_and_page_say_where_look_ups_may_be_off(kept):
    made = kept[2]
    said = " ".join(sentences(made))
    assert "all figures are modelled" in said
    worst = made.errors()[0]
    assert (f"{worst.from_load:.4g} to {worst.to_load:.4g}" in said) is (worst.error_ratio > 0.005)
    assert "What is best where" in envelope_page(made, "site")


def test_another_site_is_refused_by_what_changed(kept, tmp_path):
    _, file, _ = kept
    other = tmp_path / "site.yaml"
    other.write_text(kept[0].read_text().replace("rate: 100 /s", "rate: 110 /s"))
    with pytest.raises(DataError, match="made for another site: video changed"):
        look_up(load(str(other)), file, 0.5, 1.0)
    other.write_text(kept[0].read_text().replace("price: 3.06 USD/h", "price: 4 USD/h"))
    with pytest.raises(DataError, match="V100 changed"):
        look_up(load(str(other)), file, 0.5, 1.0)
    for more in ("memory: 1 GB", "minimum_replicas: 2", "spot: true"):
        other.write_text(kept[0].read_text().replace("rate: 100 /s", f"rate: 100 /s, {more}"))
        with pytest.raises(DataError, match="video"):
            look_up(load(str(other)), file, 0.5, 1.0)
    for rule in ("margin: 6 %", "margin: 5 %, failure_domain: gpu", "margin: 5 %, balancer: random"):
        other.write_text(kept[0].read_text().replace("margin: 5 %", rule))
        with pytest.raises(DataError, match="the rules of the plan changed"):
            look_up(load(str(other)), file, 0.5, 1.0)


def test_a_load_above_all_of_them_says_the_highest(kept):
    with pytest.raises(InfeasibleError, match=r"loads up to 1\.2"):
        look_up(load(str(kept[0])), kept[1], 1.3, 1.0)


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1,-1", "1,2,3", "nan", "inf", "1,nan"])
def test_a_point_that_cannot_be_meant_is_refused(text):
    with pytest.raises(ConfigError, match="needs a load"):
        point_of(text)


def test_a_point_is_a_load_and_a_price():
    assert point_of("0.8") == (0.8, 0.0)
    assert point_of(" 0.8 , 0.1 ") == (0.8, 0.1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--at", "0.5"), "go with --envelope"),
        (("--limit", "1 min"), "go with --envelope"),
        (("--as-kept",), "go with --envelope"),
        (("--envelope", "--at", "0.5"), "made already"),
        (("--envelope", "--as-kept"), "made already"),
        (("--envelope", "e.json", "--at", "0.5", "--html", "e.html"), "goes with making an envelope"),
        (("--envelope", "e.json", "--at", "0.5", "--limit", "1 min"), "goes with making an envelope"),
        (("--envelope", "--objective", "cost"), "goes with one plan"),
        (("--envelope", "--compare", "knobs"), "goes with one plan"),
        (("--envelope", "--preset", "best"), "goes with preset joint"),
        (("--series", "--envelope"), "goes with one plan"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(tmp_path, flags, said):
    found = run(site_file(tmp_path), *flags)
    assert isinstance(found.exception, ConfigError)
    assert said in str(found.exception)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: "{", "JSON"),
        (lambda text: "[]", "not an envelope"),
        (lambda text: text.replace("plan-envelope/1", "plan-envelope/9"), "not an envelope"),
        (lambda text: text.replace('"loads"', '"burdens"', 1), "lacks or misstates"),
        (lambda text: json.dumps({**json.loads(text), "loads": [-1]}), "lacks or misstates"),
        (lambda text: json.dumps({**json.loads(text), "plans": [{"name": "P1"}]}), "lacks or misstates"),
        (lambda text: json.dumps({**json.loads(text), "points": [{"load": 1, "price": 1}]}), "lacks or misstates"),
        (lambda text: text.replace('"bound": ', '"bound": -', 1), "lacks or misstates"),
    ],
)
def test_a_file_that_is_no_envelope_is_refused(kept, tmp_path, change, said):
    file = tmp_path / "broken.json"
    file.write_text(change(kept[1].read_text()))
    with pytest.raises(DataError, match=said):
        read_envelope(file)
