"""Two ranks over NCCL when one is lost or NCCL fails (G16), and the end of a group."""

import gc
import threading
from time import monotonic

import pytest
from hal_core import TIMEOUTS
from hal_core.errors import GroupLost
from hal_cuda import nccl

TIMEOUT, PATIENCE = 0.4, 20.0


def broadcast(rank):
    """Return the ticket of a broadcast on the default stream."""
    return rank.bound.broadcast_tokens(state=rank.state, group=rank.group, stream=rank.bound.default_stream)


def test_g16_a_rank_that_does_not_come_is_given_up_and_the_stream_goes_on(two, library):
    _, other = two(TIMEOUT)
    ticket, began = broadcast(other), monotonic()  # the source does not join
    with pytest.raises(GroupLost, match="did not come to the collective"):
        ticket.wait()
    assert monotonic() - began < PATIENCE / 2
    assert other.bound.device.communicator(other.group).lost == "", "nothing waits for ever"
    other.bound.default_stream.synchronize(PATIENCE)
    assert b"abort" in library.nccl_calls()
    with pytest.raises(GroupLost):
        broadcast(other).wait(PATIENCE)
    other.bound.async_set_value(target=other.state.view("seed"), value=7, stream=other.bound.default_stream).wait(
        PATIENCE
    )
    del ticket
    gc.collect()
    made = other.bound.device.events.made
    other.bound.close()
    assert made
    assert len(other.bound.device.events.free) == 0, "all was given back, as after any work that is over"


def test_g16_nobody_hears_of_a_loss_before_the_stream_goes_on(two, monkeypatch):
    """A caller that learns of the loss may wait for the stream with the GIL kept, and then no thread could end that."""
    _, other = two(TIMEOUT)
    begun, go_on, true = threading.Event(), threading.Event(), other.made.library.abort

    def abort(handle):
        begun.set()
        assert go_on.wait(PATIENCE)
        return true(handle)

    monkeypatch.setattr(other.made.library, "abort", abort)
    ticket = broadcast(other)
    assert begun.wait(PATIENCE)
    assert other.open.watchdog.reason
    assert not ticket.done()
    go_on.set()
    with pytest.raises(GroupLost):
        ticket.wait(PATIENCE)
    other.bound.default_stream.synchronize(PATIENCE)


@pytest.mark.parametrize("how", ["by a thread of NCCL's", "in the call"])
def test_g16_what_nccl_meets_is_the_loss_of_the_group(two, library, how):
    _, other = two()
    if how == "in the call":
        library.nccl_fail(1)
        message = "ncclBroadcast: internal error: told to fail"
    ticket = broadcast(other)
    if how != "in the call":
        assert not ticket.done()
        library.nccl_error(3)
        message = "NCCL met: internal error: the network"
    with pytest.raises(GroupLost, match=message):
        ticket.wait(PATIENCE)
    library.nccl_error(0)
    library.nccl_fail(0)
    other.bound.default_stream.synchronize(PATIENCE)


def test_a_call_that_is_still_inside_nccl_is_not_pulled_from_under_it(two, library, monkeypatch, caplog):
    source, _ = two()
    monkeypatch.setattr(TIMEOUTS, "group_end", 0.05)
    with source.made.lock:
        source.made._end(source.made.library.abort)
    assert source.made.handle, "it was not given up"
    assert "end this process" in caplog.text
    assert not source.made.ended
    source.open.watchdog.reason = "for the test"
    assert source.bound.device.communicator(source.group).lost == "for the test"
    source.open.watchdog.reason = ""


def test_a_closed_group_is_given_back_and_refuses(two, library):
    source, _ = two()
    before = library.nccl_calls().count(b"destroy")
    source.open.close()
    source.open.close()
    assert library.nccl_calls().count(b"destroy") == before + 1
    with pytest.raises(GroupLost, match="closed"):
        broadcast(source).wait(PATIENCE)


def test_at_the_end_of_the_process_nothing_is_given_back_by_hand(two, library, monkeypatch):
    source, _ = two()

    def start(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(nccl.threading.Thread, "start", start)
    source.made.close()
    source.made.abort()
    monkeypatch.undo()
    assert source.made.handle
