"""``joulery report`` of traced runs: every grouping adds up, every form can be read by what reads it."""

import csv
import io
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from joulery.accounting.operations.edd import Node
from joulery.accounting.operations.rows import BY as ROWS_BY
from joulery.ui.cli import main, report_anatomy
from joulery.ui.cli.report import BY
from joulery.ui.reports.anatomy.edd import HEATS, edd_svg
from tests.ui.reports.anatomy.traced_runs import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("traced"), "one")


@pytest.fixture
def report(run: Path, capsysbinary: pytest.CaptureFixture[bytes]):
    def call(*flags: str, code: int = 0) -> bytes:
        capsysbinary.readouterr()
        assert main(["report", str(run), *flags]) == code
        printed = capsysbinary.readouterr()
        return printed.out if code == 0 else printed.err

    return call


@pytest.mark.parametrize("by", report_anatomy.BY)
def test_every_grouping_keeps_every_joule(report, by: str) -> None:
    whole = json.loads(report("--by", "op", "--json"))
    rows = json.loads(report("--by", by, "--json"))
    total = sum(row["energy_j"] for row in rows["ops"])
    assert total == pytest.approx(whole["devices"]["CPU:0"]["attributed_j"], rel=1e-9)
    assert rows["devices"] == whole["devices"]


def test_groupings_say_what_they_group(report) -> None:
    names = {by: {row["op"] for row in json.loads(report("--by", by, "--json"))["ops"]} for by in report_anatomy.BY}
    assert names["phase"] == {"forward", "backward", "optimizer"}
    assert {"net/layer_0", "net/layer_1", "net/embed", "SGD.step"} <= names["layer"]
    assert {"net/layer_0/attention", "net/head"} <= names["module"]
    assert "net/layer_1/ffn/mm" in names["op"]
    folded = {row["op"] for row in json.loads(report("--by", "op", "--fold", "--json"))["ops"]}
    assert "net/transformer/ffn/mm" in folded and not any("layer_" in name for name in folded)
    mine = {row["op"] for row in json.loads(report("--pattern", r"layer_(\d)=stage", "--json"))["ops"]}
    assert "net/stage/ffn/mm" in mine
    shallow = {row["op"] for row in json.loads(report("--depth", "1", "--json"))["ops"]}
    assert shallow == {"net", "SGD.step"}


def test_one_phase_or_device_alone(report) -> None:
    rows = json.loads(report("--phase", "backward", "--json"))["ops"]
    assert {row["phase"] for row in rows} == {"backward"}
    assert json.loads(report("--device", "CPU:0", "--json"))["ops"]
    assert b"no operation of that phase" in report("--phase", "sideways", code=2)


def test_the_text_has_the_top_rows(report) -> None:
    text = report("--by", "op", "--top", "3").decode()
    assert len(re.findall(r" forward | backward | optimizer ", text)) == 3
    assert re.search(r"\d+ more", text) and "CPU:0" in text and "W shared" in text


def test_csv_and_parquet_hold_the_same_rows(report, tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(report("--by", "op", "--format", "csv").decode())))
    table = pq.read_table(io.BytesIO(report("--by", "op", "--format", "parquet"))).to_pylist()
    assert [row["op"] for row in rows] == [row["op"] for row in table]
    assert float(rows[0]["energy_j"]) == table[0]["energy_j"] > 0
    assert rows[0]["carbon_g"] == "" and table[0]["carbon_g"] is None


def test_folded_stacks_and_speedscope_weigh_joules(report) -> None:
    total = json.loads(report("--by", "op", "--json"))["devices"]["CPU:0"]["attributed_j"]
    lines = [line.rsplit(" ", 1) for line in report("--format", "folded").decode().splitlines()]
    assert sum(float(weight) for _, weight in lines) == pytest.approx(total, abs=1e-6)
    assert any(stack == "CPU:0;forward;net;layer_0;ffn;mm" for stack, _ in lines)
    scope = json.loads(report("--format", "speedscope"))
    (profile,) = scope["profiles"]
    assert profile["endValue"] == pytest.approx(total, rel=1e-9) and sum(profile["weights"]) == pytest.approx(total)
    frames = [frame["name"] for frame in scope["shared"]["frames"]]
    assert next(frames[i] for i in profile["samples"][0]) in ("forward", "backward", "optimizer")


