"""NVIDIA's DCGM exporter as a meter."""

import math

import pytest

from joulery.adapters.meters.dcgm import open_dcgm
from joulery.domain.energy.channel import ReadingKind
from joulery.domain.errors import CapabilityError, ConfigError
from tests.fakes.engine_pages import Page, dcgm, shown


def opened(page):
    pages = [page]
    return open_dcgm("localhost:9400", lambda _: pages[0]), pages


def test_boards_with_a_counter_and_without():
    meter, _ = opened(dcgm((48_287_135, None)))
    assert [(c.device, c.kind, c.meter) for c in meter.channels] == [
        ("gpu:0", ReadingKind.COUNTER, "dcgm"),
        ("gpu:1", ReadingKind.POWER, "dcgm"),
    ]
    assert meter.read() == (48_287.135, 14.512)
    assert meter.uuids == {"GPU-0": "gpu:0", "GPU-1": "gpu:1"}
    meter.close()
    assert all(math.isnan(value) for value in meter.read())


def test_a_board_that_is_gone_and_an_exporter_that_is_gone():
    meter, pages = opened(dcgm((1000, 2000)))
    pages[0] = dcgm((3000,))
    assert meter.read()[0] == 3.0 and math.isnan(meter.read()[1])
    assert meter.notes() == ()


def test_losing_the_exporter_is_said_once():
    with shown(Page(dcgm((1000,)))) as page:
        meter = open_dcgm(page.url)
        page.text = ""
        assert math.isnan(meter.read()[0]) and math.isnan(meter.read()[0])
        assert len(meter.notes()) == 1
        page.text = dcgm((5000,))
        assert meter.read() == (5.0,)
        assert meter.notes() == ("the DCGM exporter answers again",)


@pytest.mark.parametrize("page", ["", 'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 1\n', 'DCGM_FI_DEV_POWER_USAGE{gpu="0"} -1\n'])
def test_a_page_without_boards_is_refused(page):
    with pytest.raises(CapabilityError, match="shows no energy"):
        opened(page)


def test_an_address_that_is_none():
    with pytest.raises(ConfigError):
        open_dcgm("ftp://x")
