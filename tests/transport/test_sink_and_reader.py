"""The transport with frames: no record is lost or repeated, no wait is endless, and failures are named."""

import gc
import os
import random
import threading

import numpy as np
import pytest
from hal_core.errors import InvalidValue, SinkClosed, SinkFull, Undelivered
from hal_core.output.sinks import Sink
from hal_engine.reading import Gap, OutputReader, SessionLost
from hal_engine.transport import open_sink

from .conftest import close_in_thread


@pytest.mark.parametrize("reader_first", [True, False])
def test_g19_every_record_comes_once_in_order_whoever_starts_first(opened, output, reader_first):
    reader = opened.reader() if reader_first else None
    sink = opened.sink()
    assert isinstance(sink, Sink)
    outputs = [output(step) for step in range(200)]
    for pending in outputs:
        sink.put(pending)
    reader = reader or opened.reader()
    join = close_in_thread(sink)
    records = list(reader)  # ends without a call when the sink has sent its final message
    join()
    assert [record.step for record in records] == list(range(200))
    assert records[7].tokens.tolist() == [700, 701]
    assert all(pending.settled == [None] for pending in outputs)
    assert reader.counters() == {"frames": 200, "duplicates": 0, "skipped": 0}


def test_large_records_and_tcp_work_the_same(output):
    big = output(3, requests=[f"request-{row:06d}" for row in range(20_000)])
    with OutputReader("tcp://127.0.0.1:*", timeout=10) as reader:
        sink = open_sink(reader.url)
        sink.put(big)
        sink.put(output(4))
        join = close_in_thread(sink)
        first, second = list(reader)
        join()
    assert first == big.resolve()
    assert second.step == 4


def test_g19_a_record_whose_handling_failed_comes_again(opened, output, steps):
    sink = opened.sink()
    for step in range(1, 6):
        sink.put(output(step))

    def work():
        with opened.reader() as reader:
            for record in reader:
                if record.step == 3:
                    raise RuntimeError("the engine's own")

    with pytest.raises(RuntimeError, match="own"):
        work()
    again = opened.reader()
    assert steps(again, 3) == [3, 4, 5]
    join = close_in_thread(sink)
    assert again.read(10) is None
    join()


def test_g19_a_reader_that_starts_again_goes_on_after_its_cursor(opened, output, steps):
    sink = opened.sink()
    for step in range(1, 11):
        sink.put(output(step))
    with opened.reader(auto_ack=False) as reader:
        assert steps(reader, 8) == list(range(1, 9))
        reader.acknowledge(sequence=3)
        cursor = (sink.session, np.int64(5))
    sink.put(output(11))
    with opened.reader(after=cursor) as reader:
        assert steps(reader, 6) == [6, 7, 8, 9, 10, 11]
        assert sink.counters()["resent"] == 5
        join = close_in_thread(sink)
        assert list(reader) == []
    join()


def test_g19_without_a_cursor_a_reader_gets_all_that_none_has_acknowledged(opened, output, steps):
    sink = opened.sink()
    for step in range(1, 6):
        sink.put(output(step))
    with opened.reader(auto_ack=False) as reader:
        assert steps(reader, 4) == [1, 2, 3, 4]
        assert reader.cursors == {sink.session: 4}
        reader.acknowledge(sink.session, 2)
    with opened.reader() as reader:
        assert steps(reader, 3) == [3, 4, 5]


def test_g19_what_a_cursor_wants_and_the_sender_no_longer_has_is_a_gap(opened, output, steps):
    sink = opened.sink()
    for step in range(1, 6):
        sink.put(output(step))
    with opened.reader() as reader:
        assert steps(reader, 4) == [1, 2, 3, 4]  # acknowledged at close
    with opened.reader(after=(sink.session, 1)) as reader:
        with pytest.raises(Gap, match=r"frames 2 to 4 .* no longer holds them") as caught:
            reader.read(10)
        assert (caught.value.first, caught.value.last) == (2, 4)
        assert steps(reader, 1) == [5]


