"""A device with real streams in plain Python: a thread each, in order, held at will. It tests the kit's latches.

The host's memory stands for the device's, but it is touched on the streams' threads alone, and what is written is
read from a fenced ring when the work runs.
"""

import threading
from collections import deque
from contextlib import contextmanager

import numpy as np
from hal_core import advance as reference
from hal_core.base import DeviceBase
from hal_core.capabilities import Capabilities
from hal_core.counters import Counters
from hal_core.cpu.device import host_view
from hal_core.cpu.memory import HostMemory
from hal_core.errors import DeviceClosed, InvalidValue, TicketTimeout
from hal_core.plan import Records, WritePlan, apply_to_host
from hal_core.staging import StagingRing
from hal_core.tickets import Ticket
from hal_core.transfers import CopyTicket
from hal_core.views import View


class Point:
    """An event: set when the stream's thread gets there."""

    def __init__(self):
        self._passed = threading.Event()
        self.set, self.done, self._wait = self._passed.set, self._passed.is_set, self._passed.wait

    def wait(self, timeout=None):
        return self._wait(timeout)


class QueuedStream:
    """Work in order, on a thread of its own."""

    def __init__(self, handle):
        self.handle = handle
        self._work, self._some = deque(), threading.Condition()
        self._holds, self._running = 0, True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, work):
        with self._some:
            self._work.append(work)
            self._some.notify_all()

    def _run(self):
        while True:
            with self._some:
                self._some.wait_for(lambda: (self._work and not self._holds) or not self._running)
                if not self._work or self._holds:
                    return
                work = self._work.popleft()
            work()

    def record(self):
        point = Point()
        self.put(point.set)
        return point

    def wait(self, event):
        self.put(event.wait)

    def synchronize(self, timeout=None):
        if not self.record().wait(timeout):
            raise TicketTimeout("the stream is busy", cure="wait longer", argument="stream")

    def hold(self, by):
        with self._some:
            self._holds += by
            self._some.notify_all()

    def end(self):
        with self._some:
            self._running, self._holds = False, 0
            self._some.notify_all()
        self._thread.join(10)


class PointTicket(Ticket):
    mode = "async"

    def __init__(self, point):
        super().__init__()
        self.point = point

    def done(self):
        return self.point.done()

    def _block(self, timeout):
        return self.point.wait(timeout)

    def failure(self):
        return None


class QueuedCopy(PointTicket, CopyTicket):
    def __init__(self, point, data):
        super().__init__(point)
        self._data = data

    @property
    def data(self):
        assert self.done(), "read before the copy was there"
        return self._data


class Block:
    def __init__(self, nbytes):
        self.buffer = np.zeros(nbytes, np.uint8)
        self.address = self.buffer.ctypes.data

    def release(self):
        pass


class QueuedDevice(DeviceBase):
    name = "queued"
    capabilities = Capabilities(
        async_h2d=True, async_d2h=True, fused_scatter=True, pinned_host=False, can_hold_stream=True, collective=""
    )

    def __init__(self, index=0, options=None):
        super().__init__(index)
        self.streams, self.closed = [], False
        self.main = self.stream()
        self.staging = StagingRing(Block, start=1 << 16, limit=8 << 20)
        self.reached = 0
        self.copies = self.stream()

    def counters(self):
        counted = super().counters()
        return counted - Counters(ring_waits=-self.staging.waits)

    def probe_counts(self):
        true = super().counters()
        return Counters(submissions=self.reached, uploads=self.reached, copies_out=true.copies_out)

    @property
    def default_stream(self):
        return self.main

    def stream(self):
        self.streams.append(QueuedStream(len(self.streams)))
        return self.streams[-1]

    def allocate(self, nbytes):
        if self.closed:
            raise DeviceClosed("the device is closed", cure="open it again", device="queued:0")
        return HostMemory.allocate(self, nbytes)

    def resolve(self, target):
        if not isinstance(target, View):
            raise InvalidValue(f"{type(target).__name__} is no tensor", cure="give a view", argument="target")
        return target

    def submit(self, plan, stream):
        payload, records = plan.payload, plan.records
        packed = payload.nbytes + (records.data.nbytes if records else 0)
        span = self.staging.take(packed)
        buffer = span.buffer
        buffer[: payload.nbytes] = payload
        taken = None
        if records is not None:
            buffer[payload.nbytes :] = records.data.reshape(-1)
            taken = Records(records.slots.copy(), buffer[payload.nbytes :].reshape(records.data.shape), records.spread)
        late = WritePlan(plan.memory, plan.writes.copy(), [buffer[: payload.nbytes]], taken)
        self.count("submissions")
        self.count("uploads")

        def run():
            self.reached += 1
            apply_to_host(late, plan.memory.buffer)

        stream.put(run)
        point = stream.record()
        self.staging.fence(span, point)
        return PointTicket(point)

    def copy_out(self, memory, parts, stream):
        data = [np.zeros(part.nbytes, np.uint8) for part in parts]
        self.count("copies_out", len(parts))

        def run():
            for part, target in zip(parts, data, strict=True):
                target[...] = memory.buffer[part.offset : part.end]

        stream.put(run)
        return QueuedCopy(stream.record(), data)

    def copy_within(self, target, value, stream):
        stream.put(lambda: host_view(target).__setitem__(..., host_view(value).copy().reshape(target.shape)))
        return PointTicket(stream.record())

    def advance(self, state, step, stream):
        names = (*reference.READS, *reference.WRITES, "token_ids")

        def run():
            fields = {name: host_view(state.view(name)) for name in names}
            reference.advance(fields, state.sizes, speculative=step.speculative)

        stream.put(run)
        return PointTicket(stream.record())

    @contextmanager
    def hold(self, stream):
        stream.hold(1)
        try:
            yield
        finally:
            stream.hold(-1)

    def close(self):
        self.closed = True
        for stream in self.streams:
            stream.end()


def queued():
    return QueuedDevice()
