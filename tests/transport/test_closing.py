"""A session that ends at a reader which has not read yet, and a reader that closes while its sinks do not read."""

import select
import time

from hal_core import MemorySink
from hal_engine.distributed.control_channel import ControlEnd
from hal_engine.distributed.record_sink import RecordSink
from hal_engine.reading import OutputReader
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport import open_sink
from hal_engine.transport.channel import Channel, connect
from hal_engine.transport.delivery import Delivery


def test_a_sink_without_records_ends_its_session_at_a_silent_reader():
    """The reader took the end of the connection for a loss."""
    with OutputReader() as reader:
        sink = open_sink(reader.url)
        assert select.select(reader.sockets, [], [], 30.0)[0], "no greeting came"
        sink.close(30.0)
        assert reader.read(30.0) is None


def test_a_sink_may_be_closed_without_a_limit(opened, output):
    """Locks take no infinite wait: the error left a sink that was closed, and named no output that was lost."""
    memory, ends = MemorySink(threaded=True), Channel.pair()
    memory.put(output(0))
    for sink in (memory, opened.sink(), RecordSink(ControlEnd(ends[0]))):
        sink.close(float("inf"))
    for end in ends:
        end.close()


def test_a_sinks_thread_parts_in_less_time_than_its_close_waits_for_it(monkeypatch):
    """Both had the same time, so that the thread could outlive the sink."""
    waits = []

    def part(delivery, wait, bye):
        waits.append(wait)
        former(delivery, wait, bye)

    former = Delivery.part
    monkeypatch.setattr(Delivery, "part", part)
    with OutputReader() as reader:
        sink = open_sink(reader.url)
        reader.read(0.0)
        sink.close(30.0)
    assert [0 < wait <= TIMEOUTS.parting / 2 for wait in waits] == [True]


def test_a_peer_that_does_not_read_delays_a_closing_reader_by_a_bounded_time():
    reader = OutputReader()
    peer = connect(reader.url, "records")
    while not reader._receiver.hub.channels:
        reader.read(0.01)
    (channel,) = reader._receiver.hub.channels
    channel.send(bytes(16 << 20))
    began = time.monotonic()
    reader.close()
    assert time.monotonic() - began < TIMEOUTS.parting + 10
    peer.close()
