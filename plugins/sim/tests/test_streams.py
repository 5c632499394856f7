"""Streams and events: when work runs, and its waits. Shown with latches, never with sleep."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hal_core.errors import InvalidValue, TicketTimeout
from hal_sim import PENDING_POISON, DeviceFault, KernelFunction, Mode, SubmissionRefused, options

PENDING = bytes([PENDING_POISON])


class Gate:
    """A kernel that reports its begin and ends when it is opened."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.kernel = KernelFunction(self._run)

    def _run(self, kernel, arguments, nbytes) -> None:
        self.entered.set()
        assert self.open.wait(30)


def test_a_held_stream_runs_nothing_until_it_is_released(bench):
    stream, address = bench.stream(), bench.memory(8)
    with stream.held():
        bench.device.fill(address, 8, 7, 1, stream)
        assert stream.pending == 1
        assert not stream.query()
        with pytest.raises(TicketTimeout, match="it is held"):
            stream.synchronize(timeout=0.01)
        assert bench.device.peek(address, 8) != bytes([7]) * 8
    stream.synchronize()
    assert bench.device.peek(address, 8) == bytes([7]) * 8
    assert stream.query()


def test_a_stream_is_not_done_while_its_last_operation_runs():
    """The queue is empty then, and torch's openreg answers "done"."""
    from hal_sim import Accelerator

    with options(mode=Mode.WORKER):
        device = Accelerator(0)
        stream, gate, event = device.stream(), Gate(), device.event()
        device.launch_callable(gate.kernel, b"", stream)
        event.record(stream)
        assert gate.entered.wait(30)
        assert stream.pending == 1
        assert not stream.query()
        assert not event.query()
        gate.open.set()
        stream.synchronize()
        assert stream.query()
        assert event.query()
        event.close()
        stream.close()
        device.reset()


def test_lazy_runs_as_late_as_possible_and_no_further_than_asked(lazy):
    stream, address = lazy.stream(), lazy.memory(2)
    lazy.device.fill(address, 1, 1, 1, stream)
    event = lazy.device.event().record(stream)
    lazy.device.fill(address + 1, 1, 2, 1, stream)
    assert stream.pending == 2
    event.synchronize()
    assert lazy.device.peek(address, 2) == bytes([1, 0xCB])
    assert stream.pending == 1
    event.close()


def test_lazy_polling_ends_some_day(lazy):
    stream, address = lazy.stream(), lazy.memory(1)
    lazy.device.fill(address, 1, 1, 1, stream)
    event = lazy.device.event().record(stream)
    with options(polls=3):
        assert [event.query() for _ in range(2)] == [False, False]
        polls = 0
        while not event.query():
            polls += 1
            assert polls < 10**7
    event.close()


def test_worker_runs_without_being_asked():
    from hal_sim import Accelerator

    with options(mode=Mode.WORKER):
        device = Accelerator(0)
        stream, gate = device.stream(), Gate()
        gate.open.set()
        device.launch_callable(gate.kernel, b"", stream)
        assert gate.entered.wait(30)
        stream.synchronize()
        stream.close()
        device.reset()


def test_eager_has_run_when_the_call_returns():
    from hal_sim import Accelerator

    with options(mode=Mode.EAGER):
        device = Accelerator(0)
        stream, address = device.stream(), device.allocate(1)
        device.fill(address, 1, 5, 1, stream)
        assert device.peek(address, 1) == b"\x05"
        stream.synchronize()
        device.free(address)
        stream.close()
        device.reset()


def test_a_stream_waits_for_an_event_of_a_held_stream(bench):
    """Eager must not wait here: the host continues, as with a real device."""
    first, second, address = bench.stream(), bench.stream(), bench.memory(8)
    out = bench.pinned(8)
    event = bench.device.event()
    with first.held():
        bench.device.fill(address, 8, 3, 1, first)
        event.record(first)
        second.wait(event)
        bench.device.d2h(out.address, address, 8, second)
        assert not second.query()
        assert bytes(out.array) == PENDING * 8
    second.synchronize()
    assert bytes(out.array) == bytes([3]) * 8
    assert bench.device.races() == []
    event.close()


