"""Two ranks over NCCL in one process: the product's code over the stand-ins for CUDA's and NCCL's libraries."""

import ctypes
import threading

import numpy as np
import pytest
from hal_core.errors import InvalidValue, StateUnusable
from hal_core.memory.views import ByteRange
from hal_cuda import collectives

PATIENCE = 20.0


def scribble(rank, seed):
    """Write random bytes over a state."""
    nbytes = rank.state.layout.nbytes
    data = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    ctypes.memmove(rank.state.memory.address, data.ctypes.data, nbytes)
    return data


def content(rank):
    """Return a state's bytes."""
    return np.frombuffer(ctypes.string_at(rank.state.memory.address, rank.state.layout.nbytes), np.uint8)


def broadcast(rank):
    """Return the ticket of a broadcast on the default stream."""
    return rank.bound.broadcast_tokens(state=rank.state, group=rank.group, stream=rank.bound.default_stream)


def test_a_broadcast_is_one_native_call_that_counts_its_work(two, monkeypatch):
    source, _ = two()
    broadcast(source).wait(PATIENCE)
    library, before = source.bound.device.driver.api.library, source.bound.counters()
    library.stand_in_forget()
    broadcast(source).wait(PATIENCE)
    noted = [library.stand_in_note(i).decode() for i in range(library.stand_in_noted())]
    copies = source.bound.default_stream.copy_stream
    assert noted[:2] == ["hal_small", "call"]
    assert noted[2:] == [f"waits {copies.handle:x}"]
    now = source.bound.counters()
    assert (now.launches - before.launches, now.copies_out - before.copies_out) == (1, 1)


def test_g14_a_header_that_is_not_what_was_announced_ends_the_state(two):
    source, other = two()
    channel = other.state.channels[0, 1]
    channel.number += 1  # it has missed one
    tickets = [broadcast(rank) for rank in (source, other)]
    tickets[0].wait(PATIENCE)
    with pytest.raises(StateUnusable, match="begins with broadcast 1 after 0 steps"):
        tickets[1].wait(PATIENCE)


def test_a_broadcast_that_was_not_announced_has_no_header(two):
    source, other = two()
    wanted, part = scribble(source, 1), ByteRange(0, 64)
    for rank in (source, other):
        communicator = rank.bound.device.communicator(rank.group)
        communicator.announce(rank.state.memory, ByteRange(256, 64), b"x" * 64)
        rank.ticket = communicator.broadcast(rank.state.memory, part, rank.bound.default_stream)
    for rank in (source, other):
        rank.ticket.wait(PATIENCE)
        assert (content(rank)[:64] == wanted[:64]).all()
        assert not hasattr(rank.ticket, "header")


def test_what_is_sent_is_what_the_stream_has_left_there(two):
    source, other = two()
    scribble(source, 1)
    stream = source.bound.default_stream
    source.bound.device.driver.api.library.stand_in_hold(stream.handle, 1)
    view = source.state.view("sampled_token_ids")
    source.bound.async_set_value(target=view, value=4321, stream=stream)
    tickets = [broadcast(rank) for rank in (source, other)]
    assert not any(ticket.done() for ticket in tickets)
    source.bound.device.driver.api.library.stand_in_hold(stream.handle, 0)
    for ticket in tickets:
        ticket.wait(PATIENCE)
    place = other.state.layout.fields["sampled_token_ids"].offset
    assert content(other)[place : place + 8].view(np.int64)[0] == 4321


def test_a_broadcast_waits_for_copies_out_that_still_read_what_it_writes(two):
    source, _ = two()
    device, stream = source.bound.device, source.bound.default_stream
    library = device.driver.api.library
    library.stand_in_hold(stream.copy_stream.handle, 1)
    begin = source.state.broadcast_range().offset
    copied = device.copy_out(source.state.memory, [ByteRange(begin, 64), ByteRange(begin + 64, 64)], stream)
    library.stand_in_forget()
    ticket = broadcast(source)
    noted = [library.stand_in_note(i).decode() for i in range(library.stand_in_noted())]
    assert noted.index(f"waits {stream.handle:x}") < noted.index("call")
    library.stand_in_hold(stream.copy_stream.handle, 0)
    ticket.wait(PATIENCE)
    copied.wait(PATIENCE)


def test_the_next_header_waits_for_the_copy_of_the_last(two):
    source, _ = two()
    stream, library = source.bound.default_stream, source.bound.device.driver.api.library
    library.stand_in_hold(stream.copy_stream.handle, 1)
    first, expected = broadcast(source), source.state.channels[0, 1].expected
    second = broadcast(source)
    assert not first.done()
    library.stand_in_hold(stream.copy_stream.handle, 0)
    for ticket in (first, second):
        ticket.wait(PATIENCE)  # each with its own header
    assert source.state.channels[0, 1].expected != expected


def test_a_broadcast_does_not_spoil_a_capture_in_another_thread(two):
    source, _ = two()
    library, stream = source.bound.device.driver.api.library, source.bound.device.stream()
    begun, go_on = threading.Event(), threading.Event()

    def capture():
        library.stand_in_capture(stream.handle, 1)
        begun.set()
        go_on.wait(PATIENCE)
        library.stand_in_capture(stream.handle, 0)

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(PATIENCE)
    broadcast(source).wait(PATIENCE)
    go_on.set()
    thread.join()
    assert library.stand_in_count(4) == 0, "the capture is whole"


def test_a_group_of_another_gpu_is_refused(two):
    source, _ = two()
    source.made.index = 1
    with pytest.raises(InvalidValue, match="opened on GPU 1"):
        collectives.NcclCommunicator(source.bound.device, source.group, source.open)
