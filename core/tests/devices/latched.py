"""Asynchronous runtime in plain Python: a test decides when queued work executes, and misuse is recorded.

Work touches memory when it executes, so bytes that were changed or freed too early are visible. A waiting host
executes
all queued work, unless the runtime is set to hang.
"""

import ctypes
import threading
from collections import deque

import numpy as np
from hal_core.contract.capabilities import Capabilities
from hal_core.devices.asynchronous import AsyncDevice
from hal_core.devices.primitives import Primitives
from hal_core.devices.ring_options import RingOptions
from hal_core.errors import OutOfMemory
from hal_core.memory.packing import apply_packed
from hal_core.memory.plan import SCATTER_MAP
from hal_core.slots import update as reference


def at(address, nbytes):
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class Line:
    """A stream: its queued work, and how many entries were executed."""

    made = 0

    def __init__(self):
        Line.made += 1
        self.handle, self.work, self.put, self.done = Line.made, deque(), 0, 0


class Flag:
    """An event: a position in a stream."""

    def __init__(self):
        self.line, self.place = None, 0


class LatchedPrimitives(Primitives):
    """``hangs``: waits end and execute no work. ``fail``: the primitive that raises, and at which call of it."""

    rerecords = True

    def __init__(self, room=1 << 30):
        self.lines, self.blocks, self.host, self.waited, self.threads = [], {}, {}, [], set()
        self.room, self.hangs, self.fail, self.error, self.raises = room, False, None, None, None
        self.destroyed, self.wrong = 0, []
        self.calls = 0

    def _enter(self, name):
        self.threads.add(threading.get_ident())
        if self.fail and self.fail[0] == name:
            self.fail = (name, self.fail[1] - 1) if self.fail[1] else None
            if self.fail is None:
                raise RuntimeError(f"{name} failed on purpose")

    def _put(self, line, work):
        self.calls += 1
        line.work.append(work)
        line.put += 1

    # -- executing ----------------------------------------------------------------------------------------------------

    def run(self, line, count=1 << 30):
        """Execute up to ``count`` entries of a stream, and the work that they wait for."""
        while line.work and count:
            line.work.popleft()()
            line.done += 1
            count -= 1

    def passed(self, line, place):
        return line is None or line.done >= place

    def reach(self, line, place):
        if line is not None:
            self.run(line, max(0, place - line.done))

    def check(self, address, nbytes, blocks, what):
        if not any(begin <= address and address + nbytes <= begin + size for begin, (size, _) in blocks.items()):
            self.wrong.append(f"{what} of memory that was given back")
            return False
        return True

    # -- streams and events -------------------------------------------------------------------------------------------

    def stream_create(self):
        self._enter("stream_create")
        self.lines.append(Line())
        return self.lines[-1]

    def stream_destroy(self, stream):
        self._enter("stream_destroy")
        self.destroyed += 1

    def stream_wait(self, stream, event):
        self._enter("stream_wait")
        line, place = event.line, event.place
        self._put(stream, lambda: self.reach(line, place))

    def event_create(self):
        self._enter("event_create")
        return Flag()

    def event_record(self, event, stream):
        self._enter("event_record")
        self._put(stream, lambda: None)
        event.line, event.place = stream, stream.put

    def event_query(self, event):
        self._enter("event_query")
        if self.raises:
            raise self.raises
        return self.passed(event.line, event.place)

    def event_synchronize(self, event, timeout):
        self._enter("event_synchronize")
        if not self.passed(event.line, event.place):
            self.waited.append((event.line, event.place))
            if not self.hangs:
                self.reach(event.line, event.place)
        return self.event_query(event)

    def event_error(self, event):
        return self.error

    # -- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes):
        self._enter("allocate")
        if sum(size for size, _ in self.blocks.values()) + nbytes > self.room:
            raise OutOfMemory("no room", cure="free some")
        raw = np.full(nbytes + 64, 0xCB, np.uint8)
        address = -(-raw.ctypes.data // 64) * 64
        self.blocks[address] = nbytes, raw
        return address

    def free(self, address):
        self._enter("free")
        self.blocks.pop(address)[1][...] = 0xDD

    def allocate_host(self, nbytes):
        self._enter("allocate_host")
        raw = np.full(nbytes + 256, 0xEE, np.uint8)
        address = -(-raw.ctypes.data // 256) * 256
        self.host[address] = nbytes, raw
        return address

    def free_host(self, address):
        self._enter("free_host")
        self.host.pop(address)[1][...] = 0xDD

    # -- work ---------------------------------------------------------------------------------------------------------

    def copy_in(self, target, source, nbytes, stream):
        self._enter("copy_in")
        self._put(stream, lambda: self._move(target, source, nbytes, self.blocks, self.host))

    def copy_out(self, target, source, nbytes, stream):
        self._enter("copy_out")
        self._put(stream, lambda: self._move(target, source, nbytes, self.host, self.blocks))

    def _move(self, target, source, nbytes, to, of):
        if self.check(target, nbytes, to, "a copy to") and self.check(source, nbytes, of, "a copy"):
            at(target, nbytes)[...] = at(source, nbytes)

    def launch(self, launch, block, stream):
        self._enter("launch")
        packed = launch.packed

        def work():
            if self.check(block, packed.nbytes, self.blocks, "a launch that reads"):
                scatter_map = at(launch.scatter_map, launch.fields * SCATTER_MAP.itemsize).view(SCATTER_MAP)
                if self.check(launch.address, launch.nbytes, self.blocks, "a launch that writes"):
                    apply_packed(packed, at(block, packed.nbytes), scatter_map, at(launch.address, launch.nbytes))

        self._put(stream, work)


class LatchedDevice(AsyncDevice):
    name = "latched"
    capabilities = Capabilities(
        async_h2d=True, async_d2h=True, fused_scatter=True, pinned_host=True, can_hold_stream=False, collective=""
    )

    def __init__(self, index=0, *, room=1 << 30, **ring):
        super().__init__(index, LatchedPrimitives(room), RingOptions(**ring))

    def update_inputs(self, state, step, stream):
        own = self.own_stream(stream)
        self.order_after_reads(own, state.memory)
        names = reference.STEP_FIELDS
        block = at(state.memory.address, state.memory.nbytes)
        fields = {}
        for name in names:
            view = state.view(name)
            fields[name] = np.ndarray(view.shape, view.dtype.storage, block, view.offset, view.strides)
        self.primitives._put(
            own.raw, lambda: reference.update_inputs(fields, state.sizes, speculative=step.speculative)
        )
        return self.ticket(own)


class RunByRun(LatchedDevice):
    """A device that cannot launch a plan."""

    capabilities = Capabilities(
        async_h2d=True, async_d2h=True, fused_scatter=False, pinned_host=True, can_hold_stream=False, collective=""
    )
