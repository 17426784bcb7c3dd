"""``joulery account``: the contract, the bad inputs, and nothing but answers or one error whatever the file."""

import gzip
import json
import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from joulery.adapters.tracers.files import FORMATS
from joulery.ui.cli import account as verb
from joulery.ui.cli import main
from tests.adapters.tracers.kineto.kineto_file import KinetoFile
from tests.data_folder import data_folder

HEAD = "op,start_ns,dur_ns,device,lane,phase\n"


class Account:
    """Runs the verb on texts and returns what it printed."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys

    def __call__(self, events: str | bytes | Path, power: str | Path, *flags: str) -> dict[str, Any]:
        code = self.code(events, power, *flags)
        printed = self.capsys.readouterr()
        assert code == 0, printed.err
        return json.loads(printed.out)

    def code(self, events: str | bytes | Path, power: str | Path, *flags: str) -> int:
        return main(
            [
                "account",
                "--events",
                self._file("events", events),
                "--power",
                self._file("power", power),
                "--json",
                *flags,
            ]
        )

    def error(self, events: str | bytes | Path, power: str | Path, *flags: str) -> str:
        assert self.code(events, power, *flags) == 2
        printed = self.capsys.readouterr()
        assert printed.out == ""
        return str(json.loads(printed.err)["error"]["message"])

    def _file(self, name: str, content: str | bytes | Path) -> str:
        if isinstance(content, Path):
            return str(content)
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)


@pytest.fixture
def account(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Account:
    return Account(tmp_path, capsys)


POWER = "t_ns,device,power_w\n0,CPU:0,100\n1000000,CPU:0,100\n"


def by_op(answer: dict[str, Any]) -> dict[str, float]:
    return {row["op"]: row["energy_j"] for row in answer["ops"]}


def test_the_contract(account: Account) -> None:
    answer = account(HEAD + "a/mm,0,400000,CPU:0,,forward\nb/mm,200000,400000,CPU:0,,backward\n", POWER)
    device = answer["devices"]["CPU:0"]
    assert device["total_j"] == pytest.approx(0.1)
    assert device["attributed_j"] == pytest.approx(0.06)
    assert device["unattributed_j"] == pytest.approx(0.04)
    assert device["uncovered_s"] == 0
    first, second = sorted(answer["ops"], key=lambda row: row["op"])
    assert {"op", "device", "phase", "energy_j", "runtime_s", "count", "samples"} <= first.keys()
    assert (first["op"], first["device"], first["phase"], first["count"]) == ("a/mm", "CPU:0", "forward", 1)
    assert first["energy_j"] == pytest.approx(0.03) and first["runtime_s"] == 4e-4
    assert second["energy_j"] == pytest.approx(0.03)


@pytest.mark.parametrize("mode", ["event", "set"])
def test_the_golden_cases_through_the_command(account: Account, mode: str) -> None:
    cases = json.loads((data_folder("smaragdine") / "align" / "cases.json").read_text())["cases"]
    for case in cases[:10]:
        t0, t1 = (1000 * t for t in case["window"])
        events = HEAD + "".join(
            f"{e['op']},{1000 * e['start']},{1000 * (e['end'] - e['start'])},CPU:0,,\n" for e in case["events"]
        )
        power = "t_ns,device,power_w\n" + "".join(f"{1000 * t},CPU:0,{w}\n" for t, w in case["power"])
        flags = [
            "--window",
            str(t0),
            str(t1),
            "--multiplicity",
            f"{mode}s" if mode == "event" else mode,
            "--period",
            "1",
        ]
        answer, right = account(events, power, *flags), case["expected"][mode]
        device = answer["devices"]["CPU:0"]
        assert device["total_j"] == pytest.approx(float(Fraction(right["total_J"][0])), rel=1e-9)
        assert device["unattributed_j"] == pytest.approx(float(Fraction(right["unattributed_J"][0])), rel=1e-9)
        assert device["uncovered_s"] == pytest.approx(right["uncovered_us"] / 1e6)
        for op, (value, _) in right["energy_J"].items():
            assert by_op(answer)[op] == pytest.approx(float(Fraction(value)), rel=1e-9), case["name"]


def test_every_golden_trace_is_recognised_and_accounted(account: Account) -> None:
    folder = data_folder("smaragdine")
    names = [
        "tf1_timeline/timeline-0.json.gz",
        "torch_cpu/tiny_bert_train_step.json.gz",
        "kineto_gpu/a100_nccl_data.json.gz",
        "kineto_gpu/a100_alexnet_2stream.json.gz",
        "kineto_gpu/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
        "tf2_jax/jax0.10.2_cpu_grad.xplane.pb.gz",
        "tf2_jax/jax0.10.2_cpu_grad.trace.json.gz",
        "tf2_jax/tf2.21_cpu_train.xplane.pb.gz",
    ]
    from joulery.adapters.tracers.files import read_events

    for name in names:
        begin, end = read_events(folder / name).extent_ns
        device = "GPU:2" if "mi250" in name else "GPU:0" if "a100" in name else "CPU:0"
        power = f"t_ns,device,power_w\n{begin},{device},10\n{end},{device},10\n"
        answer = account(folder / name, power)
        total = answer["devices"][device]["total_j"]
        assert total == pytest.approx((end - begin) * 1e-8, rel=1e-9), name
        parts = math.fsum(row["energy_j"] for row in answer["ops"] if row["device"] == device)
        assert parts + answer["devices"][device]["unattributed_j"] == pytest.approx(total, rel=1e-9), name
        assert parts > 0


def test_names_of_devices_match_whatever_their_case(account: Account) -> None:
    events = HEAD + "a,0,1000000,cuda:0,,\nb,0,1000000,CPU:0,,\n"
    power = "t_ns,device,power_w\n0,gpu:0,50\n1000000,gpu:0,50\n0,cpu:0,10\n1000000,cpu:0,10\n"
    answer = account(events, power)
    assert set(answer["devices"]) == {"gpu:0", "cpu:0"}
    assert by_op(answer) == pytest.approx({"a": 0.05, "b": 0.01})


def test_a_second_socket_is_accounted_by_itself_where_the_trace_names_sockets(account: Account) -> None:
    power = "t_ns,device,power_w\n0,CPU:0,10\n1000000,CPU:0,10\n0,CPU:1,30\n1000000,CPU:1,30\n"
    answer = account(HEAD + "a,0,1000000,CPU:0,,\nb,0,1000000,CPU:1,,\n", power)
    assert by_op(answer) == pytest.approx({"a": 0.01, "b": 0.03})


def test_sockets_go_together_where_the_trace_does_not(account: Account, tmp_path: Path) -> None:
    f = KinetoFile()
    f.op("aten::mm", 0, 1000)
    power = "t_ns,device,power_w\n0,CPU:0,10\n1000000,CPU:0,10\n0,CPU:1,30\n1000000,CPU:1,30\n"
    answer = account(f.write(tmp_path, base=0), power)
    assert answer["devices"]["CPU"]["total_j"] == pytest.approx(0.04)
    assert by_op(answer) == pytest.approx({"<no module>/mm": 0.04})
    assert any("2 sockets are accounted together" in note for note in answer["notes"])


def test_a_device_without_a_meter_is_null_not_zero(account: Account) -> None:
    answer = account(HEAD + "a,0,1000000,GPU:0,,\n", POWER)
    assert answer["devices"]["GPU:0"]["total_j"] is None
    assert answer["devices"]["GPU:0"]["uncovered_s"] == 1e-3
    assert answer["ops"][0]["energy_j"] is None and answer["ops"][0]["runtime_s"] == 1e-3


def test_grams_by_the_same_clock(account: Account) -> None:
    answer = account(HEAD + "a,0,400000,CPU:0,,\nb,200000,400000,CPU:0,,\n", POWER, "--carbon", "360 g/kWh")
    for row in answer["ops"]:
        assert row["carbon_g"] == pytest.approx(row["energy_j"] * 360 / 3.6e6)
    assert answer["devices"]["CPU:0"]["carbon_g"] == pytest.approx(0.1 * 360 / 3.6e6)
    assert account(HEAD + "a,0,4,CPU:0,,\n", POWER)["ops"][0]["carbon_g"] is None


# ---- power of every kind


def test_a_counter_belongs_to_the_interval_that_ended(account: Account) -> None:
    power = "t_ns,device,counter_j\n0,CPU:0,5\n100,CPU:0,6\n200,CPU:0,9\n"
    answer = account(HEAD + "a,0,100,CPU:0,,\nb,100,100,CPU:0,,\n", power)
    assert by_op(answer) == pytest.approx({"a": 1.0, "b": 3.0})


def test_a_counter_that_was_not_renewed_is_no_zero(account: Account) -> None:
    power = "t_ns,device,counter_j\n0,CPU:0,5\n100,CPU:0,5\n200,CPU:0,9\n"
    answer = account(HEAD + "a,0,100,CPU:0,,\nb,100,100,CPU:0,,\n", power)
    assert by_op(answer) == pytest.approx({"a": 2.0, "b": 2.0})


def test_a_counter_wraps_where_the_table_says_so(account: Account) -> None:
    power = "t_ns,device,counter_j,wrap_j\n0,CPU:0,90,100\n100,CPU:0,98,100\n200,CPU:0,6,100\n"
    answer = account(HEAD + "a,100,100,CPU:0,,\n", power)
    assert by_op(answer) == pytest.approx({"a": 8.0})


def test_a_counter_that_was_reset_leaves_a_gap(account: Account) -> None:
    power = "t_ns,device,counter_j\n0,CPU:0,90\n100,CPU:0,98\n200,CPU:0,6\n300,CPU:0,8\n"
    answer = account(HEAD + "a,0,300,CPU:0,,\n", power)
    assert by_op(answer) == pytest.approx({"a": 10.0})
    assert answer["devices"]["CPU:0"]["uncovered_s"] == pytest.approx(1e-7)
    assert any("ran backwards" in note for note in answer["notes"])


def test_an_average_belongs_to_the_window_before_it(account: Account) -> None:
    power = "t_ns,device,power_w,averaging_s\n100,GPU:0,10,1e-7\n200,GPU:0,30,1e-7\n300,GPU:0,30,1e-7\n"
    answer = account(HEAD + "a,50,100,GPU:0,,\n", power, "--window", "50", "250")
    assert by_op(answer) == pytest.approx({"a": 10 * 100e-9})


def test_missing_readings_are_uncovered_not_zero(account: Account) -> None:
    power = "t_ns,device,power_w\n0,CPU:0,10\n100,CPU:0,nan\n200,CPU:0,10\n300,CPU:0,10\n"
    answer = account(HEAD + "a,0,300,CPU:0,,\n", power)
    assert answer["ops"][0]["uncovered_s"] == pytest.approx(1e-7)
    assert answer["ops"][0]["energy_j"] == pytest.approx(10 * 200e-9)


def test_the_last_reading_stands_for_two_periods(account: Account) -> None:
    power = "t_ns,device,power_w\n0,CPU:0,10\n100,CPU:0,10\n"
    answer = account(HEAD + "a,0,1000,CPU:0,,\n", power)
    assert answer["devices"]["CPU:0"]["uncovered_s"] == pytest.approx(700e-9)
    assert by_op(answer)["a"] == pytest.approx(10 * 300e-9)


def test_one_reading_is_not_stretched(account: Account) -> None:
    answer = account(HEAD + "a,0,1000,CPU:0,,\n", "t_ns,device,power_w\n0,CPU:0,10\n")
    assert answer["devices"]["CPU:0"]["uncovered_s"] > 0.99e-6
    stretched = account(HEAD + "a,0,1000,CPU:0,,\n", "t_ns,device,power_w\n0,CPU:0,10\n", "--period", "1")
    assert by_op(stretched)["a"] == pytest.approx(10 * 1e-6)


def test_one_counter_reading_is_all_uncovered(account: Account) -> None:
    answer = account(HEAD + "a,0,1000,CPU:0,,\n", "t_ns,device,counter_j\n500,CPU:0,10\n")
    assert answer["devices"]["CPU:0"]["uncovered_s"] == 1e-6
    assert answer["devices"]["CPU:0"]["total_j"] == 0


def test_unsorted_and_repeated_readings(account: Account) -> None:
    power = "t_ns,device,power_w\n500000,CPU:0,20\n0,CPU:0,10\n500000,CPU:0,30\n1000000,CPU:0,30\n"
    answer = account(HEAD + "a,0,1000000,CPU:0,,\n", power)
    assert by_op(answer) == pytest.approx({"a": 10 * 5e-4 + 30 * 5e-4})


# ---- the window, clocks, damage


def test_events_before_and_after_the_window_are_clipped_or_left_out(account: Account) -> None:
    events = HEAD + "before,0,100,CPU:0,,\nacross,50,200,CPU:0,,\nafter,900,50,CPU:0,,\n"
    answer = account(events, POWER, "--window", "100", "200")
    assert by_op(answer) == pytest.approx({"across": 100 * 100e-9})
    assert "2 events lie outside the window and are not counted" in answer["notes"]


def test_idle_before_the_first_and_after_the_last_event_is_counted(account: Account) -> None:
    answer = account(HEAD + "a,400000,100000,CPU:0,,\n", POWER)
    assert answer["devices"]["CPU:0"]["unattributed_j"] == pytest.approx(0.09)


def test_clocks_that_do_not_meet_are_reported(account: Account, tmp_path: Path) -> None:
    f = KinetoFile()
    f.op("aten::mm", 0, 1000)
    assert "no moment in common" in account.error(f.write(tmp_path, base=10**18), POWER)
    answer = account(f.write(tmp_path, base=10**18), POWER, "--offset", str(10**18))
    assert by_op(answer) == pytest.approx({"<no module>/mm": 0.1})


def test_nothing_ran_and_nothing_was_read(account: Account) -> None:
    assert account(HEAD, POWER)["devices"]["CPU:0"]["unattributed_j"] == pytest.approx(0.1)
    assert "no reading" in account.error(HEAD + "a,0,10,CPU:0,,\n", "t_ns,device,power_w\n")


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (b"", "empty"),
        (b"{}", "no trace"),
        (b"[]", "no trace"),
        (b'{"schemaVersion": 1, "traceEvents": [{"ph": "X"', "truncated or damaged"),
        (gzip.compress(b'{"schemaVersion": 1, "traceEvents": [{"a": 1}]}', mtime=0)[:-9], "gzip"),
        (b"hello", "no trace that is known"),
        (b"\x00\x01\x02", "no trace that is known"),
    ],
)
def test_damaged_traces_are_one_clear_error(account: Account, events: bytes, says: str) -> None:
    assert says in account.error(events, POWER)


def test_a_missing_file_and_an_empty_window(account: Account, tmp_path: Path) -> None:
    assert "cannot be read" in account.error(tmp_path / "nowhere", POWER)
    assert "is empty" in account.error(HEAD + "a,0,10,CPU:0,,\n", POWER, "--window", "7", "7")
    assert "is empty" in account.error(HEAD + "a,0,10,CPU:0,,\n", POWER, "--window", "9", "7")


def test_deep_nesting_and_many_at_once_through_the_command(account: Account) -> None:
    depth = 3000
    nested = "".join(f"op{i % 5},{i},{2 * depth - 2 * i},CPU:0,main,\n" for i in range(depth))
    many = "".join(f"op{i % 5},0,1000,CPU:0,,\n" for i in range(10_000))
    for events in (nested, many):
        device = account(HEAD + events, POWER)["devices"]["CPU:0"]
        assert device["attributed_j"] + device["unattributed_j"] == pytest.approx(device["total_j"], rel=1e-9)


def test_layer_1_is_not_layer_10(account: Account) -> None:
    answer = account(HEAD + "layer_1/mm,0,10,CPU:0,,\nlayer_10/mm,10,10,CPU:0,,\n", POWER)
    assert set(by_op(answer)) == {"layer_1/mm", "layer_10/mm"}


# ---- the run it keeps, the text it prints


def test_what_was_accounted_is_kept_as_a_run(account: Account, tmp_path: Path) -> None:
    from joulery.store.run.directory import open_run
    from joulery.store.run.tensors import kept_events, kept_footprint

    events = HEAD + "a/mm,0,400000,CPU:0,,forward\nb/mm,200000,400000,GPU:0,7,backward\n"
    answer = account(events, POWER, "--out", str(tmp_path / "run"))
    run = open_run(tmp_path / "run")
    kept = kept_footprint(run)
    assert {op: e for op, e in zip(kept.op, kept.energy_j.tolist(), strict=True) if op == "a/mm"} == {
        "a/mm": by_op(answer)["a/mm"]
    }
    assert math.isnan(kept.energy_j[kept.op.index("b/mm")])
    assert [device.device for device in kept.devices] == ["CPU:0", "GPU:0"]
    trace = kept_events(run)
    assert {trace.ops[op] for op in trace.op} == {"a/mm", "b/mm"} and sorted(trace.dur_ns.tolist()) == [400000] * 2
    assert main(["account", "--events", "x", "--power", "y", "--out", str(tmp_path / "run")]) == 2
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0


def test_the_text_names_devices_operations_and_the_resolution(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    account.code(HEAD + "net/layer_0/mm,0,400000,CPU:0,,forward\n", POWER)
    capsys.readouterr()
    flags = ["account", "--events", str(account.folder / "events"), "--power", str(account.folder / "power")]
    assert main(flags) == 0
    text = capsys.readouterr().out
    assert "net/layer_0/mm" in text and "CPU:0" in text and "time-share" in text
    assert "shorter than the sensor resolves" in text


def test_the_formats_of_the_flag_are_those_of_the_readers() -> None:
    assert verb.FORMATS == FORMATS


def test_a_form_can_be_forced(account: Account, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text('{"traceEvents": []}')
    assert "JSON, but no trace" in account.error(path, POWER)
    assert account(path, POWER, "--format", "kineto")["ops"] == []


def test_it_is_a_command(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text(HEAD + "a,0,10,CPU:0,,\n")
    (tmp_path / "p.csv").write_text(POWER)
    done = subprocess.run(
        [sys.executable, "-m", "joulery", "account", "--events", "e.csv", "--power", "p.csv", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and json.loads(done.stdout)["ops"][0]["op"] == "a"


# ---- whatever the bytes


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_trace_gives_an_answer_or_one_error(account: Account, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["kineto", "csv", "tf1"]))
    f = KinetoFile()
    f.module("net", 0, 100)
    f.op("aten::mm", 10, 20, seq=1)
    f.node("MmBackward0", 50, 20, seq=1)
    f.launch("cudaLaunchKernel", 20, 1, 5)
    f.kernel("k", 30, 10, 5)
    texts = {
        "kineto": json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": 5, "traceEvents": f.events}),
        "csv": HEAD + "a,0,10,CPU:0,1,forward\nb,5,2,CPU:0,1,\n",
        "tf1": json.dumps(
            {
                "traceEvents": [
                    {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "/job:x/device:CPU:0 Compute"}},
                    {"ph": "X", "name": "M", "pid": 1, "tid": 0, "ts": 5, "dur": 3, "args": {"name": "a/b", "op": "M"}},
                ]
            }
        ),
    }
    content = bytearray(texts[kind].encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.sampled_from([b"", b"9", b"-", b"e", b"null", b"}", b"]", b'"', b",", b"\xff", b"1e999", b"[[", b"0"])
        )
    code = account.code(bytes(content), "t_ns,device,power_w\n0,CPU:0,5\n50000,CPU:0,5\n0,GPU:0,5\n50000,GPU:0,5\n")
    printed = account.capsys.readouterr()
    assert code in (0, 2), printed.err
    if code == 0:
        for device in json.loads(printed.out)["devices"].values():
            if device["total_j"] is not None:
                parts = device["attributed_j"] + device["unattributed_j"]
                assert math.isclose(parts, device["total_j"], rel_tol=1e-9, abs_tol=1e-15)
    else:
        assert printed.err.strip()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=120))
def test_any_bytes_give_an_answer_or_one_error(account: Account, content: bytes) -> None:
    assert account.code(content, POWER) in (0, 2)
    assert account.code(HEAD + "a,0,10,CPU:0,,\n", content.decode("latin-1")) in (0, 2)
    account.capsys.readouterr()
