"""What torch.compile of PyTorch 2.1 does to optimizers, acted out by stand-ins: steps are seen before and after."""

import functools
import sys
from contextlib import contextmanager
from types import ModuleType

import pytest

from joulery.adapters.tracers.inject.hidden_steps import HiddenSteps

PATCHER = "torch._dynamo.eval_frame"


class World:
    """Optimizers whose classes run hooks once one is made, and a patch that takes them off."""

    def __init__(self, monkeypatch, *, strips):
        self.hooks, self.ranges, self.steps, self.compiling = [], [], [], False
        world = self

        class Optimizer:
            def __init__(self):
                kind = type(self)
                if not getattr(kind.step, "hooked", False):
                    kind.step = self.profile_hook_step(kind.step)
                    kind.step.hooked = True

            @staticmethod
            def profile_hook_step(step):
                @functools.wraps(step)
                def wrapper(optimizer, *args):
                    result = step(optimizer, *args)
                    for hook in world.hooks:
                        hook(optimizer, args, {})
                    return result

                return wrapper

        class SGD(Optimizer):
            def step(self, closure=None):
                world.steps.append(closure)
                return closure

        class Adam(SGD):
            def step(self, closure=None):
                return super().step(closure)

        self.optim = ModuleType("torch.optim")
        self.optim.Optimizer, self.optim.SGD, self.optim.Adam, self.optim.lr_scheduler = Optimizer, SGD, Adam, object()

        class TorchPatcher:
            @staticmethod
            @functools.lru_cache(None)
            def patch():
                for kind in (SGD, Adam) if strips else ():
                    if getattr(kind.step, "hooked", False):
                        kind.step = kind.step.__wrapped__
                    kind.step.hooked = True

        self.dynamo = ModuleType(PATCHER)
        self.dynamo.TorchPatcher = TorchPatcher
        monkeypatch.setitem(sys.modules, PATCHER, self.dynamo)

    def watch(self):
        seen = []

        @contextmanager
        def range_(name):
            self.ranges.append(name)
            yield

        self.hooks.append(lambda optimizer, args, kwargs: seen.append(optimizer))
        return HiddenSteps(self.optim, lambda: self.compiling, self.hooks[0], range_), seen


@pytest.mark.parametrize("made_first", [True, False])
@pytest.mark.parametrize("strips", [True, False])
def test_every_step_is_reported_once_whether_the_hooks_were_taken_off_or_not(monkeypatch, strips, made_first):
    world = World(monkeypatch, strips=strips)
    _, seen = world.watch()
    optimizer = world.optim.SGD() if made_first else None
    world.dynamo.TorchPatcher.patch()
    world.dynamo.TorchPatcher.patch()
    optimizer = optimizer or world.optim.SGD()
    assert optimizer.step("loss") == "loss"
    optimizer.step()
    assert seen == [optimizer, optimizer] and world.steps == ["loss", None]
    assert world.ranges == ["Optimizer.step#SGD.step"] * 2 * strips


def test_a_step_that_is_being_compiled_is_left_alone(monkeypatch):
    world = World(monkeypatch, strips=True)
    _, seen = world.watch()
    world.dynamo.TorchPatcher.patch()
    world.compiling = True
    world.optim.SGD().step("loss")
    assert world.steps == ["loss"] and not seen and not world.ranges


def test_a_subclass_of_the_program_reports_its_own_step_once(monkeypatch):
    world = World(monkeypatch, strips=True)
    _, seen = world.watch()
    world.dynamo.TorchPatcher.patch()

    class Mine(world.optim.SGD):
        pass

    mine = Mine()
    mine.step()
    assert seen == [mine] and world.ranges == ["Optimizer.step#Mine.step"]


def test_after_the_end_nothing_more_is_wrapped(monkeypatch):
    world = World(monkeypatch, strips=True)
    plain = world.dynamo.TorchPatcher.patch
    hidden, seen = world.watch()
    hidden.stop()
    assert world.dynamo.TorchPatcher.patch is plain
    plain()
    world.optim.SGD().step()
    assert not seen


def test_a_version_without_the_patch_is_left_as_it_is(monkeypatch):
    world = World(monkeypatch, strips=False)
    del world.dynamo.TorchPatcher.patch
    hidden, seen = world.watch()
    optimizer = world.optim.SGD()
    optimizer.step()
    hidden.stop()
    assert seen == [optimizer]
