"""Preset joint on measured slices: the command as one types it, its JSON contract, and input that cannot be meant."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from joulery.app.planning.joint import joint_request, plan_joint_site
from joulery.app.planning.measurements import read_slice_table
from joulery.app.planning.plans import plan_site
from joulery.config import load
from joulery.domain.errors import ConfigError, DataError, InfeasibleError, JouleryError
from joulery.domain.gpu.mig import A100_80GB
from joulery.policies.placement.joint.planner import plan_joint
from joulery.store.plan_documents import document_of
from joulery.store.plans import read_plan
from joulery.ui.cli import plan as plan_command
from tests.data_folder import data_folder

ROOT = Path(__file__).resolve().parents[3]
HEADER = "model,slice,batch,n_processes_mps,throughput_items_per_s_per_process,latency_s"
SITE = """
joulery: 1
name: slices
fleet:
  gpus:
    - {name: NAME, measurements: TABLE, price: 4.1 USD/h, clocks: 2GPU}
plan: {preset: joint, margin: 5 %PLAN}
services:
  - {name: photos, variants: [{model: large, accuracy: 78 %}, {model: small, accuracy: 75 %}],
     minimum_accuracy: FLOOR %, rate: 300 /s, slo: {latency: 60 ms, quantile: 99 %}}
  - {name: video, model: other, rate: 150 /s, slo: {latency: 90 ms, quantile: 99 %}}
