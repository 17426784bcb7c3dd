"""Requests recorded on disk: nothing of them is lost, and memory does not grow with their number."""

import math
import resource

import numpy as np
import pytest

from joulery.domain.errors import CapabilityError
from joulery.domain.serving.engine import Outcome, RequestRecord
from joulery.runtime.results import summary
from joulery.runtime.results.finish import write_requests
from joulery.runtime.results.summary import compared, summarise_run
from joulery.runtime.session import requests as module
from joulery.runtime.session.requests import OUTCOMES, RequestColumns, RequestRecorder
from joulery.store.run.directory import create_run, open_run
from tests.runtime.results.test_summary import cost, record, served


def one(k: int, service: str = "sums", outcome: Outcome = Outcome.OK) -> RequestRecord:
    start_s = math.nan if outcome is Outcome.OVERLOADED else k + 0.25
    return RequestRecord(
        service, f"v{k % 3}", "r0", float(k), start_s, k + 0.5, outcome, 0.125, 0.0625, 1 + k % 2, None
    )


def test_what_is_recorded_is_read_back(tmp_path) -> None:
    records = [one(k, "sums" if k % 2 else "more", OUTCOMES[k % len(OUTCOMES)]) for k in range(40)]
    recorder = RequestRecorder(tmp_path / "r.rows")
    for each in records:
        recorder.add(each)
    columns = recorder.columns()
    assert recorder.count == len(columns) == 40
    assert columns.rows.tobytes() == RequestColumns.of(records).rows.tobytes()
    (mine,) = columns.blocks("more")
    assert mine["arrival_s"].tolist() == [each.arrival_s for each in records if each.service == "more"]
    assert list(columns.blocks("nothing")) == []
    recorder.remove()
    assert not (tmp_path / "r.rows").exists()


def test_only_what_is_not_flushed_is_in_memory(tmp_path) -> None:
    recorder = RequestRecorder(tmp_path / "r.rows")
    for start in range(0, 5000, 100):
        for k in range(start, start + 100):
            recorder.add(one(k))
        recorder.flush()
        assert len(recorder._buffer) == 0
    assert (tmp_path / "r.rows").stat().st_size == 5000 * module.ROW.itemsize == 5000 * 48


def test_a_disk_that_refuses_fails_no_request_and_loses_none(tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    recorder = RequestRecorder(folder / "r.rows")
    (folder / "r.rows").unlink()
    folder.rmdir()
    recorder.add(one(1))
    with pytest.raises(CapabilityError):
        recorder.flush()
    folder.mkdir()
    recorder.add(one(2))
    assert recorder.columns().rows["arrival_s"].tolist() == [1.0, 2.0]


def test_a_disk_that_takes_a_part_refuses_and_loses_no_row(tmp_path) -> None:
    """Rows were called stored that it had not taken: of a controller that was killed then they were lost."""
    recorder = RequestRecorder(tmp_path / "r.rows")
    for k in range(4):
        recorder.add(one(k))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * module.ROW.itemsize + 7, limits[1]))
    try:
        with pytest.raises(CapabilityError):
            recorder.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "r.rows").stat().st_size == 2 * module.ROW.itemsize
    assert recorder.columns().rows["arrival_s"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_series_is_written_block_by_block(tmp_path, monkeypatch) -> None:
    records = [one(k, outcome=OUTCOMES[k % 2]) for k in range(25)]
    for name, rows in (("whole", 100), ("blocks", 4)):
        monkeypatch.setattr(module, "BLOCK_ROWS", rows)
        with create_run(tmp_path / name, kind="up") as writer:
            write_requests(writer, RequestColumns.of(records))
    whole, blocks = (open_run(tmp_path / name).series("requests") for name in ("whole", "blocks"))
    assert whole.keys() == blocks.keys()
    for name, values in whole.items():
        assert np.array_equal(values, blocks[name], equal_nan=values.dtype.kind == "f"), name
    assert whole["outcome"].tolist() == [each.outcome.value for each in records]
    assert whole["variant"].tolist() == [each.variant for each in records]


def test_a_run_without_requests_has_an_empty_series(tmp_path) -> None:
    recorder = RequestRecorder(tmp_path / "r.rows")
    with create_run(tmp_path / "run", kind="up") as writer:
        write_requests(writer, recorder.columns())
    assert len(open_run(tmp_path / "run").series("requests")["arrival_s"]) == 0


def test_figures_do_not_depend_on_the_size_of_blocks(monkeypatch) -> None:
    run = served()
    whole = summarise_run([run], cost(), [compared(run)])
    monkeypatch.setattr(module, "BLOCK_ROWS", 7)
    again = served()
    blocks = summarise_run([again], cost(), [compared(again)])
    assert blocks.keys() == whole.keys()
    for name in ("requests", "failed", "p95_s", "p50_s", "attainment_ratio", "variants", "saving_ratio"):
        assert blocks[name] == whole[name], name
    assert blocks["requests_g"] == pytest.approx(whole["requests_g"], rel=1e-12)


def test_of_very_many_requests_stretches_are_compared_and_all_are_counted(monkeypatch) -> None:
    records = [record(k, "large" if k < 1000 else "small") for k in range(2000)]
    options = {"layouts": [(99.0, served().layouts[0][1]), (199.95, served().layouts[1][1])], "carbon": None}
    everything = served(records, **options)
    exact = summarise_run([everything], cost(), [compared(everything)])
    monkeypatch.setattr(summary, "MOST_COMPARED", 500)
    monkeypatch.setattr(summary, "_STRETCH", 50)
    some = served(records, **options)
    assert len(some.answered) == 500 and some.compared_share == 0.25
    rough = summarise_run([some], cost(), [compared(some)])
    for name in ("requests", "p95_s", "attainment_ratio", "requests_j", "variants"):
        assert rough[name] == exact[name], name
    assert rough["saving_ratio"] == pytest.approx(exact["saving_ratio"], abs=0.02)
    assert rough["baseline_requests_j"] == pytest.approx(exact["baseline_requests_j"], rel=0.05)
