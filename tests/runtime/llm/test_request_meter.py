"""The meters as requests see them."""

import math

import pytest

from joulery.domain.energy.channel import ReadingKind
from joulery.domain.errors import ConfigError
from joulery.domain.quality import Quality
from joulery.runtime.llm.request_meter import RequestMeter
from tests.runtime.llm.fakes import FakeMachine


class Cpu:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def meter_of(machine, **more):
    return RequestMeter([machine], lambda: machine.busy_s, clock=lambda: machine.now_s, **more)


def test_an_engine_pays_by_cpu_time_and_ticks_that_come_late_are_not_lost() -> None:
    machine, cpu = FakeMachine(), Cpu()
    meter = meter_of(machine)
    meter.join("llm", cpu)
    meter.began("llm", 1)
    cpu.seconds += 0.004  # the kernel has not counted it yet
    machine.spend(0.005, 10.0)
    meter.settle()
    cpu.seconds += 0.001
    machine.spend(0.005, 30.0, busy_s=0.01)
    share = meter.ended("llm", 1)
    assert share is not None
    assert share.energy_j == pytest.approx(0.005 * 20.0 * 0.5)  # half of the tick was the engine's
    assert share.carbon_g is None
    assert share.quality is Quality.MEASURED


def test_two_engines_never_pay_for_more_than_there_was() -> None:
    machine, one, two = FakeMachine(idle_w=math.nan), Cpu(), Cpu()
    meter = meter_of(machine)
    meter.join("one", one)
    meter.join("two", two)
    meter.began("one", 1)
    meter.began("two", 2)
    one.seconds, two.seconds = 3.0, 1.0
    machine.spend(1.0, 40.0, busy_s=2.0)
    shares = [meter.ended("one", 1), meter.ended("two", 2)]
    assert [share and share.energy_j for share in shares] == pytest.approx([30.0, 10.0])
    assert meter.totals.unattributed_j == pytest.approx(0.0)


def test_the_energy_of_a_remote_engine_is_unknown() -> None:
    machine = FakeMachine()
    meter = meter_of(machine)
    meter.join("far", lambda: math.nan)
    meter.began("far", 1)
    machine.spend(1.0, 40.0, busy_s=2.0)
    assert meter.ended("far", 1) is None
    assert meter.totals.requests_j == 0.0


def test_an_engine_that_was_away_is_unknown_meanwhile_and_known_again_afterwards() -> None:
    machine, cpu = FakeMachine(idle_w=math.nan), Cpu()
    meter = meter_of(machine)
    meter.join("llm", cpu)
    known = []
    for number, seconds in enumerate((1.0, math.nan, 0.5, 1.5)):  # its process died and began again at 0
        meter.began("llm", number)
        cpu.seconds = seconds
        machine.spend(1.0, 40.0, busy_s=2.0)
        share = meter.ended("llm", number)
        known.append(None if share is None else share.energy_j)
    assert known == [pytest.approx(20.0), None, None, pytest.approx(20.0)]


def test_a_device_of_its_own_is_the_engines_above_idle() -> None:
    board = FakeMachine(idle_w=50.0, device="gpu:0", kind=ReadingKind.POWER)
    meter = meter_of(board)
    meter.join("llm", lambda: math.nan, ["gpu:0"])
    with pytest.raises(ConfigError, match="to themselves"):
        meter.join("other", lambda: math.nan, ["gpu:0"])
    meter.began("llm", 1)
    board.now_s, board.value = board.now_s + 2.0, 250.0
    share = meter.ended("llm", 1)
    assert share is not None and share.energy_j == pytest.approx(400.0)
    assert meter.totals.idle_j == pytest.approx(100.0)


def test_a_processor_of_its_own_is_one_engines_and_no_part_of_it_the_others() -> None:
    shared, own, cpu = FakeMachine(), FakeMachine(device="cpu:1"), Cpu()
    meter = RequestMeter([shared, own], lambda: shared.busy_s, clock=lambda: shared.now_s)
    meter.join("alone", lambda: math.nan, ["cpu:1"])
    meter.join("llm", cpu)
    meter.began("alone", 1)
    meter.began("llm", 2)
    cpu.seconds = 1.0
    own.value += 30.0
    shared.spend(1.0, 40.0, busy_s=2.0)
    shares = [meter.ended("alone", 1), meter.ended("llm", 2)]
    assert [share and share.energy_j for share in shares] == pytest.approx([20.0, 15.0])
    totals = meter.totals
    assert totals.idle_j + totals.requests_j + totals.unattributed_j == pytest.approx(70.0)


def test_a_device_without_a_meter_is_unknown() -> None:
    machine = FakeMachine()
    meter = meter_of(machine)
    meter.join("llm", lambda: math.nan, ["gpu:7"])
    meter.began("llm", 1)
    machine.spend(1.0, 40.0, busy_s=1.0)
    assert meter.ended("llm", 1) is None


def test_a_counter_that_wraps_goes_on_and_one_that_begins_again_is_unknown() -> None:
    machine, cpu = FakeMachine(idle_w=math.nan), Cpu()
    machine.value = 990.0
    meter = meter_of(machine)
    meter.join("llm", cpu)
    meter.began("llm", 1)
    machine.now_s, machine.value, machine.busy_s, cpu.seconds = 101.0, 5.0, 1.0, 1.0
    share = meter.ended("llm", 1)
    assert share is not None and share.energy_j == pytest.approx(15.0)
    meter.began("llm", 2)
    machine.now_s, machine.value, machine.busy_s = 102.0, math.nan, 2.0
    assert meter.ended("llm", 2) is None
    machine.now_s, machine.value, machine.busy_s, cpu.seconds = 103.0, 25.0, 3.0, 2.0
    meter.began("llm", 3)
    meter.close()
    assert machine.closed


