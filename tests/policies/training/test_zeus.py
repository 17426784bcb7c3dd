import pytest

from joulery.domain.errors import ConfigError
from joulery.perf.power.training_power import POWER_LIMITS, RTX3090_CLASSES, RTX3090_W, limited
from joulery.policies.training.baselines import zeus_limits


def test_time_alone_sets_no_limit_that_slows_and_energy_alone_the_one_of_least_energy() -> None:
    for eta, expected in ((0.0, lambda job: job.time_ratio), (1.0, lambda job: job.time_ratio * job.gpu_w)):
        for full, cut in zip(
            RTX3090_CLASSES, limited(RTX3090_CLASSES, zeus_limits(RTX3090_CLASSES, RTX3090_W, eta)), strict=True
        ):
            menu = [full, *(limited((full,), ratio)[0] for ratio in POWER_LIMITS)]
            assert expected(cut) == pytest.approx(min(map(expected, menu)))


def test_by_hand() -> None:
    """BERT on SQuAD, eta 1/2: 331 W at full power, 319 at 83 %, 317 at 75 %, 322 at 67 %."""
    chosen = zeus_limits(RTX3090_CLASSES, 350.0)
    assert chosen["bert-squad"] == 0.75 and chosen["ncf"] == 1.0
    assert chosen["resnet50-imagenet"] == 0.667 and chosen["resnet18-cifar"] == 0.583


def test_a_limit_holds_for_the_kinds_it_names_alone() -> None:
    cut = limited(RTX3090_CLASSES, {"bert-squad": 0.5})
    changed = [new.name for old, new in zip(RTX3090_CLASSES, cut, strict=True) if new is not old]
    assert changed == ["bert-squad"]
    with pytest.raises(ConfigError, match="weighs energy against time"):
        zeus_limits(RTX3090_CLASSES, 350.0, 1.5)
