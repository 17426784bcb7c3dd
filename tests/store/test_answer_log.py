"""Prompts and lengths: written as they end, read whatever became of the writer."""

import stat

import pytest

from joulery.domain.errors import CapabilityError, DataError
from joulery.runtime.llm.predictor_training import read_answers
from joulery.store.answer_log import AnswerLog, read_answer_log


def test_what_was_added_is_read_again_and_only_its_owner_may(tmp_path):
    file = tmp_path / "log.jsonl"
    log = AnswerLog(file)
    log.add("m", "línea\nzwei", 7)
    log.add("n", "", 0)
    log.close()
    log.close()
    assert list(read_answer_log(file)) == [("m", "línea\nzwei", 7), ("n", "", 0)]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_line_torn_by_the_end_of_its_writer_is_left_out_and_the_next_begins_anew(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_text('{"model":"m","prompt":"p","out_tokens":1}\n{"model":"m","pro')
    assert len(list(read_answer_log(file))) == 1
    log = AnswerLog(file)
    log.add("m", "q", 2)
    log.close()
    assert [prompt for _, prompt, _ in read_answer_log(file)] == ["p", "q"]


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{}",
        '{"model":"m","prompt":1,"out_tokens":1}',
        '{"model":"m","prompt":"p","out_tokens":-1}',
        '{"model":"m","prompt":"p","out_tokens":true}',
        "{nonsense}",
    ],
)
def test_a_line_that_is_none_is_refused_with_its_number(tmp_path, line):
    file = tmp_path / "log.jsonl"
    file.write_text('{"model":"m","prompt":"p","out_tokens":1}\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        list(read_answer_log(file))
    assert caught.value.row == 2


def test_files_that_cannot_be_are_said(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        list(read_answer_log(tmp_path / "none.jsonl"))
    with pytest.raises(CapabilityError):
        AnswerLog(tmp_path / "no" / "folder.jsonl")


def test_a_predictor_learns_from_it_without_a_file_of_texts(tmp_path):
    file = tmp_path / "log.jsonl"
    log = AnswerLog(file)
    for prompt, tokens in (("a", 10), ("b", 20), ("a", 30)):
        log.add("m", prompt, tokens)
    log.close()
    read = read_answers([file], [])
    assert dict(zip(read.prompts, read.answers.tokens[:, 0].tolist(), strict=True)) == {"a": 20.0, "b": 20.0}
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="no answers"):
        read_answers([tmp_path / "empty.jsonl"], [])
