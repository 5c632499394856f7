"""Sealed channels, and peers that have other keys or none."""

import contextlib
import socket
import struct
import threading
import time

import pytest
from hal_core import InvalidValue
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.channel import Channel, connect
from hal_engine.transport.curve import CurveKeys, Handshake, Sealer
from hal_engine.transport.hub import Hub

from .conftest import ANY, HANGS, NOTHING, keys_of_two


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
