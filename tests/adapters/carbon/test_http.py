import httpx
import pytest

from joulery.adapters.carbon.http import CarbonService, Patience, RequestRefusedError
from joulery.domain.errors import CapabilityError, DataError
from tests.adapters.carbon.local import Answer, Local, served


def answering(*answers: Answer) -> tuple[list[Answer], object]:
    left = list(answers)
    return left, lambda question: left.pop(0) if len(left) > 1 else left[0]


def ask(local: Local, **extra: object) -> object:
    return local.service("Test", **extra).get("/x", params={"a": "b c"}, headers={"auth-token": "t"})  # type: ignore[arg-type]


def test_a_question_carries_its_parameters_and_headers() -> None:
    with served(lambda question: Answer({"ok": True})) as local:
        assert ask(local) == {"ok": True}
    (question,) = local.questions
    assert (question.path, question.params, question.headers["auth-token"]) == ("/x", {"a": "b c"}, "t")


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_passing_trouble_is_retried_with_growing_waits(status: int) -> None:
    _, script = answering(Answer("", status), Answer("", status), Answer([1]))
    with served(script) as local:  # type: ignore[arg-type]
        assert ask(local) == [1]
    assert local.slept == [0.5, 1.0]


@pytest.mark.parametrize(
    ("status", "headers", "slept"),
    [(500, {}, [0.75, 1.5]), (429, {"retry-after": "7"}, [7.25, 7.5]), (429, {"retry-after": "60"}, [60.25, 60.5])],
)
def test_waits_are_spread_and_never_shorter_than_asked(
    status: int, headers: dict[str, str], slept: list[float]
) -> None:
    _, script = answering(Answer("", status, headers), Answer("", status, headers), Answer([1]))
    with served(script) as local:  # type: ignore[arg-type]
        assert ask(local, spread=0.5) == [1]
    assert local.slept == slept


def test_lasting_trouble_ends_in_one_error() -> None:
    with (
        served(lambda question: Answer({"error": {"message": "out of order"}}, 500)) as local,
        pytest.raises(DataError) as caught,
    ):
        ask(local)
    assert "gave no answer in 3 tries (500: out of order)" in str(caught.value)
    assert "--carbon FILE" in caught.value.hint
    assert (len(local.questions), local.slept) == (3, [0.5, 1.0])


def test_the_wait_a_service_asks_for_is_kept() -> None:
    _, script = answering(Answer("", 429, {"retry-after": "7"}), Answer({}))
    with served(script) as local:  # type: ignore[arg-type]
        ask(local)
    assert local.slept == [7.0]


def test_the_wait_may_be_a_date() -> None:
    _, script = answering(Answer("", 503, {"retry-after": "Tue, 14 Nov 2023 22:13:45 GMT"}), Answer({}))
    with served(script) as local:  # type: ignore[arg-type]
        ask(local, now_s=1_700_000_000.0)
    assert local.slept == [25.0]


@pytest.mark.parametrize("header", ["soon", "-3", "1.5", "Tue, 14 Nov 1999 22:13:45 GMT", "٣"])
def test_a_wait_that_makes_no_sense_is_ignored(header: str) -> None:
    with served(
        lambda question: Answer(
            "", 429 if len(local.questions) == 1 else 200, {"retry-after": header.encode().decode("latin-1")}
        )
    ) as local:
        ask(local)
    assert local.slept == [0.5]


def test_an_exhausted_rate_limit_is_an_error_and_not_a_long_sleep() -> None:
    spent = Answer({"message": "slow down"}, 429, {"retry-after": "3600"})
    with served(lambda question: spent) as local, pytest.raises(DataError, match="asks to wait 3600 s") as caught:
        ask(local)
    assert "(429: slow down)" in caught.value.message
    assert "rate limit" in caught.value.hint
    assert local.slept == []


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_about_credentials(status: int) -> None:
    invalid = Answer({"error": "Invalid auth-token"}, status)
    with served(lambda question: invalid) as local, pytest.raises(RequestRefusedError) as caught:
        ask(local)
    assert caught.value.message == f"Test refused ({status}): Invalid auth-token"
    assert isinstance(caught.value, CapabilityError)
    assert (caught.value.status_code, caught.value.resource) == (status, local.url)
    assert len(local.questions) == 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"error": {"code": "400 Bad Request", "message": "Please enter a valid date"}}, "Please enter a valid date"),
        ({"detail": "no such zone"}, "no such zone"),
        ({"strange": 1}, "{'strange': 1}"),
        (b"<html>\n  nginx</html>", "<html> nginx</html>"),
        (b"", "Bad Request"),
        ({"error": ""}, "{'error': ''}"),
    ],
)
def test_other_errors_say_what_the_service_says(body: object, says: str) -> None:
    with served(lambda question: Answer(body, 400)) as local, pytest.raises(DataError) as caught:
        ask(local)
    assert str(caught.value) == f"Test answered 400 to /x: {says}"
    assert len(local.questions) == 1


def test_an_answer_must_be_json() -> None:
    portal = Answer(b"<html>sign in to the network</html>")
    with served(lambda question: portal) as local, pytest.raises(DataError, match="no JSON to /x: '<html>sign in"):
        ask(local)


def test_no_network_is_one_error() -> None:
    def unreachable(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Name or service not known")

    slept: list[float] = []
    service = CarbonService(
        "Test", "http://x", Patience(tries=2), httpx.MockTransport(unreachable), slept.append, spread=lambda: 0.0
    )
    with pytest.raises(DataError, match=r"2 tries \(ConnectError: Name or service"):
        service.get("/y")
    assert slept == [0.5]


def test_a_timeout_without_words_is_named() -> None:
    def silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("")

    service = CarbonService("Test", "http://x", Patience(tries=1), httpx.MockTransport(silent))
    with pytest.raises(DataError, match=r"in 1 tries \(ReadTimeout\)"):
        service.get("/y")
