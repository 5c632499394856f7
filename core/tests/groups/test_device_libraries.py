"""Groups over a device's own library, without one installed: how the end of a collective is decided (G16)."""

import pytest
from hal_core.devices import CollectiveTicket
from hal_core.errors import GroupLost


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
