"""Which optimizer's steps are the steps of training: optimizers that take turns, follow one another, or help."""

import gc
from dataclasses import dataclass, field

import pytest

from joulery.adapters.tracers.inject.step_kinds import OptimizerTurns


class Parameter:
    """Stands for ``torch.nn.Parameter``."""


@dataclass(eq=False)
class Optimizer:
    parameters: list = field(default_factory=lambda: [Parameter()])

    @property
    def param_groups(self):
        return [{"params": self.parameters}]


class Model:
    def __init__(self, *parameters):
        self._parameters = parameters

    def parameters(self):
        return iter(self._parameters)


def counted(turns, steps, model=None):
    """Steps of training after these optimizers have stepped, and those of one that began to take over at the end."""
    total = 0
    for optimizer in steps:
        ends, missed = turns.stepped(optimizer, model)
        total += ends + missed
    return total + turns.rest()


@pytest.mark.parametrize(
    ("turns", "training"),
    [
        ("a" * 5, 5),
        ("ab" * 6, 6),  # a GAN
        ("aaaaab" * 4, 20),  # its critic first
        (("a" + "b" * 5) * 4, 4),
        (("a" + "b" * 20) * 4, 4),  # the first long turn looks like a second stage, until the first one steps again
        ("a" * 6 + "b" * 20, 26),  # two stages
        ("a" * 6 + "b" * 3, 9),  # the second one a short one
        ("ab" * 6 + "b" * 20, 27),
        ("a" * 6 + "bc" * 10, 16),  # a second stage of two that take turns
        ("a" * 3 + "b" * 9 + "c" * 9, 21),
        ("ab", 1),
    ],
)
def test_steps_of_optimizers_that_take_turns_or_follow_one_another(turns, training) -> None:
    optimizers = {name: Optimizer() for name in set(turns)}
    assert counted(OptimizerTurns(Parameter), [optimizers[name] for name in turns]) == training


def test_a_second_optimizer_takes_over_at_once_where_the_first_is_gone() -> None:
    turns, first = OptimizerTurns(Parameter), Optimizer()
    assert counted(turns, [first] * 4) == 4 and turns.main is first
    del first
    gc.collect()
    second = Optimizer()
    assert turns.main is None and turns.has_stepped
    assert counted(turns, [second]) == 1 and turns.main is second


def test_an_optimizer_of_plain_tensors_beside_the_models_is_none_of_training() -> None:
    turns, model = OptimizerTurns(Parameter), Model(Parameter())
    trainer, attack = Optimizer([*model.parameters()]), Optimizer([object()])
    turns.add(trainer)
    assert counted(turns, ([attack] * 20 + [trainer]) * 3, model) == 3


def test_plain_tensors_are_trained_where_nothing_else_is() -> None:
    turns, frozen, picture = OptimizerTurns(Parameter), Model(Parameter()), Optimizer([object()])
    turns.add(picture)
    assert not turns.is_trained(frozen) and counted(turns, [picture] * 4, frozen) == 4


def test_a_group_that_is_added_later_is_known() -> None:
    turns, model = OptimizerTurns(Parameter), Model(Parameter())

    class Growing(Optimizer):
        groups = ([Parameter()],)

        @property
        def param_groups(self):
            return [{"params": group} for group in self.groups]

    optimizer = Growing()
    turns.add(optimizer)
    assert not turns.is_trained(model)
    optimizer.groups = (*optimizer.groups, [*model.parameters()])
    assert turns.is_trained(model)
