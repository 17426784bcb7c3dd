"""Samples and tokens of batches, of every form that collations give."""

from collections import UserDict
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'joulery[torch]'")

from joulery.adapters.tracers.inject.loaded import LoadedCounts, sizes  # noqa: E402  # needs torch
from joulery.adapters.tracers.inject.torch_recorder import TorchRecorder  # noqa: E402  # needs torch


class Odd(UserDict):
    def get(self, key, default=None):
        raise KeyError("this batch answers nothing")


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (torch.zeros(8, 3), (8, None)),
        ([torch.zeros(4, 3, 32, 32), torch.zeros(4)], (4, None)),
        ((({"image": torch.zeros(5, 2)},),), (5, None)),
        ({"labels": torch.zeros(6), "input_ids": torch.zeros(6, 128)}, (6, 768)),
        (UserDict(input_ids=torch.zeros(2, 9)), (2, 18)),
        ([torch.tensor(1.0), torch.zeros(7)], (7, None)),
        (SimpleNamespace(num_graphs=3), (None, None)),
        ("text", (None, None)),
        (Odd(), (None, None)),
    ],
)
def test_a_batch_has_the_rows_of_its_first_tensor_and_the_elements_of_its_input_ids(batch, found) -> None:
    assert sizes(batch) == found


@pytest.fixture
def loading():
    kind = torch.utils.data.dataloader._BaseDataLoaderIter
    give = kind.__next__
    yield torch.utils.data.dataloader
    kind.__next__ = give


def test_loaders_are_counted_until_counting_stops_and_what_one_does_not_say_is_unknown(loading) -> None:
    counts = LoadedCounts()
    assert counts.between((0, 0), (0, 0)) == (None, None), "without a loader nothing is known"
    counts.install(loading)
    rows = [{"input_ids": torch.zeros(4)} for _ in range(10)]
    given = iter(torch.utils.data.DataLoader(rows, batch_size=4))
    next(given)
    start = counts.now
    next(given)
    assert counts.before == start and counts.between(start, counts.now) == (4, 16)
    assert len(next(given)["input_ids"]) == 2 and counts.between((0, 0), counts.now) == (10, 40)
    list(torch.utils.data.DataLoader(rows, batch_size=None))
    assert counts.between(start, counts.now) == (None, None), "who collates for himself has batches of unknown size"
    counts.stop()
    stopped = counts.now
    list(torch.utils.data.DataLoader(rows, batch_size=5))
    assert counts.now == stopped


def test_a_recorder_that_is_done_leaves_loaders_and_optimizers_as_they_were(tmp_path, loading) -> None:
    """One wrapper more for each traced block would end in a RecursionError."""
    give, make = loading._BaseDataLoaderIter.__next__, torch.optim.Optimizer.__init__
    for _ in range(2):
        recorder = TorchRecorder(tmp_path, 0, 0, 1, 1)
        recorder.install()
        assert loading._BaseDataLoaderIter.__next__ is not give and torch.optim.Optimizer.__init__ is not make
        recorder.finish()
        assert loading._BaseDataLoaderIter.__next__ is give and torch.optim.Optimizer.__init__ is make
