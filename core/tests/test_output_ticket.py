"""Waits for a step's output: the worker waits for the copy, the sink's thread for the worker that takes its steps."""

import threading

import numpy as np
import pytest
from hal_core import TIMEOUTS, MemorySink, Request, StateConfig, Step, TaskBatch
from hal_core.devices import CopyTicket
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import InvalidValue
from hal_core.output.ticket import OutputTicket
from hal_core.runtime.bound import bind


class Copy(CopyTicket):
    """A copy that has arrived once ``arrived`` is set; it records the threads that wait for it, and when its arrays
    are made.
    """

    mode = "async"

    def __init__(self, nbytes):
        super().__init__()
        self.bytes, self.arrived, self.noted = np.zeros(nbytes, np.uint8), threading.Event(), []

    @property
    def data(self):
        assert self.arrived.is_set(), "read before it was there"
        return [self.bytes]

    def ahead(self):
        self.noted.append("arrays")
        return [self.bytes]

    def done(self):
        return self.arrived.is_set()

    def _block(self, timeout):
        self.noted.append(threading.current_thread().name)
        return self.arrived.wait(timeout)

    def failure(self):
        return None


@pytest.fixture
def made():
    """``(state, make)``: ``make(number)`` gives the ticket of a step and its copy; the slots are as after insertion."""
    with bind(CpuPlugin.open(0, {})) as device:
        state = device.state(StateConfig(num_slots=2, max_model_len=16))
        requests = [state.admit(Request(f"r{i}", [1, 2])) for i in range(2)]
        batch = TaskBatch.prefill(range(2), requests, [2] * 2, [[0], [1]])
        device.insert_tasks(state=state, tasks=batch, stream=device.default_stream)
        part = state.output_range(topk=False)

        def make(number):
            copy = Copy(part.nbytes)
            copied = device.copy_out(memory=state.memory, parts=[part], stream=device.default_stream)
            copied.wait()
            copy.bytes[:] = copied.data[0]
            return OutputTicket(state, Step(number, {"target": np.arange(2)}), copy, part), copy

        yield state, make


def in_thread(call):
    """Call the function in a thread named "sink"; return its results once it is joined."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()), name="sink")
    thread.start()
    return thread, found


def test_what_needs_no_byte_is_made_before_the_worker_waits(made):
    state, make = made
    ticket, copy = make(0)
    copy.arrived.set()
    state.take(ticket)
    assert copy.noted == ["arrays", "MainThread"]


def test_a_sink_waits_for_a_taking_worker_not_for_the_device(made, monkeypatch):
    monkeypatch.setattr(TIMEOUTS, "output_look", 600.0)
    state, make = made
    first, copy = make(0)
    copy.arrived.set()
    state.take(first)
    ticket, copy = make(1)
    entered, wait = threading.Event(), OutputTicket._wait_for_worker
    monkeypatch.setattr(OutputTicket, "_wait_for_worker", lambda ticket: (entered.set(), wait(ticket)))
    thread, found = in_thread(ticket.resolve)
    assert entered.wait(60), "it waits for the device beside the worker"
    copy.arrived.set()
    record = state.take(ticket)
    thread.join(60)
    assert found[0] is record
    assert copy.noted[:2] == ["arrays", "MainThread"]


def test_a_sink_looks_for_itself_where_the_worker_is_late(made, monkeypatch):
    monkeypatch.setattr(TIMEOUTS, "output_look", 1e-3)
    state, make = made
    first, copy = make(0)
    copy.arrived.set()
    state.take(first)
    ticket, copy = make(1)
    copy.arrived.set()
    thread, found = in_thread(ticket.resolve)
    thread.join(60)
    assert found[0].step == 1


@pytest.mark.parametrize("taken", [False, True])
def test_a_sink_without_a_taking_worker_waits_for_the_device(made, taken):
    state, make = made
    if taken:
        first, copy = make(0)
        copy.arrived.set()
        state.take(first)
    ticket, copy = make(1)
    copy.arrived.set()
    if taken:
        assert ticket.resolve().step == 1
        return
    thread, found = in_thread(ticket.resolve)
    thread.join(60)
    assert found[0].step == 1
    assert "sink" in copy.noted


def saved(device, name="target"):
    state = device.state(StateConfig(num_slots=2, max_model_len=16), name=name)
    sink, step = MemorySink(), Step(0, {name: np.arange(2)})
    return state, device.save_output(state=state, step=step, sink=sink, stream=device.default_stream)


def test_g26_a_state_takes_its_own_output_and_no_other():
    """The output of another state, of this device or another, or any other ticket: refused, and nothing changes."""
    with bind(CpuPlugin.open(0, {})) as device, bind(CpuPlugin.open(0, {})) as other:
        (state, own), (_, draft), (_, theirs) = saved(device), saved(device, "draft"), saved(other)
        write = device.async_set_value(target=state.view("seed"), value=1, stream=device.default_stream)
        mirror = state.mirror
        for ticket in (draft, theirs, write, None, own.record(), state):
            with pytest.raises(InvalidValue, match="save_output") as raised:
                state.take(ticket)
            error = raised.value
            assert (error.device, error.hook, error.argument) == ("cpu:0", "take", "ticket")
            assert error.cure
        assert state.mirror is mirror
        assert state.taker == 0
        assert state.take(own).step == 0
        assert state.take(own) is own.record()
