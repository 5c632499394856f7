"""A reader among garbage, repetitions and gaps; unusable addresses; leftovers of dead processes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from hal_core.errors import InvalidValue, Unavailable
from hal_core.frames.envelope import FrameKind, encode, seal
from hal_engine.reading import FrameSkipped, Gap, OutputReader, SessionEnded, SessionLost, SessionStarted
from hal_engine.reading.session import Session
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport import private_ipc_url, release_ipc
from hal_engine.transport.channel import connect
from hal_engine.transport.protocol import OUTPUT, VERSION, Acknowledge, Bye, Hello, decode_control, encode_control
from hal_engine.transport.urls import remove_stale_folders, socket_of

SESSION = 77


class ByHand:
    """A sender with arbitrary messages, because a reader may rely only on the wire format."""

    def __init__(self, url):
        self.url, self.channels = url, []

    def connect(self, reader, oldest=1, **more):
        """Connect and greet; let the reader work until it answers, and return where it continues."""
        self.channel = connect(self.url, "records")
        self.channels.append(self.channel)
        hello = {"version": VERSION, "session": SESSION, "sender": 0, "oldest": oldest, "capacity": 8}
        self.say(Hello(**hello | more))
        for _ in range(500):
            assert reader.read(0.02) is None
            for frame in self.channel.receive():
                message = decode_control(frame[1:])
                return message.after if isinstance(message, Acknowledge) else message
            if self.channel.ended:
                return self.channel.ended
        raise AssertionError("the reader gave no answer")

    def say(self, message):
        self.channel.send(encode_control(message))

    def send(self, *frames):
        """The reader works in this thread, so another one waits for room."""
        channel = self.channel
        for frame in frames:
            channel.send(OUTPUT, frame)
        threading.Thread(target=channel.flush, args=(10.0,), daemon=True).start()

    def is_cut_off(self, reader):
        for _ in range(500):
            assert reader.read(0.02) is None
            self.channel.receive()
            if self.channel.ended:
                return True
        return False


@pytest.fixture
def by_hand(opened, output, url):
    """A reader, its events, a sender by hand, and the frames that it may send."""
    events = []
    reader = opened.reader(on_event=events.append)
    sender = ByHand(url)
    frames = {
        number: encode(output(number).resolve(), session=SESSION, sender=0, sequence=number) for number in range(1, 6)
    }
    yield reader, events, sender, frames
    for channel in sender.channels:
        channel.close()


JUNK = [b"", b"no frame at all", b"c", b"cjunk", b"o", b"ojunk", b"z"]


@pytest.mark.parametrize("junk", JUNK)
def test_garbage_is_skipped_counted_and_told_and_the_stream_goes_on(by_hand, steps, junk):
    reader, events, sender, frames = by_hand
    assert sender.connect(reader) == 0
    sender.send(frames[1])
    assert steps(reader, 1) == [1]
    sender.channel.send(junk)
    assert sender.is_cut_off(reader)
    assert sender.connect(reader) == 1
    sender.send(frames[2])
    assert steps(reader, 1) == [2]
    assert reader.counters()["skipped"] == 1
    assert [type(event) for event in events] == [SessionStarted, FrameSkipped]


@pytest.mark.parametrize("junk", JUNK)
def test_a_connection_that_begins_with_garbage_is_closed(by_hand, junk):
    reader, events, sender, _ = by_hand
    with contextlib.closing(connect(reader.url, "records")) as sender.channel:
        sender.channel.send(junk)
        assert sender.is_cut_off(reader)
    assert [type(event) for event in events] == [FrameSkipped]


def test_a_connection_that_never_says_who_it_is_is_closed(by_hand, monkeypatch):
    reader, events, sender, _ = by_hand
    monkeypatch.setattr(TIMEOUTS, "greeting", 0.05)
    with contextlib.closing(connect(reader.url, "records")) as sender.channel:
        assert sender.is_cut_off(reader)
    assert events == []


def test_of_connections_that_never_say_who_they_are_nothing_is_kept(opened):
    """The address closes the oldest of them when there are many."""
    reader = opened.reader()
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(socket_of(reader.url)))
            assert reader.read(0) is None
        receiver = reader._receiver
        assert 0 < len(receiver.hub.channels) < 100
        assert set(receiver._new) <= set(receiver.hub.channels)


def test_a_message_and_numbers_of_a_later_revision_do_not_raise(by_hand):
    reader, events, sender, _ = by_hand
    assert sender.connect(reader) == 0
    sender.say(Bye(0))
    assert reader.read(10) is None
    assert [type(event) for event in events] == [SessionStarted, SessionEnded]
    assert "closed" in sender.connect(reader) or "ended" in sender.channel.ended, "a session that has ended"
    reader.close()


def test_another_version_is_refused_by_name_on_both_sides(by_hand, caplog):
    reader, events, sender, _ = by_hand
    assert sender.connect(reader, version=3) == Bye(why="its version is 3, the reader's 2: install one version")
    assert "a sink is refused: its version is 3" in caplog.text
    assert events == []


def test_a_sink_of_an_earlier_version_is_refused_by_name(by_hand, caplog):
    """Its connections were ZeroMQ's, which begin with these bytes."""
    reader, events, _, _ = by_hand
    with socket.socket(socket.AF_UNIX) as former:
        former.connect(reader.url.removeprefix("ipc://"))
        former.sendall(b"\xff" + bytes(7) + b"\x01\x7f")
        former.settimeout(0)
        for _ in range(500):
            assert reader.read(0.02) is None
            if "hal 1.1 or before" in caplog.text:
                break
    assert "it is of hal 1.1 or before, whose connections were ZeroMQ's: install one version" in caplog.text
    assert events == []