def test_g23_a_full_sink_raises_at_its_deadline_and_keeps_the_record(opened, output, steps, url):
    sink = opened.sink(capacity=3, deadline=0.05)
    outputs = [output(step) for step in range(5)]
    for pending in outputs[:3]:
        sink.put(pending)
    for pending in outputs[3:]:
        with pytest.raises(SinkFull, match=rf"save_output: sink: no room for 0.05 s.*no reader answers on {url}"):
            sink.put(pending)
    assert steps(opened.reader(), 5) == [0, 1, 2, 3, 4]
    assert [pending.settled for pending in outputs] == [[None]] * 5


def test_g23_bytes_are_bounded_too_and_room_ends_the_wait(opened, output, steps):
    sink = opened.sink(capacity_bytes=1, deadline=10)
    first = output(0)
    sink.put(first)
    assert first.done.wait(10)
    putting = threading.Thread(target=lambda: sink.put(output(1)))
    putting.start()
    reader = opened.reader()
    assert steps(reader, 1) == [0]
    assert reader.read(10).record.step == 1  # requesting it acknowledged the first, which made room
    putting.join(10)
    assert not putting.is_alive()


def test_g23_put_returns_while_the_copy_out_is_held(opened, output, steps):
    latch = threading.Event()
    sink = opened.sink()
    held, after = output(0, latch=latch), output(1)
    sink.put(held)
    sink.put(after)
    assert held.entered.wait(10)
    assert not held.settled
    assert not after.settled
    latch.set()
    assert steps(opened.reader(), 2) == [0, 1]


def test_g21_a_failed_record_ends_with_its_error_without_a_gap(opened, output):
    sink = opened.sink()
    error = InvalidValue("9 drafts, the bound is 6")
    outputs = [output(0), output(1, error=error), output(2, requests=("\ud800",)), output(3)]
    for pending in outputs:
        sink.put(pending)
    reader = opened.reader()
    frames = [reader.read(10) for _ in range(2)]
    assert [(frame.record.step, frame.header.sequence) for frame in frames] == [(0, 1), (3, 2)]
    assert outputs[1].settled == [error]
    assert isinstance(outputs[2].settled[0], InvalidValue)


def test_g19_closing_without_a_reader_names_what_was_not_delivered(opened, output):
    sink = opened.sink()
    sink.put(output(7))
    sink.put(output(8, requests=("c",)))
    with pytest.raises(Undelivered, match=r"a at 7 .1 tokens.*no reader answers") as caught:
        sink.close(0.05)
    assert caught.value.records == (("a", 7, 1), ("b", 7, 1), ("c", 8, 1))
    sink.close(0.05)  # reported once


def test_g19_closing_after_the_readers_death_names_unacknowledged_tokens(opened, output, steps):
    sink = opened.sink()
    reader = opened.reader()
    for step in range(3):
        sink.put(output(step, requests=("a",)))
    assert steps(reader, 3) == [0, 1, 2]
    reader.close()
    sink.put(output(3, requests=("a",)))
    with pytest.raises(Undelivered) as caught:
        sink.close(0.2)
    assert caught.value.records[-1] == ("a", 3, 1)
    assert ("a", 0, 1) not in caught.value.records


def test_g19_closing_while_the_device_hangs_names_the_requests(opened, output):
    latch = threading.Event()
    sink = opened.sink()
    held, queued = output(0, requests=("held",), latch=latch), output(1, requests=("queued",))
    sink.put(held)
    sink.put(queued)
    assert held.entered.wait(10)
    with pytest.raises(Undelivered) as caught:
        sink.close(0.01)
    latch.set()
    assert caught.value.records == (("held", -1, -1), ("queued", -1, -1))
    assert held.done.wait(10)
    assert isinstance(held.settled[0], SinkClosed)
    assert isinstance(queued.settled[0], SinkClosed)


