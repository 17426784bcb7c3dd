from dataclasses import dataclass, field

from joulery.policies.serving.search import ExhaustiveSearch, trials


@dataclass
class Judge:
    asked: list[int] = field(default_factory=list)

    def evaluate(self, candidate: int, /) -> int:
        self.asked.append(candidate)
        return candidate**2


def test_every_candidate_is_judged_once_in_order():
    judge = Judge()
    assert trials(ExhaustiveSearch([3, 1, 2]), judge) == [(3, 9), (1, 1), (2, 4)]
    assert judge.asked == [3, 1, 2]


def test_a_search_may_learn_from_what_it_is_told():
    class Climb:
        """Asks for the neighbour above as long as that was better."""

        def __init__(self) -> None:
            self.at, self.best = 0, -1

        def ask(self) -> int | None:
            return None if self.at is None else self.at

        def tell(self, candidate: int, metrics: int, /) -> None:
            self.at = candidate + 1 if metrics > self.best else None
            self.best = max(self.best, metrics)

    class Hill:
        def evaluate(self, candidate: int, /) -> int:
            return -abs(candidate - 3)

    search = Climb()
    search.best = -99
    assert [candidate for candidate, _ in trials(search, Hill())] == [0, 1, 2, 3, 4]


def test_no_candidates_no_trials():
    assert trials(ExhaustiveSearch[int, int]([]), Judge()) == []
