"""Groups over a device's own library, without one: who decides that a collective is over (G16)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hal_core.errors import GroupLost, InvalidValue
from hal_core.paddle.groups import CollectiveTicket
from hal_core.process_groups import make_group


class Event:
    """Passed or not, or broken."""

    def __init__(self, passed):
        self.passed = passed

    def done(self):
        if isinstance(self.passed, Exception):
            raise self.passed
        return self.passed


class Watched:
    """The part of a watchdog that a ticket asks."""

    def __init__(self, reason=""):
        self.reason, self.ended = reason, 0

    def end(self):
        self.ended += 1

    def error(self, reason):
        return GroupLost(reason)

    def failed(self, error):
        return GroupLost(f"a collective failed: {error}")


def test_a_collective_is_over_when_its_event_has_passed():
    event, watchdog = Event(False), Watched()
    ticket = CollectiveTicket(event, watchdog, "async")
    assert not ticket.done()
    event.passed = True
    ticket.wait(0)
    assert watchdog.ended == 1


@pytest.mark.parametrize("passed", [False, True])
def test_g16_of_a_group_that_was_given_up_nothing_is_taken_for_sent(passed):
    ticket = CollectiveTicket(Event(passed), Watched("rank 1 is gone"), "async")
    with pytest.raises(GroupLost, match="rank 1 is gone"):
        ticket.wait(0)


def test_g16_what_the_library_raises_is_the_loss_of_the_group():
    ticket = CollectiveTicket(Event(OSError("error code 3")), Watched(), "async")
    with pytest.raises(GroupLost, match="a collective failed: error code 3"):
        ticket.wait(0)
    assert ticket.done()


def test_a_library_that_nobody_knows_is_refused_before_anything_is_made():
    with pytest.raises(InvalidValue, match=r"no process groups over 'smoke' are known \(known: gloo, xccl, bkcl\)"):
        make_group("smoke", (0, 1), 0, {}, SimpleNamespace(), 1.0)
