from hypothesis import given
from hypothesis import strategies as st

from joulery.runtime.serving.controller import TrialArbiter


def test_the_service_that_asks_first_goes_first():
    arbiter = TrialArbiter()
    assert arbiter.ahead_of("a", {"a": False, "b": False}) == ""
    wants = {"a": False, "b": True, "c": False}
    assert arbiter.ahead_of("b", wants) == "" and arbiter.ahead_of("a", wants) == "b"
    wants = {"a": True, "b": True, "c": False}
    assert arbiter.ahead_of("a", wants) == "b" == arbiter.ahead_of("c", wants)
    wants["c"] = True
    assert arbiter.ahead_of("c", wants) == "b"
    wants["b"] = False
    assert arbiter.ahead_of("b", wants) == "a", "who has had a turn goes to the end"
    wants["b"] = True
    assert [arbiter.ahead_of(name, wants) for name in "abc"] == ["", "a", "a"]
    wants["a"] = False
    assert [arbiter.ahead_of(name, wants) for name in "abc"] == ["c", "c", ""]
    assert arbiter.ahead_of("b", {"b": True}) == "", "a service that is gone delays no other"


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.booleans(), min_size=4), max_size=20))
def test_never_two_at_once_and_none_waits_for_a_service_without_a_trial(days):
    arbiter = TrialArbiter()
    for wants in days:
        ahead = {name: arbiter.ahead_of(name, wants) for name in wants}
        assert sum(wants[name] and not ahead[name] for name in wants) == (1 if any(wants.values()) else 0)
        assert all(wants[other] for other in ahead.values() if other)
