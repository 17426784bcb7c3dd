"""What CI runs once more after a failure, and what it never does."""

import json

import pytest

from tests import once_more

E2E, CONTRACT, UNIT = (
    "tests/e2e/test_up.py::test_a",
    "tests/contract/test_engine.py::test_b",
    "tests/sim/test_c.py::test_c",
)


@pytest.mark.parametrize(
    ("failed", "words"),
    [
        ([], "no test failed"),
        ([E2E, UNIT], "test_c.py::test_c"),
        ([f"{E2E}{k}" for k in range(5)], "5 tests failed"),
        ([E2E, CONTRACT], None),
        (["tests/ui/dashboard/test_page.py::test_it_lives", E2E], None),
        (["tests/gateway/test_tls.py::test_of_a_certificate"], "test_tls.py::test_of"),
    ],
)
def test_only_few_tests_that_start_programs_run_once_more(failed, words):
    found = once_more.judged(failed)
    assert found is None if words is None else found is not None and words in found


@pytest.fixture
def cache(tmp_path):
    """The cache folder of a run."""

    def made(failed=(), skipped=()):
        for at, names in ((once_more.LAST_FAILED, failed), (once_more.NOT_ALLOWED, skipped)):
            if names:
                (tmp_path / at).parent.mkdir(parents=True)
                (tmp_path / at).write_text(json.dumps(dict.fromkeys(names, True)))
        return tmp_path

    return made


@pytest.mark.parametrize(("fails", "code"), [("", 0), (CONTRACT, 1), ("coverage", 1)])
def test_each_must_pass_alone_and_coverage_keep_its_floor(monkeypatch, cache, capsys, fails, code):
    ran = []

    def passes(*command):
        ran.append(command)
        return fails not in command if fails else True

    monkeypatch.setattr(once_more, "passes", passes)
    assert once_more.main(cache([E2E, CONTRACT]), "90") == code
    assert ran[0][0] == "coverage" and (code or [command[-1] for command in ran[1:]] == [CONTRACT, E2E])
    assert capsys.readouterr().out.count("UNSTEADY") == (0 if code else 2)


def test_a_run_without_a_floor_measures_no_coverage(monkeypatch, cache):
    ran = []
    monkeypatch.setattr(once_more, "passes", lambda *command: ran.append(command) or True)
    assert once_more.main(cache([CONTRACT])) == 0
    assert [command[0] for command in ran] == ["pytest"]


def test_a_run_that_failed_without_a_failed_test_is_final(cache):
    assert once_more.main(cache(), "90") == 1


def test_a_skip_that_is_not_allowed_is_final_whatever_failed_beside_it(monkeypatch, cache, capsys):
    monkeypatch.setattr(once_more, "passes", lambda *_: True)
    assert once_more.main(cache([E2E], [f"{UNIT}: no such program"]), "90") == 1
    assert "no such program" in capsys.readouterr().out
