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
from hal_core import InvalidValue
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.beats import Beats
from hal_engine.transport.channel import Channel, connect
from hal_engine.transport.curve import CurveKeys, Handshake, Sealer
from hal_engine.transport.hub import Hub
from hypothesis import given
from hypothesis import strategies as st

HANGS = 30.0
SIZES = [0, 1, 5, 4500, (1 << 16) - 6, (1 << 16) - 5, 1 << 16, 267_000, 5 << 20]


def keys_of_two():
    """The keys of a listener and of its one caller."""
    listener, caller = CurveKeys.new(), CurveKeys.new()
    return listener.knowing(caller.public), caller.knowing(listener.public)


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


ANY = "tcp://127.0.0.1:*"


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
NOTHING = "it sent nothing: it is no listener for '{}', its keys differ, or its process has ended"


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


class TestKeys:
    """Sealed channels, and peers that have other keys or none."""

    def refused(self, hub, channel):
        while not channel.ended:
            assert [frame for _, frame in hub.receive(0.01)] in ([], [None]), "a peer without the key is heard"
            channel.establish(0.01)
        why = channel.ended
        channel.close()
        while hub.channels:
            assert [frame for _, frame in hub.receive(0.01)] in ([], [None])
        return why

    def test_a_key_that_is_not_admitted_is_refused(self):
        listener, _ = keys_of_two()
        with contextlib.closing(Hub("control", ANY, listener)) as hub:
            stranger = connect(hub.url, "control", CurveKeys.new(listener.public))
            stranger.send(b"let me in")
            assert self.refused(hub, stranger) == NOTHING.format("control")

    def test_a_listener_with_another_key_gets_nothing(self):
        listener, caller = keys_of_two()
        with contextlib.closing(Hub("control", ANY, listener)) as hub:
            channel = connect(hub.url, "control", caller.knowing(CurveKeys.new().public))
            channel.send(b"secret")
            assert self.refused(hub, channel)

    def test_a_recording_is_of_no_use(self):
        """The same bytes on a second connection: the listener's fresh key differs."""
        listener, caller = keys_of_two()
        one = Handshake("control", caller, calls=True)
        answer, _, key = Handshake("control", listener, calls=False).take(one.greeting)
        _, sealer, _ = one.take(answer)
        assert key == caller.public
        again = Handshake("control", listener, calls=False).take(one.greeting)[1]
        with pytest.raises(ValueError, match="another key"):
            again.open(memoryview(sealer.seal(b"frame")))

    def test_a_purpose_that_is_changed_on_the_way_gives_other_keys(self):
        """A listener that is shown its own purpose, and a caller with another."""
        listener, caller = keys_of_two()
        one, other = Handshake("records", caller, calls=True), Handshake("control", listener, calls=False)
        heads = [Handshake(purpose, calls=True).greeting for purpose in ("records", "control")]
        answer, back, _ = other.take(one.greeting.replace(*heads))
        _, sealer, _ = one.take(answer.replace(*reversed(heads)))
        with pytest.raises(ValueError, match="another key"):
            back.open(memoryview(sealer.seal(b"frame")))

    def test_frames_that_are_changed_repeated_or_left_out_are_refused(self):
        frames = [Sealer(bytes(32), bytes(32)) for _ in range(1)]
        sealed = [frames[0].seal(b"frame %d" % number) for number in range(3)]
        for order in ([1], [0, 0], [0, 2]):
            opener = Sealer(bytes(32), bytes(32))
            for number in order[:-1]:
                opener.open(memoryview(sealed[number]))
            with pytest.raises(ValueError, match="another key"):
                opener.open(memoryview(sealed[order[-1]]))
        for at in range(len(sealed[0])):
            changed = bytearray(sealed[0])
            changed[at] ^= 1
            with pytest.raises(ValueError, match="another key"):
                Sealer(bytes(32), bytes(32)).open(memoryview(changed))

    def test_nothing_of_it_can_be_read_on_the_way(self):
        seen = []
        listener, caller = keys_of_two()
        with contextlib.closing(Hub("control", ANY, listener)) as hub, Tap(hub.url, seen) as url:
            channel = connect(url, "control", caller)
            channel.send(b"a secret of many bytes" * 100)
            found = []
            while not found:
                found = [message for _, message in hub.receive(0.01) if message is not None]
                channel.receive()
            assert bytes(found[0]) == b"a secret of many bytes" * 100
            assert hub.channels[0].key == caller.public
            channel.close()
        assert b"secret" not in b"".join(seen)

    def test_connections_without_a_key_are_few_and_end_in_time(self, monkeypatch):
        monkeypatch.setattr(TIMEOUTS, "greeting", 0.05)
        listener, caller = keys_of_two()
        with contextlib.closing(Hub("control", ANY, listener)) as hub, contextlib.ExitStack() as stack:
            host, port = hub.url.removeprefix("tcp://").split(":")
            for _ in range(100):
                stack.enter_context(socket.create_connection((host, int(port))))
                hub.receive()
                assert len(hub.channels) <= 64
            end = time.monotonic() + HANGS
            while hub.channels and time.monotonic() < end:
                hub.receive(0.02)
            assert not hub.channels
            known = stack.enter_context(contextlib.closing(connect(hub.url, "control", caller)))
            while not known.establish(0.0):
                hub.receive(0.01)

    def meeting(self):
        """A caller that has sent its greeting, and the other end of its connection."""
        listener, caller = keys_of_two()
        near, far = socket.socketpair()
        channel = Channel(near, Handshake("control", caller, calls=True))
        channel.flush(0.0)
        far.settimeout(HANGS)
        answer, sealer, _ = Handshake("control", listener, calls=False).take(far.recv(4096)[4:])
        return channel, far, [struct.pack("<I", len(part)) + part for part in (answer, sealer.seal(b"\1" + bytes(8)))]

    def test_nothing_leaves_before_the_other_side_has_shown_its_key(self):
        """Its greeting alone shows nothing: anybody can send one, record what is sent then, and steal the key later."""
        channel, far, (answer, beat) = self.meeting()
        with contextlib.closing(channel), far:
            channel.send(bytes(100_000))
            far.sendall(answer)
            channel.receive()
            assert len(far.recv(1 << 18)) < 100, "more than a beat"
            assert channel.pending == 100_000, "it counts as not sent"
            far.sendall(beat)
            channel.receive()
            assert channel.is_trusted
            found = 0
            while found < 100_000:
                found += len(far.recv(1 << 18))
                channel.receive()
            assert channel.flush(HANGS)

    def test_a_listener_that_never_answers_collects_no_beats(self):
        channel, far, _ = self.meeting()
        with contextlib.closing(channel), far:
            for _ in range(100):
                channel.beat()
            assert not channel.pending

    def test_a_sealed_frame_without_a_kind_ends_the_connection(self):
        keys = bytes(32), bytes(32)
        near, far = socket.socketpair()
        with contextlib.closing(Channel(near)) as channel, far:
            channel._sealer = Sealer(*keys)
            sealed = Sealer(*keys).seal(b"")
            far.sendall(struct.pack("<I", len(sealed)) + sealed)
            assert channel.receive() == []
            assert channel.ended == "it sent a frame of kind None"

    @pytest.mark.parametrize("fresh", [bytes(32), bytes([1]) + bytes(31), b"\xec" + b"\xff" * 30 + b"\x7f"])
    def test_a_key_of_small_order_is_refused(self, fresh):
        listener, caller = keys_of_two()
        one = Handshake("control", caller, calls=True)
        with pytest.raises(ValueError, match="shared key"):
            Handshake("control", listener, calls=False).take(one.greeting[:-32] + fresh)
        with pytest.raises(ValueError, match="shared key"):
            one.take(one.greeting[:14] + fresh)

    def test_no_side_hears_itself(self):
        """With one key on both sides, too: neither its own frames back, nor those of another caller."""
        shared = CurveKeys.shared(CurveKeys.new().secret)
        one, other = Handshake("control", shared, calls=True), Handshake("control", shared, calls=True)
        mirrored, crossed = (
            caller.take(one.greeting[:14] + fresh.greeting[-32:])[1]
            for caller, fresh in ((Handshake("control", shared, calls=True), one), (one, other))
        )
        _, back, _ = other.take(one.greeting[:14] + one.greeting[-32:])
        for opener, sealer in ((mirrored, mirrored), (back, crossed), (crossed, back)):
            with pytest.raises(ValueError, match="another key"):
                opener.open(memoryview(sealer.seal(b"frame")))

    def test_many_strangers_at_once_do_not_cost_a_caller_its_place(self):
        listener, caller = keys_of_two()
        with contextlib.closing(Hub("control", ANY, listener)) as hub, contextlib.ExitStack() as stack:
            host, port = hub.url.removeprefix("tcp://").split(":")
            known = stack.enter_context(contextlib.closing(connect(hub.url, "control", caller)))
            known.receive()
            for _ in range(100):
                stack.enter_context(socket.create_connection((host, int(port))))
            for _ in range(10):
                hub.receive()
                known.establish(0.01)
            assert known.is_trusted, known.ended

    def test_strangers_do_not_keep_the_thread(self):
        listener, _ = keys_of_two()
        with contextlib.closing(Hub("control", ANY, listener)) as hub, contextlib.ExitStack() as stack:
            host, port = hub.url.removeprefix("tcp://").split(":")
            for _ in range(100):
                stack.enter_context(socket.create_connection((host, int(port))))
            hub.receive()
            assert 0 < len(hub.channels) < 64

    @pytest.mark.parametrize("secret", ["", "x" * 39, "\x00" * 40, "~" * 40, "%nSc0" * 9])
    def test_text_that_is_no_key_is_refused(self, secret):
        with pytest.raises(ValueError, match="characters of a key"):
            CurveKeys.shared(secret)
        with pytest.raises(InvalidValue, match="is no text of 40 characters"):
            CurveKeys(secret, secret)

    def test_a_key_file_of_an_earlier_version_is_still_one(self):
        """The pair is of ZeroMQ's documentation (zmq_z85_encode and zmq_curve_keypair)."""
        public, secret = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID", "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"
        keys = CurveKeys.shared(secret)
        assert (keys.public, keys.secret, keys.peers) == (public, secret, (public,))
        assert secret not in repr(keys)


class Tap:
    """Carries bytes to a listener, and keeps them."""

    def __init__(self, url, seen):
        host, port = url.removeprefix("tcp://").split(":")
        self._far, self._seen = (host, int(port)), seen
        self._door = socket.create_server(("127.0.0.1", 0))

    def __enter__(self):
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        return f"tcp://127.0.0.1:{self._door.getsockname()[1]}"

    def _accept(self):
        near, far = self._door.accept()[0], socket.create_connection(self._far)
        with near, far:
            carry = threading.Thread(target=self._carry, args=(far, near))
            carry.start()
            self._carry(near, far)
            carry.join()

    def _carry(self, one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self._seen.append(data)
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)

    def __exit__(self, *_):
        self._door.close()
        for thread in self._threads:
            thread.join(HANGS)
