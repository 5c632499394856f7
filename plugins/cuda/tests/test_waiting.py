"""Waits for a busy stream keep time-outs and signals, unlike the driver's own wait."""

import signal
import threading

import pytest
from hal_core import ByteRange, StateConfig
from hal_core.errors import TicketTimeout


class Interrupted(KeyboardInterrupt):
    """Raised by the handler, as Python's own raises KeyboardInterrupt for Ctrl-C."""


@pytest.fixture
def busy(opened):
    """Open a device with a stream that is held until the end of the test."""
    bound = opened()
    stream, library = bound.device.stream(), bound.device.driver.api.library
    state = bound.state(StateConfig(num_slots=4, max_model_len=16))
    library.stand_in_hold(stream.handle, 1)
    yield bound, state, stream
    library.stand_in_hold(stream.handle, 0)


@pytest.mark.parametrize("what", ["value", "copy", "stream"])
def test_a_wait_ends_at_its_time_out(busy, what):
    bound, state, stream = busy
    waits = {
        "value": bound.async_set_value(target=state.view("temperature"), value=0.5, stream=stream).wait,
        "copy": bound.copy_out(memory=state.memory, parts=[ByteRange(0, 8)], stream=stream).wait,
        "stream": stream.synchronize,
    }
    with pytest.raises(TicketTimeout):
        waits[what](0.05)


def test_a_signal_interrupts_a_wait_without_a_time_out(busy, monkeypatch):
    bound, state, stream = busy
    ticket = bound.async_set_value(target=state.view("temperature"), value=0.5, stream=stream)
    runtime, main, begun = bound.device._runtime, threading.get_ident(), threading.Event()
    library = bound.device.driver.api.library

    def handler(number, frame):
        raise Interrupted

    def send():
        begun.wait(20)
        signal.pthread_kill(main, signal.SIGUSR1)
        if not over.wait(20):
            library.stand_in_hold(stream.handle, 0)  # otherwise the test would wait forever

    passes, over = runtime._passes, threading.Event()
    monkeypatch.setattr(runtime, "_passes", lambda *given: begun.set() or passes(*given))
    before, thread = signal.signal(signal.SIGUSR1, handler), threading.Thread(target=send)
    try:
        thread.start()
        with pytest.raises(Interrupted):
            ticket.wait()
        assert not ticket.done(), "the wait went on until the stream did"
    finally:
        over.set()
        thread.join(30)
        signal.signal(signal.SIGUSR1, before)
