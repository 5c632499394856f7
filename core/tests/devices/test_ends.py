"""End of work on an asynchronous device, and of the device: faults, lost groups, closing, finalizers, forks."""

import gc
import os
import threading
from collections import deque

import numpy as np
import pytest
from blocks_of_latched import RING, drain, write
from hal_core.devices import stream_device
from hal_core.devices.events import RecordedEvent
from hal_core.devices.tickets import AsyncTicket
from hal_core.errors import DeviceClosed, GroupLost, HalError
from hal_core.memory.plan import PlanBuilder
from hal_core.memory.views import ByteRange
from latched import LatchedDevice


def test_a_fault_sticks_to_its_device_alone(device):
    other = LatchedDevice(1, **RING)
    memory, theirs = device.allocate(64), other.allocate(64)
    ticket, pending = write(device, memory, 1), write(device, memory, 2)
    drain(device)
    device.primitives.error = HalError("page fault", cure="mend the kernel")
    with pytest.raises(HalError, match="latched:0: page fault"):
        ticket.wait()
    for _ in range(2):
        with pytest.raises(
            DeviceClosed, match=r"earlier work failed on the device: page fault .*open the device again"
        ):
            device.submit(PlanBuilder(memory).build(), device.default_stream)
    with pytest.raises(DeviceClosed):
        device.allocate(8)
    assert isinstance(pending.failure(), HalError), "tickets looked at from then on fail"
    write(other, theirs, 3).wait()
    other.close()


def test_tickets_and_copies_of_one_stream_have_one_order(device):
    memory, stream = device.allocate(64), device.stream()
    one, two, other = write(device, memory, 1), write(device, memory, 2), write(device, memory, 3, stream)
    assert one.order == two.order != other.order
    copies = [device.copy_out(memory, [ByteRange(0, 64)], stream) for _ in range(2)]
    assert copies[0].order == copies[1].order is not None
    drain(device)


def test_a_lost_group_is_reported_by_its_ticket_and_the_device_goes_on(device):
    memory = device.allocate(64)
    first = write(device, memory, 1)
    device.primitives.raises = GroupLost("rank 1 has left", cure="start all ranks again")
    with pytest.raises(GroupLost, match="rank 1 has left"):
        first.wait()
    device.primitives.raises = None
    drain(device)
    write(device, memory, 2).wait()


def test_an_error_of_a_query_is_the_tickets_and_may_end_the_device(device):
    memory = device.allocate(64)
    first, second = write(device, memory, 1), write(device, memory, 2)
    device.primitives.raises = ValueError("capture")
    device.primitives.spoils = lambda error: False
    assert first.done()
    with pytest.raises(ValueError, match="capture"):
        first.wait()
    device.primitives.raises = None
    drain(device)
    second.wait()
    write(device, memory, 3)


def test_closing_waits_for_work_in_flight_and_gives_everything_back():
    device = LatchedDevice(**RING)
    memory = device.allocate(64)
    stream = device.stream()
    ticket = write(device, memory, 1, stream)
    copied = device.copy_out(memory, [ByteRange(0, 64)], stream)
    device.close()
    device.close()
    assert ticket.done()
    copied.wait()
    assert (copied.data[0].view(np.int64) == 1).all(), "what was copied can be read yet"
    with pytest.raises(DeviceClosed, match="latched:0: the device is closed"):
        device.allocate(8)
    del copied, memory, stream
    gc.collect()
    assert (device.primitives.blocks, device.primitives.host) == ({}, {})
    assert device.primitives.destroyed == len(device.primitives.lines)
    assert device.primitives.wrong == []


class DriverFault(HalError):
    """An error of a runtime that raises it at its next call, whichever that is."""


@pytest.mark.parametrize("by", ["its ticket", "a call", "closing"])
def test_a_fault_that_the_runtime_raises_itself_is_raised_by_closing_unless_a_caller_has_seen_it(monkeypatch, by):
    monkeypatch.setattr(LatchedDevice, "raises_faults", True)
    device = LatchedDevice(0, **RING)
    memory = device.allocate(64)
    ticket = write(device, memory, 1)
    device.primitives.raises = DriverFault("page fault", cure="mend the kernel")
    device.primitives.spoils = lambda error: False
    calls = {
        "its ticket": ticket.wait,
        "a call": lambda: device.allocate(8),
        "closing": device.close,
    }
    with pytest.raises(DriverFault, match="latched:0: page fault"):
        calls[by]()
    device.close()
    with pytest.raises(DeviceClosed):
        device.allocate(8)


def test_closing_a_hung_device_ends_and_keeps_memory_in_use(device):
    memory = device.allocate(64)
    write(device, memory, 1)
    device.primitives.hangs = True
    blocks, host = set(device.primitives.blocks), set(device.primitives.host)
    device.close()
    del memory
    gc.collect()
    assert (set(device.primitives.blocks), set(device.primitives.host)) == (blocks, host)
    drain(device)