def test_g19_what_is_resolved_while_the_sink_gives_up_is_named_too(opened, output):
    """The copy ends between the request to leave and the report: it is neither in hand any more nor forgotten."""
    latch = threading.Event()
    sink = opened.sink()
    held = output(0, requests=("held",), latch=latch)
    sink.put(held)
    assert held.entered.wait(10)

    def wake(former=sink._wake_thread):
        former()
        if sink._stop:
            latch.set()

    sink._wake_thread = wake
    with pytest.raises(Undelivered) as caught:
        sink.close(0.01)
    assert caught.value.records == (("held", 0, 1),)


def test_a_closed_sink_and_one_of_a_forked_child_take_nothing(opened, output):
    sink = opened.sink()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # the child only reports the error, and exits without any clean-up of the parent's objects
        try:
            sink.put(output(0))
        except SinkClosed as error:
            os.write(write_end, str(error).encode())
        sink.close(1)
        os._exit(0)
    os.waitpid(child, 0)
    assert b"forked" in os.read(read_end, 1000)
    os.close(read_end)
    os.close(write_end)
    sink.close(1)
    with pytest.raises(SinkClosed, match="is closed"):
        sink.put(output(0))


def test_a_forked_child_closes_a_readers_descriptors_once(url):
    """Files that get the numbers then stay open, whatever becomes of the reader there, and in the child's children."""
    reader = OutputReader(url)
    child = os.fork()
    if child == 0:
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
        grandchild = os.fork()
        if grandchild:
            del reader
            gc.collect()
        try:
            for file in files:
                os.fstat(file)
        except OSError:
            os._exit(1)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) if grandchild else 0)
    reader.close()
    assert os.waitpid(child, 0)[1] == 0


def test_a_session_that_falls_silent_is_lost_once_and_then_refused(opened, output, steps):
    """Records that the reader has given up must not arrive later: their requests run elsewhere by then."""
    sink = opened.sink(heartbeat=30)
    sink.put(output(0, requests=("a", "b")))
    reader = opened.reader(lost_after=0.3)
    assert steps(reader, 1) == [0]
    with pytest.raises(SessionLost, match="fell silent") as caught:
        reader.read(10)
    assert (caught.value.session, caught.value.last_sequence) == (sink.session, 1)
    assert caught.value.requests == ("a", "b")
    late = output(1, requests=("a",))
    sink.put(late)
    assert reader.read(0.5) is None
    with pytest.raises(Undelivered, match="declared this session lost") as undelivered:
        sink.close(5)
    assert ("a", 1, 1) in undelivered.value.records


def test_g19_every_token_is_accounted_for_once_while_readers_change(opened, output):
    """A tiny queue and readers that stop anywhere, acknowledge some of it, and continue from their cursor."""
    draw = random.Random(5)
    sink = opened.sink(capacity=4, deadline=30, heartbeat=0.02)
    count, kept, cursor = 300, [], None
    sending = threading.Thread(target=lambda: [sink.put(output(step)) for step in range(count)])
    sending.start()
    while len(kept) < count:
        with opened.reader(after=cursor, auto_ack=False) as reader:
            for _ in range(min(draw.randrange(1, 40), count - len(kept))):
                frame = reader.read(10)
                kept.append(frame.record)
                cursor = (frame.header.session, frame.header.sequence)
                if draw.random() < 0.5 or len(kept) % 4 == 0:  # four without a message fill the queue
                    reader.acknowledge()
            if draw.random() < 0.5:
                reader.acknowledge()
    sending.join(10)
    with opened.reader(after=cursor) as reader:
        assert reader.read(0.3) is None  # meets the sink, which receives the cursor
        join = close_in_thread(sink)
        assert list(reader) == []
        join()
    assert [record.step for record in kept] == list(range(count))
    assert np.concatenate([record.tokens for record in kept]).tolist() == [
        100 * step + row for step in range(count) for row in range(2)
    ]