"""
POWER = ", idle: 60 W, busy: 400 W"


def rows():
    """Made-up measurements: launches bound small batches, kernels large ones."""
    found = []
    for model, launch_s, kernel_s in (("large", 9e-3, 8e-3), ("small", 4e-3, 3e-3), ("other", 5e-3, 5e-3)):
        for compute in (1, 2, 3, 4, 7):
            for processes in (1, 2):
                for batch in (1, 2, 4, 8, 16, 32):
                    time_s = max(launch_s, processes * batch * kernel_s * (1 + 0.02 * compute) / compute)
                    found.append([model, f"{compute}g", batch, processes, f"{batch / time_s:.4f}", f"{time_s:.3f}"])
    return [[str(cell) for cell in row] for row in found]


def table(folder, some=None, header=HEADER):
    file = folder / "slices.csv"
    file.write_text("\n".join([header, *(",".join(row) for row in (rows() if some is None else some))]) + "\n")
    return file


def site_file(folder, gpu=POWER, plan="", floor="77.5", name="A100-80GB", where="slices.csv"):
    file = folder / "site.yaml"
    text = SITE.replace("GPU}", gpu + "}").replace("PLAN", plan).replace("FLOOR", floor)
    file.write_text(text.replace("NAME", name).replace("TABLE", where))
    return file


def run(*arguments):
    return CliRunner().invoke(plan_command.command, [str(each) for each in arguments], catch_exceptions=True)


@pytest.mark.slow
def test_the_json_keeps_its_contract(tmp_path):
    table(tmp_path)
    found = run(site_file(tmp_path), "--json", "--intensity", "300 g/kWh")
    assert found.exit_code == 0
    plan = json.loads(found.output)
    assert (plan["schema"], plan["kind"], plan["policy"], plan["quality"]) == (
        *("joulery.plan/1", "shares", "joint"),
        "assumed",
    )
    assert 0 < plan["bound"]["relaxed_value"] <= plan["bound"]["value"] <= plan["power_w"] * (1 + 1e-9)
    assert plan["bound"]["gap_ratio"] <= 0.01
    assert plan["carbon_g_per_hour"] == pytest.approx(0.3 * plan["power_w"])
    assert plan["simulation"]["violations"] == []
    assert plan["simulation"]["power_w"] == pytest.approx(plan["power_w"], rel=0.03)
    served, right = 0.0, 0.0
    for gpu in plan["gpus"]:
        assert gpu["mode"] in ("mig", "mps", "whole")
        for each in gpu["instances"]:
            assert each["slice"] in {profile.name for profile in A100_80GB.profiles}
            assert each["processes"] in (1, 2)
            assert each["mode"] == gpu["mode"]
            assert each["clock_mhz"] == gpu["clock_mhz"]
            assert each["latency_parts_s"] is None
            if each["workload"] == "photos":
                served += each["rate_rps"]
                right += each["rate_rps"] * each["accuracy_ratio"]
    assert served == pytest.approx(300)
    assert right / served >= 0.775 - 1e-9
    prices = plan["certificate"]
    proven = sum(prices["demand_price"][name] * rate for name, rate in prices["rates_rps"].items())
    assert proven == pytest.approx(plan["bound"]["relaxed_value"])
    assert {len(cut["slices"]) for cut in prices["cuts"]} == {1, 2, 3, 4, 5, 6, 7}


def test_a_plan_file_is_read_back_as_it_was(tmp_path):
    table(tmp_path)
    made = plan_site(load(str(site_file(tmp_path, plan=", judge: false"))))
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(made.document()))
    read = read_plan(file).plan()
    assert document_of(read) == document_of(made.plan)
    assert [each.slice for gpu in read.gpus for each in gpu.instances]


@pytest.mark.slow
def test_the_text_says_slices_the_simulation_and_what_proves_the_bound(tmp_path):
    table(tmp_path)
    found = run(site_file(tmp_path), "--explain", "--compare", "knobs", "--lock", "clock,batch")
    assert found.exit_code == 0
    for words in ("g.", "no plan has less than", "branch and bound", "three numbers a curve of slices.csv"):
        assert words in found.output
    for name in ("dedicated GPUs", "only variants chosen", "only shares chosen", "one after the other"):
        assert name in found.output


def test_latencies_stand_in_for_throughputs_and_one_process_is_the_default(tmp_path):
    some = [[row[0], row[1], row[2], row[5]] for row in rows() if row[3] == "1"]
    read = read_slice_table(table(tmp_path, some, "model,slice,batch,latency_s"), A100_80GB)
    assert read.models == ("large", "other", "small")
    (curve,) = read.of("small", "7g")
    assert (curve.processes, curve.batches[-1], curve.times_s[0]) == (1, 32, 0.004)


def test_a_path_may_name_an_environment_variable(tmp_path, monkeypatch):
    table(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("TABLES", str(tmp_path))
    file = site_file(tmp_path / "elsewhere", where="'${TABLES:-nowhere}/slices.csv'")
    assert load(str(file)).fleet.gpus[0].measurements == tmp_path / "slices.csv"
    monkeypatch.delenv("TABLES")
    with pytest.raises(ConfigError, match="no such file"):
        load(str(file))
    file.write_text(file.read_text().replace(":-nowhere", ""))
    with pytest.raises(ConfigError, match="environment variable TABLES is not set"):
        load(str(file))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (["large", "5g", "1", "1", "100", "0.01"], "no slice '5g'"),
        (["large", "1g.5gb", "1", "1", "100", "0.01"], "no slice '1g.5gb'"),
        (["large", "1g", "1", "1", "nan", "0.01"], "expected a number above 0"),
        (["large", "1g", "1", "1", "-3", "0.01"], "expected a number above 0"),
        (["large", "1g", "1", "1", "0", "0.01"], "expected a number above 0"),
        (["large", "1g", "1", "1", "", "0.01"], "expected a number above 0"),
        (["large", "1g", "1.5", "1", "100", "0.01"], "expected a whole number"),
        (["large", "1g", "1", "0", "100", "0.01"], "expected a number above 0"),
        (["", "1g", "1", "1", "100", "0.01"], "no name"),
        (["large", "1g", "1", "1", "100", "0.01"], "are listed twice"),
    ],
)
def test_a_row_that_cannot_be_meant_names_itself(tmp_path, row, said):
    some = [*rows(), row]
    with pytest.raises(DataError) as caught:
        read_slice_table(table(tmp_path, some), A100_80GB)
    assert said in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.row == len(some) + 1


@pytest.mark.parametrize(
    ("some", "said"),
    [
        ([], "no rows"),
        ([["large", "1g", "1", "1", "100", "0.01"]], "of model 'small'"),
        ([*(row for row in rows() if row[0] != "large"), ["large", "1g", "1", "1", "100", "0.01"]], "single"),
    ],
)
def test_an_empty_or_one_point_table_is_refused(tmp_path, some, said):
    table(tmp_path, some)
    with pytest.raises(JouleryError, match=said):
        plan_joint_site(load(str(site_file(tmp_path))))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpu": ""}, "states no power"),
        ({"gpu": ", idle: 60 W"}, "states no power"),
        ({"gpu": ", idle: 400 W, busy: 60 W"}, "more when busy than idle"),
        ({"gpu": ", idle: .nan, busy: 400 W"}, "idle"),
        ({"gpu": ", idle: 60 W, busy: -400 W"}, "busy"),
        ({"name": "V100"}, "has no MIG slices"),
        ({"name": "A100-90GB"}, "did you mean"),
        ({"where": "absent.csv"}, "no such file"),
        ({"floor": "90"}, "no variant is as accurate"),
    ],
)
def test_a_site_that_cannot_be_meant_is_refused(tmp_path, change, said):
    table(tmp_path)
    with pytest.raises(ConfigError) as caught:
        plan_joint_site(load(str(site_file(tmp_path, **change))))
    assert said in f"{caught.value} {caught.value.pointer} {caught.value.hint}"


def test_a_floor_needs_the_quality_of_every_variant(tmp_path):
    table(tmp_path)
    file = site_file(tmp_path)
    file.write_text(file.read_text().replace("{model: small, accuracy: 75 %}", "{model: small}"))
    with pytest.raises(ConfigError, match="accuracy"):
        load(str(file))


def test_a_fleet_that_is_too_small_exits_with_3(tmp_path):
    table(tmp_path)
    with pytest.raises(InfeasibleError) as caught:
        plan_joint_site(load(str(site_file(tmp_path, gpu=f"{POWER}, available: 0", plan=", judge: false"))))
    assert (caught.value.exit_code, caught.value.binding) == (3, "number of GPUs: 0 A100-80GB")


@pytest.mark.slow
def test_the_example_on_the_measured_table_keeps_its_floors_and_proves_its_bound(monkeypatch):
    monkeypatch.setenv("JOULERY_DATA", str(data_folder("clover").parent))
    site = load(str(ROOT / "examples" / "joint-mig.yaml"))
    plan = document_of(plan_joint(joint_request(site)))
    assert plan["power_w"] <= 1290
    assert plan["bound"]["gap_ratio"] <= 0.01
    answers = [each for gpu in plan["gpus"] for each in gpu["instances"]]
    for name, floor in plan["certificate"]["floors_ratio"].items():
        mine = [each for each in answers if each["workload"] == name]
        rate = math.fsum(each["rate_rps"] for each in mine)
        assert math.fsum(each["rate_rps"] * each["accuracy_ratio"] for each in mine) / rate >= floor - 1e-9


def test_the_example_names_what_is_missing_where_the_table_is_not(monkeypatch, tmp_path):
    monkeypatch.setenv("JOULERY_DATA", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        load(str(ROOT / "examples" / "joint-mig.yaml"))
    assert caught.value.exit_code == 2
    assert "no such file" in str(caught.value)
    assert "measurements" in str(caught.value.pointer)


def test_slices_are_not_taken_for_shares(tmp_path):
    table(tmp_path)
    site, file = site_file(tmp_path, plan=", judge: false"), tmp_path / "plan.json"
    with pytest.raises(ConfigError, match="MIG slices"):
        plan_command.command.main([str(site), "--triton", str(tmp_path / "triton")], standalone_mode=False)
    assert run(site, "--out", file).exit_code == 0
    with pytest.raises(DataError, match="MIG slices"):
        read_plan(file).shares()