def test_g19_duplicates_are_dropped_and_counted(by_hand, steps):
    reader, _, sender, frames = by_hand
    sender.connect(reader)
    sender.send(frames[1], frames[1], frames[2])
    sender.send(frames[1], frames[2], frames[3])
    assert steps(reader, 3) == [1, 2, 3]
    assert reader.read(0.05) is None
    assert reader.counters()["duplicates"] == 3


def test_g19_a_hole_is_asked_for_again(by_hand, steps):
    reader, events, sender, frames = by_hand
    sender.connect(reader)
    sender.send(frames[1])
    assert steps(reader, 1) == [1]
    sender.send(frames[3], frames[4])
    assert sender.is_cut_off(reader)
    assert sender.connect(reader) == 1
    sender.send(frames[2], frames[3], frames[4])
    assert steps(reader, 3) == [2, 3, 4]
    assert not [event for event in events if isinstance(event, Gap)]


def test_g19_frames_of_another_session_are_refused(by_hand, output):
    reader, events, sender, _ = by_hand
    sender.connect(reader)
    sender.send(encode(output(1).resolve(), session=SESSION + 1, sender=0, sequence=1))
    assert sender.is_cut_off(reader)
    assert [type(event) for event in events] == [SessionStarted, FrameSkipped]


def test_g19_frames_that_the_sender_no_longer_holds_are_a_gap(by_hand, steps):
    reader, events, sender, frames = by_hand
    sender.connect(reader)
    sender.send(frames[1])
    assert steps(reader, 1) == [1]
    assert sender.connect(reader, oldest=4) == 3
    sender.send(frames[4])
    assert steps(reader, 1) == [4]
    gap = next(event for event in events if isinstance(event, Gap))
    assert (gap.session, gap.first, gap.last) == (SESSION, 2, 3)


def test_g19_an_unreadable_frame_comes_once_more_then_a_gap(by_hand, steps):
    reader, events, sender, frames = by_hand
    bad = seal(FrameKind.OUTPUT, b"no record", session=SESSION, sender=0, sequence=1)
    sender.connect(reader)
    sender.send(bad, frames[2])
    assert sender.is_cut_off(reader)
    assert sender.connect(reader) == 0
    sender.send(bad, frames[2])
    assert steps(reader, 1) == [2]
    gap = next(event for event in events if isinstance(event, Gap))
    assert (gap.session, gap.first, gap.last) == (SESSION, 1, 1)


def test_g19_a_session_that_was_declared_lost_is_refused(by_hand):
    reader, events, sender, _ = by_hand
    reader._receiver._grace = 0.0
    sender.connect(reader)
    sender.channel.close()
    for _ in range(500):
        assert reader.read(0.02) is None
        if isinstance(events[-1], SessionLost):
            break
    assert sender.connect(reader) == Bye(why="it has declared this session lost")


WORKER = """
    import os, signal, sys
    import numpy as np
    from hal_engine.transport import open_sink
    from hal_core.output.records import OutputRecord

    class Output:
        step = int(sys.argv[2])
        def resolve(self):
            one = np.ones(1, np.uint8)
            return OutputRecord(self.step, ("a",), one, one * 0, np.arange(1), one.astype("i4"), np.arange(1), one < 0)
        def complete(self, error):
            pass

    open_sink(sys.argv[1], heartbeat=0.05).put(Output())
    signal.pause()
"""


