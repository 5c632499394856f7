"""A reader's output: events, requests, streams, in threads and in an event loop."""

import asyncio
import contextlib
import threading

import numpy as np
import pytest
from hal_core.errors import InvalidValue, SinkFull
from hal_core.slots.fields import FinishReason
from hal_engine.reading import SessionEnded, SessionLost, SessionStarted
from hal_engine.reading.session import Session
from hal_engine.timeouts import TIMEOUTS

from .conftest import close_in_thread


def test_events_tell_of_starts_and_ends(opened, output):
    events = []
    reader = opened.reader(on_event=events.append)
    for sender in (4, 5):
        sink = opened.sink(sender=sender)
        sink.put(output(sender))
        join = close_in_thread(sink)
        assert [record.step for record in reader] == [sender]
        join()
        assert events[-2:] == [SessionStarted(sink.session, sender, 1), SessionEnded(sink.session, sender, 1)]


def test_requests_are_unfinished_until_a_row_finishes_them(opened, output, steps):
    sink = opened.sink(heartbeat=30)
    sink.put(output(0, requests=("a", "b", "c")))
    sink.put(output(1, requests=("b",), finish=FinishReason.STOP))
    reader = opened.reader(lost_after=0.3)
    assert steps(reader, 2) == [0, 1]
    with pytest.raises(SessionLost) as caught:
        reader.read(10)
    assert caught.value.requests == ("a", "c")


def test_explicit_acknowledgement_is_what_makes_room(opened, output, steps):
    sink = opened.sink(capacity=2, deadline=0.05)
    reader = opened.reader(auto_ack=False)
    for step in range(2):
        sink.put(output(step))
    assert steps(reader, 2) == [0, 1]
    assert sink.counters()["unacknowledged"] == 2
    with pytest.raises(InvalidValue, match="3 was not read yet"):
        reader.acknowledge(sink.session, 3)
    with pytest.raises(TypeError):  # no sink would take it
        reader.acknowledge(sink.session, 2.0)
    reader.acknowledge(sink.session, np.int64(2))
    third = output(2)
    with contextlib.suppress(SinkFull):  # the acknowledgement may still be on its way
        sink.put(third)
    assert third.done.wait(10)
    assert steps(reader, 1) == [2]


def test_a_reader_that_is_never_idle_acknowledges_every_session(opened, output, monkeypatch):
    """A window may be full by its bytes after a few frames, all of which were read."""
    monkeypatch.setattr(TIMEOUTS, "pause", 1e-9)
    sink, reader = opened.sink(), opened.reader()
    sink.put(output(0))
    frame, receiver = reader.read(10), reader._receiver
    receiver.ready.append((Session(5, now=0.0, after=0), frame))
    assert reader.read(10) is frame
    assert receiver.sessions[sink.session].acknowledged == 1


def test_reading_times_out_and_a_closed_reader_can_be_closed_again(opened):
    reader = opened.reader(timeout=0.01)
    assert reader.read(0) is None
    assert list(reader) == []
    reader.close()
    reader.close()


def test_the_event_loop_is_free_while_a_reader_waits(opened, output):
    async def collect(reader, sink):
        reading = asyncio.create_task(anext(aiter(reader)))
        await asyncio.sleep(0)
        sink.put(output(0))
        return (await reading).step

    with opened.reader() as reader:
        assert asyncio.run(collect(reader, opened.sink())) == 0


def test_async_iteration_ends_with_the_last_session(opened, output):
    async def collect(reader):
        return [record.step async for record in reader]

    sink = opened.sink()
    for step in range(50):
        sink.put(output(step))
    reader = opened.reader()
    join = close_in_thread(sink)
    assert asyncio.run(collect(reader)) == list(range(50))
    join()


def test_a_reader_waits_for_a_worker_that_is_started_again(opened, output):
    def come_again():
        close()
        second = opened.sink()
        second.put(output(1))
        second.close(20)

    first, events = opened.sink(), []
    first.put(output(0))
    first.again = True
    records = iter(opened.reader(on_event=events.append))
    assert next(records).step == 0
    close = close_in_thread(first)
    thread = threading.Thread(target=come_again)
    thread.start()
    assert [record.step for record in records] == [1]
    thread.join()
    assert [event.again for event in events if isinstance(event, SessionEnded)] == [True, False]
