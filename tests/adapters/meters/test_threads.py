"""CPU times of threads from a kernel's files."""

from pathlib import Path

from joulery.adapters.meters.threads import ThreadTable


def thread(proc: Path, pid: int, tid: int, text: str) -> Path:
    file = proc / str(pid) / "task" / str(tid) / "schedstat"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_time_on_a_cpu_and_time_ready_for_one(tmp_path: Path) -> None:
    thread(tmp_path, 7, 7, "2500000000 500000000 12\n")
    other = thread(tmp_path, 7, 9, "1000000 0 1\n")
    table = ThreadTable(tmp_path)
    assert sorted(table.read([7])) == [(7, 7, 2.5, 0.5), (7, 9, 0.001, 0.0)]
    other.write_text("")  # a kernel without these statistics
    assert table.read([7, 8]) == [(7, 7, 2.5, 0.5)]
    table.close()
