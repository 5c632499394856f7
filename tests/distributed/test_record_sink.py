"""The sink of a rank's records: which thread sends, in which order, and its end."""

import threading

import numpy as np
import pytest
from hal_core import SinkClosed
from hal_core.output.records import OutputRecord, SlotStatus
from hal_core.slots.fields import FinishReason
from hal_engine.distributed.control_channel import ControlEnd
from hal_engine.distributed.record_sink import RecordSink
from hal_engine.transport.channel import Channel

PATIENCE = 20.0


class Output:
    """A pending output, ready once ``latch`` is set; it notes the thread that resolved it."""

    request_ids = ("a",)

    def __init__(self, step, latch=None):
        self.step, self.latch, self.thread, self.done = step, latch, None, threading.Event()
        self.error = None

    def ready(self):
        return self.latch is None or self.latch.is_set()

    def resolve(self):
        self.thread = threading.get_ident()
        assert self.latch is None or self.latch.wait(PATIENCE)
        status, finish = np.full(1, SlotStatus.TOKEN, np.uint8), np.full(1, FinishReason.NONE, np.uint8)
        position, token, count = np.array([self.step]), np.array([7]), np.ones(1, np.int32)
        return OutputRecord(self.step, ("a",), status, finish, position, count, token, np.zeros(1, np.bool_))

    def complete(self, error):
        self.error = error
        self.done.set()


@pytest.fixture
def ends():
    """Both ends of a control channel, and a sink on one."""
    own, other = (ControlEnd(channel) for channel in Channel.pair())
    sink = RecordSink(own)
    yield sink, other
    sink.close(PATIENCE)
    own.channel.close()
    other.channel.close()


def steps(end, *outputs):
    """Return the steps of the records that have come, once these outputs were completed."""
    for output in outputs:
        assert output.done.wait(PATIENCE)
        assert output.error is None
    return [record.step for record in end.receive()]


def test_a_ready_output_is_sent_by_the_caller(ends):
    sink, other = ends
    output = Output(1)
    sink.put(output)
    assert output.done.is_set()
    assert output.thread == threading.get_ident()
    assert steps(other, output) == [1]


def test_outputs_leave_in_order_whichever_thread_sends(ends):
    sink, other = ends
    latch = threading.Event()
    late, ready = Output(1, latch), Output(2)
    sink.put(late)
    sink.put(ready)
    assert not ready.done.is_set()
    latch.set()
    assert steps(other, late, ready) == [1, 2]
    sink.put(last := Output(3))
    assert steps(other, last) == [3]


def test_an_engine_that_has_gone_closes_the_sink(ends):
    sink, other = ends
    other.channel.close()
    sink.put(Output(1))
    with pytest.raises(SinkClosed, match="takes no records"):
        sink.put(Output(2))
