"""The jobs of this machine on disk."""

import threading
from pathlib import Path

import pytest

from joulery.domain.errors import CapabilityError, DataError
from joulery.store.jobs import JobBook


def test_jobs_are_numbered_in_order_and_facts_come_and_go(tmp_path: Path) -> None:
    book = JobBook(tmp_path)

    assert book.ids() == ()
    assert [book.add({"name": "a"}), book.add({"name": "b"})] == [1, 2]
    assert book.ids() == (1, 2)
    assert book.read(2, "job") == {"name": "b", "id": 2}
    assert book.read(2, "run") is None
    book.write(2, "run", {"pid": 5})
    assert book.read(2, "run") == {"pid": 5}
    book.remove(2, "run")
    book.remove(2, "run")
    assert book.read(2, "run") is None


def test_a_submitter_killed_half_way_leaves_no_job(tmp_path: Path) -> None:
    book = JobBook(tmp_path)
    book.add({"name": "a"})
    (tmp_path / "jobs" / "000002").mkdir()

    assert book.ids() == (1,)
    assert book.add({"name": "c"}) == 3


def test_many_submitters_get_a_number_each(tmp_path: Path) -> None:
    numbers: list[int] = []
    threads = [threading.Thread(target=lambda: numbers.append(JobBook(tmp_path).add({"name": "x"}))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(numbers) == list(range(1, 17))


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_document_is_named(tmp_path: Path, content: str) -> None:
    book = JobBook(tmp_path)
    number = book.add({"name": "a"})
    (book.folder(number) / "run.json").write_text(content)

    with pytest.raises(DataError, match=r"run\.json"):
        book.read(number, "run")


def test_only_the_owner_may_read_what_was_submitted(tmp_path: Path) -> None:
    book = JobBook(tmp_path)

    assert book.folder(book.add({"environment": {"TOKEN": "x"}})).stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")

    with pytest.raises(CapabilityError, match="cannot write"):
        JobBook(tmp_path / "state").add({"name": "a"})