def test_perfetto_has_every_event_and_a_counter_of_watts(report) -> None:
    events = json.loads(report("--format", "perfetto"))["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == 20 * 25
    counters = [e for e in events if e["ph"] == "C"]
    assert len(counters) > 100 and all(40 <= e["args"]["W"] <= 90 for e in counters[:-1])
    first = min((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"])
    assert first["ts"] == 0 and first["args"]["op"] == "net/embed"


def test_the_diagram_is_a_picture_by_itself(report) -> None:
    picture = ET.fromstring(report("--by", "op", "--format", "svg", "--phase", "forward"))
    texts = ["".join(node.itertext()) for node in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert any(text.startswith("net ") for text in texts) and any(text.startswith("layer_1") for text in texts)
    arrows = list(picture.iter("{http://www.w3.org/2000/svg}line"))
    assert len(arrows) >= 3
    boxes = {
        "".join(group.find("{http://www.w3.org/2000/svg}title").itertext()).split(":")[0]: group.find(
            "{http://www.w3.org/2000/svg}rect"
        )
        for group in picture.iter("{http://www.w3.org/2000/svg}g")
    }
    outer, inner = boxes["forward/net"], boxes["forward/net/layer_0"]
    assert float(inner.get("x")) >= float(outer.get("x"))
    assert float(inner.get("x")) + float(inner.get("width")) <= float(outer.get("x")) + float(outer.get("width"))


def test_the_diagram_has_a_scale_from_a_ten_thousandth_to_all_of_it() -> None:
    leaves = [Node.over("a", ()), Node.over("b", ())]
    drawn = str(edd_svg(replace(Node.over("all", leaves), energy_j=2.0)))
    assert drawn.count("of all</title>") >= HEATS
    assert "0.01 % = 200 µJ" in drawn and "100 % = 2.00 J" in drawn


def test_a_run_that_was_not_traced_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from joulery.domain.energy.footprint import Footprint
    from joulery.store.run.directory import create_run
    from joulery.store.run.footprints import footprint_to_dict

    with create_run(tmp_path / "plain", kind="measure") as writer:
        writer.write_report(footprint_to_dict(Footprint()))
    assert main(["report", str(tmp_path / "plain"), "--by", "op"]) == 2
    assert "was not traced" in capsys.readouterr().err


def test_two_runs_are_added_up(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_run(tmp_path, "two", seed=1)
    capsys.readouterr()
    sums = []
    for runs in ([run], [other], [run, other]):
        assert main(["report", *map(str, runs), "--by", "phase", "--json"]) == 0
        sums.append(json.loads(capsys.readouterr().out)["devices"]["CPU:0"]["attributed_j"])
    assert sums[2] == pytest.approx(sums[0] + sums[1])
    assert main(["report", str(run), str(run), "--by", "op"]) == 2
    assert "named twice" in capsys.readouterr().err
    assert main(["report", str(run), str(other), "--format", "perfetto"]) == 2


def test_groupings_of_the_flag_are_those_of_the_accounting() -> None:
    assert report_anatomy.BY == ROWS_BY and not set(report_anatomy.BY) & set(BY)


def test_the_page_can_be_clicked_into(run: Path, tmp_path: Path, browser) -> None:
    page = tmp_path / "anatomy.html"
    assert main(["report", str(run), "--by", "op", "--fold", "--html", str(page)]) == 0
    browser.open(page.as_uri())
    browser.wait("document.querySelectorAll('svg.icicle g').length > 5")
    assert browser.evaluate("document.querySelector('[data-shown]').dataset.shown") == "all"
    browser.evaluate(
        "[...document.querySelectorAll('svg.icicle g')].find(g => g.getAttribute('aria-label').startsWith('backward'))"
        ".dispatchEvent(new MouseEvent('click'))"
    )
    assert browser.evaluate("document.querySelector('[data-shown]').dataset.shown") == "all/backward"
    browser.evaluate("document.querySelector('.crumbs button').click()")
    assert browser.evaluate("document.querySelector('[data-shown]').dataset.shown") == "all"
    for kind in ("svg.edd", "svg.bars", "svg.spans"):
        assert browser.evaluate(f"document.querySelectorAll('{kind}').length") >= 1
    assert browser.complaints() == [] and "Energy dependency diagram" in browser.text("main")
