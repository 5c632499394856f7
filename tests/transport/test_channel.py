"""The channel: frames in order and whole, whatever their size; an end that is seen; beats; and nobody else's bytes."""

import contextlib
import itertools
import os
import select
import socket
import struct
import threading
import time

import pytest
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.beats import Beats
from hal_engine.transport.channel import Channel, connect
from hal_engine.transport.hub import Hub
from hypothesis import given
from hypothesis import strategies as st

from .conftest import ANY, HANGS, NOTHING, keys_of_two

SIZES = [0, 1, 5, 4500, (1 << 16) - 6, (1 << 16) - 5, 1 << 16, 267_000, 5 << 20]


@pytest.fixture(params=["pair", "ipc", "tcp", "tcp sealed"])
def ends(request):
    """Both ends of a channel: the caller's and the listener's."""
    with contextlib.ExitStack() as stack:
        if request.param == "pair":
            one, other = Channel.pair()
        else:
            listener, caller = keys_of_two() if request.param == "tcp sealed" else (None, None)
            hub = stack.enter_context(
                contextlib.closing(Hub("control", None if request.param == "ipc" else ANY, listener))
            )
            one = connect(hub.url, "control", caller)
            while not hub.channels or not one.establish(0.0) or not hub.channels[0].is_trusted:
                assert hub.receive(0.01) == []
            (other,) = hub.channels
        stack.enter_context(contextlib.closing(one))
        stack.enter_context(contextlib.closing(other))
        yield one, other


def received(channel, count):
    """So many messages, as bytes."""
    found, end = [], time.monotonic() + HANGS
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} came"
        select.select([channel], [channel] if channel.wants_room else [], [], 0.1)
        found += map(bytes, channel.receive())
        assert len(found) == count or not channel.ended, channel.ended
    return found


def test_frames_of_any_size_come_whole_and_in_order(ends):
    one, other = ends
    frames = [os.urandom(size) for size in SIZES for _ in range(3)]
    thread = threading.Thread(target=lambda: [one.send(frame, wait=HANGS) for frame in frames])
    thread.start()
    assert received(other, len(frames)) == frames
    thread.join()
    assert other.send(b"back") is True
    assert received(one, 1) == [b"back"]


def test_a_frame_may_be_given_in_parts(ends):
    one, other = ends
    one.send(b"k", memoryview(bytearray(b"ab")), b"")
    assert received(other, 1) == [b"kab"]


def test_threads_may_send_at_once(ends):
    one, other = ends
    bodies = [bytes([number]) * 30_000 for number in range(8)]
    send = lambda body: [one.send(body, wait=HANGS) for _ in range(40)]  # noqa: E731
    threads = [threading.Thread(target=send, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    found = received(other, 320)
    assert sorted(found) == sorted(bodies * 40), "a frame was mixed with another"
    for thread in threads:
        thread.join()


def test_no_call_waits_for_a_peer_that_does_not_read(ends):
    one, other = ends
    assert one.send(bytes(16 << 20))
    assert one.pending
    assert one.wants_room
    one.beat(3)
    assert not one.flush(0.0)
    thread = threading.Thread(target=received, args=(other, 1))
    thread.start()
    assert one.flush(HANGS)
    thread.join()
    assert other.number == 0, "no beat is added to what a peer has not read"


def test_an_end_is_seen_after_all_that_came_before_it(ends):
    one, other = ends
    one.send(b"last", wait=HANGS)
    one.finish()
    found = received(other, 1)
    while not other.ended:
        found += other.receive()
    assert found == [b"last"]
    assert other.ended == "its process has ended"
    other.send(b"the other direction still works")
    assert received(one, 1)
    other.close()
    while not one.ended:
        one.receive()
    assert one.send(b"x") is False
    assert not one.pending


def test_what_came_is_received_although_nothing_can_be_sent_any_more(ends):
    one, other = ends
    one.send(b"why", wait=HANGS)
    one.close()
    while other.send(bytes(1 << 16)):
        time.sleep(0.001)
    assert received(other, 1) == [b"why"]


def test_a_last_message_is_read_by_a_peer_that_is_sending(ends):
    one, other = ends
    other.send(bytes(1000), wait=HANGS)
    one.send(b"bye")
    thread = threading.Thread(target=one.part, args=(HANGS,))
    thread.start()
    assert received(other, 1) == [b"bye"]
    other.close()
    thread.join(HANGS)
    assert not thread.is_alive()


def test_beats_have_a_number_and_are_no_messages(ends, monkeypatch):
    one, other = ends
    monkeypatch.setattr(TIMEOUTS, "beat", 0.001)
    before, other.heard = other.heard, 0.0
    beats = Beats(lambda: (one,), lambda: 7)
    try:
        while other.number != 7:
            assert other.receive() == []
    finally:
        beats.close()
    assert other.heard >= before


@pytest.mark.parametrize("bytes_", [struct.pack("<I", 0), struct.pack("<I", 1 << 31), struct.pack("<IB", 1, 9)])
def test_bytes_that_are_no_frame_end_the_connection(bytes_):
    near, far = socket.socketpair()
    with contextlib.closing(Channel(near)) as channel, far:
        far.sendall(bytes_)
        while not channel.ended:
            assert channel.receive() == []
        assert "a frame of" in channel.ended


def test_a_frame_that_is_only_announced_takes_no_memory():
    near, far = socket.socketpair()
    with contextlib.closing(Channel(near)) as channel, far:
        far.sendall(struct.pack("<IB", 1 << 30, 0) + bytes(100_000))
        channel.receive()
        assert len(channel._space) <= 1 << 20


@given(st.lists(st.binary(max_size=300), max_size=20), st.data())
def test_however_the_bytes_are_cut_the_frames_are_the_same(frames, data):
    packed = b"".join(struct.pack("<IB", 1 + len(frame), 0) + frame for frame in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(packed)), max_size=8), label="cuts"))
    near, far = socket.socketpair()
    with contextlib.closing(Channel(near)) as channel, far:
        found = []
        for begin, end in zip([0, *cuts], [*cuts, len(packed)], strict=True):
            far.sendall(packed[begin:end])
            found += map(bytes, channel.receive())
        assert found == frames