def test_an_engine_on_several_boards_is_charged_for_all_of_them() -> None:
    boards = [FakeMachine(idle_w=10.0, device=f"gpu:{i}", kind=ReadingKind.POWER) for i in range(8)]
    meter = RequestMeter(boards, lambda: 0.0, clock=lambda: boards[0].now_s)
    meter.join("llm", lambda: math.nan, [f"gpu:{i}" for i in range(8)])
    assert meter.unmetered("llm") == ()
    meter.began("llm", 1)
    for board in boards:
        board.now_s, board.value = board.now_s + 2.0, 110.0
    share = meter.ended("llm", 1)
    assert share is not None
    assert share.energy_j == pytest.approx(8 * 100.0 * 2.0)


def board(update_s=0.1):
    """A GPU whose counter is renewed ten times a second."""
    return FakeMachine(idle_w=math.nan, device="gpu:0", update_s=update_s)


@pytest.mark.parametrize("apart", [0, 1, 3])
def test_requests_are_charged_what_they_took_though_the_counter_of_their_board_moves_in_steps(apart) -> None:
    """64 answers of 256 tokens that begin and end one after another: the last ones do not pay for what is pending."""
    machine, running, took_j, shares = board(), {}, dict.fromkeys(range(64), 0.0), {}
    meter = meter_of(machine)
    meter.join("llm", lambda: math.nan, ["gpu:0"])
    for step in range(256 + 64 * apart):
        for number in (at for at in range(64) if at * apart == step):
            meter.began("llm", number)
            running[number] = 256
        machine.spend(0.006, 150.0 + 2.0 * len(running))
        for number in list(running):
            took_j[number] += 0.006 * (150.0 + 2.0 * len(running)) / len(running)
        for number in list(running):
            meter.moved("llm", number, written=1)
            running[number] -= 1
            if not running[number]:
                shares[number] = meter.ended("llm", number).energy_j
                del running[number]
    off = sorted(abs(shares[number] / took_j[number] - 1.0) for number in shares)
    assert off[32] <= 0.05 and off[56] <= 0.15, "the first and the last run in a batch that grows or shrinks"
    assert off[-1] <= 0.4
    if apart == 0:
        assert max(shares.values()) <= 1.05 * min(shares.values()), "equal ones"
    machine.spend(0.5, 120.0)
    meter.settle()
    assert meter.totals.requests_j == pytest.approx(sum(shares.values())), "what was charged ahead has been read"
    assert meter.totals.total_j == pytest.approx(machine.value)


def test_a_board_is_read_a_few_times_a_second_and_not_with_every_request() -> None:
    machine = board()
    meter = meter_of(machine)
    meter.join("llm", lambda: math.nan, ["gpu:0"])
    meter.began("llm", -1)
    meter.moved("llm", -1, written=1)
    machine.spend(0.3, 200.0)
    meter.settle()
    before, begun_s, charged_j = machine.reads, machine.now_s, []
    for number in range(1000):
        meter.began("llm", number)
        machine.spend(0.002, 200.0)
        meter.moved("llm", number, written=8)
        charged_j.append(meter.ended("llm", number).energy_j)
    assert sum(charged_j) == pytest.approx(400.0, rel=0.1) and max(charged_j) < 3 * 0.4
    assert machine.reads - before <= (machine.now_s - begun_s) / 0.1 + 1


def test_the_first_short_answers_of_a_burst_are_charged_as_the_engine_works_and_not_as_it_waited() -> None:
    machine = board()
    meter = meter_of(machine)
    meter.join("llm", lambda: math.nan, ["gpu:0"])
    meter.began("llm", -1)
    for _ in range(5):
        machine.spend(0.2, 200.0)
        meter.moved("llm", -1, written=800)
        meter.settle()
    meter.ended("llm", -1)
    for _ in range(20):
        machine.spend(0.2, 50.0)
        meter.settle()
    charged_j = []
    for number in range(40):
        meter.began("llm", number)
        machine.spend(0.002, 200.0)
        meter.moved("llm", number, written=8)
        charged_j.append(meter.ended("llm", number).energy_j)
    assert sum(charged_j) == pytest.approx(40 * 0.002 * 200.0, rel=0.05)


def test_a_first_request_is_charged_what_the_board_took_since_it_began() -> None:
    """Nothing says yet what a token takes: the board is read at once, also for what is answered whole."""
    machine = board(update_s=0.1)
    meter = meter_of(machine)
    meter.join("llm", lambda: math.nan, ["gpu:0"])
    machine.spend(0.15, 100.0)
    meter.began("llm", 1)
    machine.spend(0.15, 200.0)
    meter.moved("llm", 1, written=3)
    assert meter.ended("llm", 1).energy_j == pytest.approx(30.0)
    meter.began("llm", 2, whole_tokens=5)
    machine.spend(0.12, 200.0)
    meter.moved("llm", 2, read=5)
    assert meter.ended("llm", 2).energy_j == pytest.approx(24.0)
