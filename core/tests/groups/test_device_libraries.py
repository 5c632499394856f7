"""Groups over a device's own library, without one installed: how the end of a collective is decided (G16)."""

from __future__ import annotations

import threading
from time import monotonic
from types import SimpleNamespace

import pytest
from hal_core.devices.paddle.ranks import process_groups
from hal_core.devices.paddle.ranks.collective_ticket import CollectiveTicket
from hal_core.devices.paddle.ranks.process_groups import connect, make_group
from hal_core.errors import GroupLost, InvalidValue


class Event:
    """An event that has passed, is pending, or fails."""

    def __init__(self, passed):
        self.passed = passed

    def done(self):
        if isinstance(self.passed, Exception):
            raise self.passed
        return self.passed


class Watched:
    """The part of a watchdog that a ticket calls."""

    def __init__(self, reason=""):
        self.reason, self.ended = reason, 0

    def end(self, number):
        self.ended = number

    def error(self, reason):
        return GroupLost(reason)

    def failed(self, error):
        return GroupLost(f"a collective failed: {error}")


def test_a_collective_is_over_when_its_event_has_passed():
    event, watchdog = Event(False), Watched()
    ticket = CollectiveTicket(event, watchdog, "async", 7)
    assert not ticket.done()
    event.passed = True
    assert watchdog.ended == 0
    ticket.wait(0)
    assert watchdog.ended == 7


@pytest.mark.parametrize("passed", [False, True])
def test_g16_of_a_group_that_was_given_up_nothing_is_taken_for_sent(passed):
    ticket = CollectiveTicket(Event(passed), Watched("rank 1 is gone"), "async", 1)
    with pytest.raises(GroupLost, match="rank 1 is gone"):
        ticket.wait(0)


def test_g16_what_the_library_raises_is_the_loss_of_the_group():
    ticket = CollectiveTicket(Event(OSError("error code 3")), Watched(), "async", 1)
    with pytest.raises(GroupLost, match="a collective failed: error code 3"):
        ticket.wait(0)
    assert ticket.done()


def test_a_library_that_nobody_knows_is_refused_before_anything_is_made():
    with pytest.raises(InvalidValue, match=r"over 'smoke' are not supported \(known: gloo, xccl, bkcl, nccl\)"):
        make_group("smoke", (0, 1), 0, {}, SimpleNamespace(), 1.0)


class Library:
    """A process group whose first collective ends in a given way."""

    def __init__(self, call=lambda: None, completed=lambda: True):
        self.call, self.completed = call, completed

    def broadcast(self, tensor, source, sync):
        self.call()
        return SimpleNamespace(is_completed=self.completed)


@pytest.fixture
def cpu_place():
    return pytest.importorskip("paddle").CPUPlace()


def test_a_group_is_connected_when_its_first_collective_has_ended(cpu_place):
    looks = iter([False, False, True])
    connect(Library(completed=lambda: next(looks)), cpu_place, 5.0)
    assert next(looks, None) is None


@pytest.mark.parametrize("where", ["in the call", "on the device"])
def test_g16_a_rank_missing_at_the_first_collective_is_an_error_in_time(cpu_place, where):
    release = threading.Event()
    stuck = Library(call=release.wait) if where == "in the call" else Library(completed=lambda: False)
    began = monotonic()
    with pytest.raises(GroupLost, match=r"did not find each other within 0\.3 s") as raised:
        connect(stuck, cpu_place, 0.3)
    assert monotonic() - began < 5.0
    assert "end this process" in raised.value.cure
    release.set()


def test_what_the_library_says_of_the_first_collective_is_passed_on(cpu_place):
    def call():
        raise ValueError("Duplicate GPU detected")

    with pytest.raises(RuntimeError, match="Duplicate GPU detected"):
        connect(Library(call=call), cpu_place, 5.0)


def test_a_group_over_nccl_is_made_as_paddles_own_and_connected(monkeypatch):
    """Paddle's Python code counts the arguments that its class takes; the first four mean the same in all versions."""
    core = process_groups.paddle_core()
    made, connected = [], []

    class ProcessGroupNCCL:
        @staticmethod
        def create(*arguments):
            made.append(arguments)
            return "the group"

    monkeypatch.setattr(core, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    place = SimpleNamespace(get_device_id=lambda: 0)
    monkeypatch.setattr(process_groups, "_current_gpu", lambda: place)
    monkeypatch.setattr(process_groups, "connect", lambda *arguments: connected.append(arguments))
    group, _ = process_groups._creator("nccl", 60.0)("the store", 1, 2, 1234)
    assert (group, connected) == ("the group", [("the group", place, 60.0)])
    assert made[0][:4] == ("the store", 1, 2, 1234)


def test_a_group_over_nccl_needs_a_gpu_to_be_paddles_current_device():
    pytest.importorskip("paddle")
    with pytest.raises(InvalidValue, match=r"current place is Place\(cpu\)") as raised:
        process_groups._current_gpu()
    assert "paddle.set_device('gpu:N')" in raised.value.cure