PURPOSES = ("control", "records", "blocks")


def refusal(hub, channel, purpose):
    """Why the hub closes a connection for a purpose, from which it takes nothing; the caller learns what it may be."""
    (channel_there,) = there(hub)
    while not channel_there.ended:
        assert [frame for _, frame in hub.receive(0.01)] in ([], [None]), "a stranger is heard"
        channel.receive()
    while not channel.ended:
        channel.receive()
    assert channel.ended == NOTHING.format(purpose)
    channel.close()
    return channel_there.ended


def there(hub):
    """The channels of the hub, of which there is one at least."""
    while not hub.channels:
        hub.receive(0.01)
    return hub.channels


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(PURPOSES, 2)])
def test_a_connection_for_one_purpose_is_refused_by_a_listener_of_another(one, other, has_keys):
    listener, caller = keys_of_two() if has_keys else (None, None)
    with contextlib.closing(Hub(other, ANY if has_keys else None, listener)) as hub:
        channel = connect(hub.url, one, caller)
        channel.send(b"a message")
        assert refusal(hub, channel, one) == f"it is a connection for '{one}', and this one is for '{other}'"


@pytest.mark.parametrize("has_keys", [False, True])
def test_keys_on_one_side_alone_are_refused(has_keys):
    listener, caller = keys_of_two()
    with contextlib.closing(Hub("records", ANY, None if has_keys else listener)) as hub:
        channel = connect(hub.url, "records", caller if has_keys else None)
        channel.send(b"a message")
        assert refusal(hub, channel, "records") == (
            "it has a key, and this side has none" if has_keys else "it sends no greeting of a peer with keys"
        )


def test_a_caller_that_parts_shows_its_key_first():
    """It would wait for all of its time otherwise, and its frame would never leave."""
    listener, caller = keys_of_two()
    with contextlib.closing(Hub("records", ANY, listener)) as hub:
        channel = connect(hub.url, "records", caller)
        channel.send(b"the last")
        parting = threading.Thread(target=channel.part, args=(1e6,), daemon=True)
        parting.start()
        got, end = [], time.monotonic() + HANGS
        while not got or hub.channels:
            assert time.monotonic() < end, "it waits for ever"
            got += [frame for _, frame in hub.receive(0.01) if frame is not None]
        parting.join(HANGS)
        assert ([*map(bytes, got)], parting.is_alive()) == ([b"the last"], False)


@pytest.mark.parametrize("url", [None, ANY])
def test_a_stranger_may_announce_no_large_frame(url):
    """It would take memory before it has shown what it is."""
    with contextlib.closing(Hub("records", url)) as hub, contextlib.ExitStack() as stack:
        where = hub.url.partition("://")[2]
        peer = stack.enter_context(socket.socket(socket.AF_UNIX if url is None else socket.AF_INET))
        peer.connect(where if url is None else ("127.0.0.1", int(where.rpartition(":")[2])))
        (channel,) = there(hub)
        peer.sendall(struct.pack("<I", 5000))
        while not channel.ended:
            hub.receive(0.01)
        assert channel.ended == "it announced a frame of 5000 bytes"


def test_a_stranger_that_leaves_by_itself_was_not_refused():
    with contextlib.closing(Hub("control")) as hub:
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(hub.url.partition("://")[2])
        (channel,) = there(hub)
        stranger.close()
        while not channel.ended:
            hub.receive(0.01)
        assert channel.ended == "it left before it showed what it is"