def test_g19_a_killed_worker_is_a_lost_session_and_its_successor_a_new_one(opened, url):
    def start(step):
        return subprocess.Popen([sys.executable, "-c", textwrap.dedent(WORKER), url, str(step)])

    reader = opened.reader(grace=0.2)
    worker = start(1)
    first = reader.read(30)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    with pytest.raises(SessionLost, match="connection broke") as caught:
        reader.read(10)
    assert (caught.value.session, caught.value.last_sequence) == (first.header.session, 1)
    assert caught.value.requests == ("a",)
    worker = start(2)
    second = reader.read(30)
    worker.kill()
    worker.wait()
    assert second.record.step == 2
    assert second.header.session != first.header.session


@pytest.mark.parametrize("heard", [True, False])
def test_g19_a_loss_at_the_last_session_end_is_reported_first(by_hand, heard):
    """Both within one look; the order in which they were noticed does not count."""
    reader, events, sender, _ = by_hand
    assert sender.connect(reader) == 0
    receiver, lost = reader._receiver, Session(5, now=0.0)
    receiver.sessions[5] = lost
    sender.say(Bye(0))
    while SESSION in receiver.sessions:
        receiver._receive(0.1)
    receiver._lose(lost, "it fell silent")
    if not heard:
        reader._on_event = None
        with pytest.raises(SessionLost, match="fell silent"):
            reader.read(60)
    assert reader.read(60) is None  # at once
    assert not heard or [type(event) for event in events] == [SessionStarted, SessionEnded, SessionLost]


@pytest.mark.parametrize("silent", [True, False])
def test_g19_a_session_that_comes_again_while_its_reader_is_away_is_not_lost(by_hand, silent):
    reader, events, sender, _ = by_hand
    assert sender.connect(reader) == 0
    sender.channel.close()
    session = reader._receiver.sessions[SESSION]
    while session.channel is not None:
        assert reader.read(0) is None
    if silent:  # as for a reader with a cursor that begins to read late
        session.broken = None
        session.heard -= 2 * TIMEOUTS.lost_after
    else:
        session.broken -= 2 * TIMEOUTS.grace
    assert sender.connect(reader) == 0
    assert [type(event) for event in events] == [SessionStarted]


def test_a_stranger_delays_a_loss_for_the_time_of_a_greeting(by_hand, monkeypatch):
    reader, events, sender, _ = by_hand
    assert sender.connect(reader) == 0
    sender.channel.close()
    while (session := reader._receiver.sessions[SESSION]).channel is not None:
        assert reader.read(0) is None
    session.broken -= 2 * TIMEOUTS.grace
    with contextlib.closing(connect(reader.url, "records")):
        assert reader.read(0) is None
        assert [type(event) for event in events] == [SessionStarted]
        monkeypatch.setattr(TIMEOUTS, "greeting", 0.0)
        assert reader.read(0) is None
    assert [type(event) for event in events] == [SessionStarted, SessionLost]


def test_a_cursor_of_a_session_that_never_comes_back_is_a_lost_session(opened):
    with pytest.raises(SessionLost, match="after frame 12") as caught:
        opened.reader(after=(SESSION, 12), lost_after=0.1).read(10)
    assert caught.value.session == SESSION


def test_an_address_that_cannot_be_bound_is_named(tmp_path):
    with pytest.raises(InvalidValue, match="cannot bind"):
        OutputReader(f"ipc://{tmp_path}/missing/socket")


def url_of_the_dead(code):
    """The ``url`` that the code makes in a process that is killed then."""
    code += "; import os; print(url, flush=True); os.kill(os.getpid(), 9)"
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout.strip()


def test_private_folders_are_private_and_those_of_the_dead_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    dead = url_of_the_dead("from hal_engine.transport import private_ipc_url; url = private_ipc_url()")
    left = Path(dead.removeprefix("ipc://")).parent
    assert left.exists()
    mine = private_ipc_url()
    folder = Path(mine.removeprefix("ipc://")).parent
    assert not left.exists()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert remove_stale_folders(tmp_path) == []
    release_ipc(mine)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_program_is_not_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for lock in "lock", "hal.lock":
        (other := tmp_path / f"hal-{lock}").mkdir()
        (other / lock).touch()
    release_ipc(private_ipc_url())
    assert len(list(tmp_path.iterdir())) == 2


def test_a_restarted_reader_keeps_its_dead_predecessors_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    url = url_of_the_dead("from hal_engine.reading import OutputReader; reader = OutputReader(); url = reader.url")
    with OutputReader(url):  # replaces the socket that has no listener
        assert remove_stale_folders(tmp_path) == []
    release_ipc(url)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_with_a_cure(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    with pytest.raises(Unavailable, match="XDG_RUNTIME_DIR"):
        private_ipc_url()