def test_an_event_marks_what_was_there_when_it_was_recorded(bench):
    stream, address = bench.stream(), bench.memory(1)
    event = bench.device.event()
    assert event.query(), "never recorded counts as done"
    with stream.held():
        event.record(stream)
        bench.device.fill(address, 1, 1, 1, stream)
        assert event.query(), "nothing was before it"
        event.record(stream)
        assert not event.query(), "recorded again, it has moved"
    event.synchronize()
    assert event.query()
    event.close()
    with pytest.raises(InvalidValue, match="no event"):
        event.record(stream)


def test_a_destroyed_stream_finishes_its_work_and_takes_no_more(bench):
    stream, address = bench.stream(), bench.memory(1)
    bench.device.fill(address, 1, 9, 1, stream)
    event = bench.device.event().record(stream)
    handle = stream.handle
    bench.streams.remove(stream)
    stream.close()
    stream.close()
    event.synchronize()
    assert bench.device.peek(address, 1) == b"\x09"
    with pytest.raises(InvalidValue, match="no stream"):
        bench.device._native.check(bench.device._native.stream_hold(handle, 1))
    bench.device.synchronize()
    event.close()


def test_a_refused_submission_queues_nothing(lazy):
    stream, address = lazy.stream(), lazy.memory(1)
    with options(fail_submission=2):
        lazy.device.fill(address, 1, 1, 1, stream)
        with pytest.raises(SubmissionRefused):
            lazy.device.fill(address, 1, 2, 1, stream)
        assert stream.pending == 1
    stream.synchronize()
    assert lazy.device.peek(address, 1) == b"\x01"


def test_waits_that_block_are_told_from_those_that_need_not(bench, mode):
    stream, address = bench.stream(), bench.memory(1)
    with stream.held():
        bench.device.fill(address, 1, 1, 1, stream)
    stream.synchronize()
    stream.synchronize()
    counters = bench.device.counters()
    assert counters["host_waits"] == counters["wait_stream"] == 2
    assert counters["blocked_wait"] <= 1 if mode is not Mode.LAZY else counters["blocked_wait"] == 1


def test_the_child_of_a_fork_refuses_what_needs_a_worker(lazy):
    stream, address = lazy.stream(), lazy.memory(1)
    lazy.device.fill(address, 1, 1, 1, stream)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        lines = []
        for call in (stream.synchronize, lambda: lazy.device.fill(address, 1, 1, 1, stream), lazy.device.stream):
            try:
                call()
                lines.append("no error")
            except Exception as error:  # noqa: BLE001 - the child reports whatever it met
                lines.append(f"{type(error).__name__}: {error}")
        os.write(write, "\n".join(lines).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        lines = pipe.read().splitlines()
    os.waitpid(child, 0)
    assert len(lines) == 3
    assert all(line.startswith("DeviceClosed") and "forked" in line for line in lines), lines
    stream.synchronize()


def test_a_failing_kernel_is_reported_by_the_next_wait_alone(bench):
    stream, address = bench.stream(), bench.memory(16)
    arguments = np.array([address, 2, 5], dtype=np.int64).tobytes()
    bench.device.fill(address, 16, 1, 8, stream)
    bench.device.launch("add_i64", arguments, stream)
    stream.synchronize()
    assert np.frombuffer(bench.device.peek(address, 16), np.int64).tolist() == [6, 6]
    bench.device.launch("add_i64", b"short", stream)
    with pytest.raises(DeviceFault, match="add_i64 takes an address, a count and a value"):
        stream.synchronize()
    stream.synchronize()
    with pytest.raises(InvalidValue, match="no kernel function is named 'nothing'"):
        bench.device.launch("nothing", b"", stream)