def test_finalizers_of_other_threads_call_no_primitive(device):
    """Events that only one thread may query are queried by that thread."""
    memory, stream = device.allocate(64), device.stream()
    dropped = [
        write(device, memory, 1, stream),
        device.copy_out(memory, [ByteRange(0, 64)], stream),
        stream.record(),
        device.allocate(64),
        device.stream(),
    ]
    del stream
    device.primitives.threads.clear()
    thread = threading.Thread(target=dropped.clear)
    thread.start()
    thread.join()
    assert device.primitives.threads == set()
    drain(device)
    device.allocate(8)
    assert device.primitives.destroyed == 4, "two streams, each with the one beside it"
    assert device.primitives.threads == {threading.get_ident()}


class Meanwhile(RecordedEvent):
    """An event that has passed, or not; ``other`` is what another thread does when it is first looked at."""

    __slots__ = ("has_passed", "other")

    @classmethod
    def of(cls, device, *, passed):
        event = cls.__new__(cls)
        event.has_passed, event.other = passed, None
        event.__init__(device.events, device.primitives.event_create(), -1)
        return event

    @property
    def passed(self):
        other, self.other = self.other, None
        if other is not None:
            other()
        return self.has_passed

    @passed.setter
    def passed(self, _):
        pass


def test_a_finalizer_of_another_thread_may_meet_a_stream_that_is_new(device):
    memory = device.allocate(64)
    event = device.last[-1] = Meanwhile.of(device, passed=False)
    event.other = lambda: device.last.setdefault(-2, Meanwhile.of(device, passed=True))
    blocks = len(device.primitives.blocks)
    del memory
    event.has_passed = True
    device.allocate(8)
    assert len(device.primitives.blocks) == blocks, "the memory was not given back"
    device.last.clear()


def test_two_threads_that_ask_a_ticket_for_its_failure_ask_for_the_same_event(device, monkeypatch):
    events = []
    monkeypatch.setattr(device.events, "error", events.append)
    event = Meanwhile.of(device, passed=True)
    ticket = AsyncTicket(event)
    event.other = ticket.failure
    assert ticket.failure() is None
    assert {*events} == {event.raw}


def test_a_device_that_is_dropped_while_others_are_given_back_hinders_none(monkeypatch):
    close, primitives = LatchedDevice.close, []

    def closing(device):
        close(device)
        stream_device.give_back_dropped()  # as a finalizer of another device does

    monkeypatch.setattr(LatchedDevice, "close", closing)
    monkeypatch.setattr(stream_device, "_dropped", deque())  # without those of other tests
    for number in range(2):
        device = LatchedDevice(number, **RING)
        write(device, device.allocate(64), 1)
        primitives.append(device.primitives)
        del device
    gc.collect()
    for one in primitives:
        for line in one.lines:
            one.run(line)
    stream_device.give_back_dropped()
    assert [one.blocks for one in primitives] == [{}, {}]


def test_the_childs_copy_after_a_fork_refuses_and_gives_nothing_back(device):
    memory, stream = device.allocate(64), device.stream()
    ticket = write(device, memory, 1, stream)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            del memory, stream, ticket
            calls = []
            device.primitives._enter = calls.append
            try:
                device.allocate(8)
            except DeviceClosed as error:
                device.close()
                device.retired.reap()
                status = 0 if "fork" in str(error) and not calls else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    drain(device)
    ticket.wait()
    device.close()


class Left:
    """Collectives of a group that record only whether they were closed, and which work was in flight then."""

    def __init__(self, device):
        self.device, self.unfinished = device, None

    def close(self):
        self.unfinished = [event for event in self.device.last.values() if not event.done()]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_group_is_left_after_its_work_or_an_interrupted_wait(monkeypatch, interrupted):
    device = LatchedDevice(0, **RING)
    write(device, device.allocate(64), 1)
    group = device._communicators[(0, 1)] = Left(device)
    settled = device._settled

    def wait():
        assert group.unfinished is None, "the group was left before the work was over"
        if interrupted:
            raise KeyboardInterrupt
        drain(device)
        return settled()

    monkeypatch.setattr(device, "_settled", wait)
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            device.close()
        assert group.unfinished, "left all the same: nobody has to wait for this rank"
        drain(device)
    else:
        device.close()
        assert group.unfinished == []
    device.close()


def test_tickets_that_were_waited_for_keep_no_event(device):
    memory, kept = device.allocate(64), []
    for number in range(300):
        kept.append(write(device, memory, number % 7))
        drain(device)
        kept[-1].wait()
    assert len({ticket.order for ticket in kept}) == 1
    assert all(ticket.done() for ticket in kept)
    assert device.events.made < 100, "each kept ticket has an event of its own"
