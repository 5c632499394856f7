"""Bytes of strangers, below ZeroMQ's framing and within it: skipped and reported; and sinks that check their peers."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import zmq
from hal_core.errors import SinkFull, Unavailable
from hal_engine.reading import FrameSkipped, OutputReader
from hal_engine.transport import connection, open_sink
from hal_engine.transport.sockets import Bound
from hal_engine.transport.strangers import end_strangers, name_of

from .conftest import Output

_spec = importlib.util.spec_from_file_location("fuzz_socket", Path(__file__).parents[1] / "output" / "fuzz_socket.py")
fuzz_socket = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fuzz_socket)


@pytest.mark.parametrize(("scheme", "seed"), [("tcp", 3), ("ipc", 4)])
def test_g26_no_bytes_of_strangers_end_a_reader_or_take_a_record_away(scheme, seed):
    found = fuzz_socket.run(scheme, attacks=150, seed=seed)
    assert found["records"] == 15
    assert found["skipped"] > 10


@pytest.mark.parametrize("said", [fuzz_socket.KNOWN[0], fuzz_socket.KNOWN[1]], ids=["zmtp 1", "http"])
def test_g26_a_message_without_a_connection_is_skipped_told_and_logged(said, caplog):
    events = []
    with OutputReader("tcp://127.0.0.1:*", on_event=events.append) as reader:
        host, _, port = reader.url.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(said)
            while not events:
                assert reader.read(0.05) is None
        assert reader.counters()["skipped"] >= 1
    assert isinstance(events[0], FrameSkipped)
    assert "does not speak ZMTP 3" in events[0].reason
    assert "bytes skipped that are no frame" in caplog.text


def test_a_connection_that_never_becomes_one_of_zeromq_is_logged(caplog):
    with OutputReader("tcp://127.0.0.1:*") as reader:
        host, _, port = reader.url.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NONE".ljust(20, b"\0") + bytes(32))
            while not caplog.records:
                assert reader.read(0.05) is None
    assert "a connection that no sender has made" in caplog.text


def test_strangers_that_come_and_go_while_nobody_reads_hold_nobody_up(output):
    """ZeroMQ's monitor has its own high-water mark: 2,000 unread events hold up the thread of all connections."""
    with OutputReader("tcp://127.0.0.1:*", timeout=30) as reader:
        host, _, port = reader.url.removeprefix("tcp://").rpartition(":")
        for _ in range(1500):
            socket.create_connection((host, int(port))).close()
        sink = open_sink(reader.url, deadline=30)
        sink.put(output(1))
        assert reader.read(60).record.step == 1
        reader.acknowledge()
        sink.close(30)


def test_a_reader_that_does_not_read_gets_a_bounded_number_of_words(opened):
    reader, sink = opened.reader(), opened.sink(heartbeat=0.001)
    sent, rounds, send, follow = [], [], sink._connection.send, sink._connection.follow

    def counted(message):
        sent.append(message)
        return send(message)

    def followed():
        rounds.append(1)
        return follow()

    sink._connection.send, sink._connection.follow = counted, followed
    while sink._wire._unanswered < 8:
        time.sleep(0.001)
    before, now = len(rounds), len(sent)
    while len(rounds) < before + 50:
        time.sleep(0.001)
    assert len(sent) == now
    sink.put(Output(1))
    assert reader.read(10).record.step == 1  # it is reported again, and the events continue
    while len(sent) < now + 20:
        assert reader.read(0.01) is None


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
OTHER = """
    import os, socket, sys

    os.setgid(65534)
    os.setuid(65534)
    os.umask(0)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[1])
        listening.listen(5)
        print("listens", flush=True)
        listening.setblocking(False)
        sys.stdin.readline()
        try:
            peer, _ = listening.accept()
            print(len(peer.recv(1000)) if sys.argv[2:] else "connected", flush=True)
        except BlockingIOError:
            print("nobody came", flush=True)
"""


@contextlib.contextmanager
def another_user(path):
    command = [sys.executable, "-c", textwrap.dedent(OTHER), str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "listens\n"
        yield lambda: process.communicate("\n", timeout=30)[0].strip()
        process.kill()


@pytest.fixture
def public(tmp_path):
    """A folder in which every user may make files."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and str(folder).count("/") > 1:
            folder.chmod(folder.stat().st_mode | 0o711)
    tmp_path.chmod(0o777)
    return tmp_path


@needs_root
def test_a_sink_does_not_greet_another_users_socket(public):
    with another_user(public / "socket") as ask:
        with pytest.raises(Unavailable, match=r"is a socket of user 65534 .*, not of 0.*nothing is sent") as caught:
            open_sink(f"ipc://{public}/socket")
        assert "one user" in caught.value.cure
        assert ask() == "nobody came"


@needs_root
def test_a_sink_that_is_there_first_waits_until_its_own_reader_comes(public, caplog):
    path = public / "socket"
    sink = open_sink(f"ipc://{path}", capacity=1, deadline=0.2)
    sink.put(Output(1))
    with another_user(path) as ask:
        while not caplog.records:
            time.sleep(0.001)
        with pytest.raises(SinkFull, match="is a socket of user 65534"):
            sink.put(Output(2))
        assert ask() == "nobody came"
    assert not path.exists() or path.unlink() is None
    with OutputReader(f"ipc://{path}", timeout=30) as reader:
        assert [reader.read(30).record.step for _ in range(2)] == [1, 2]
        reader.acknowledge()
        sink.close(30)


@needs_root
def test_whoever_listens_is_asked_of_the_kernel_too(public, monkeypatch, caplog):
    """The file's owner is checked, and then the file may be replaced: the peer's own user is decisive."""
    path = public / "socket"
    monkeypatch.setattr(connection, "_stranger_at", lambda path: None)
    with another_user(path), caplog.at_level(logging.WARNING):
        sink = open_sink(f"ipc://{path}")
        while not caplog.records:
            time.sleep(0.001)
        assert "listens user 65534" in caplog.text
        assert not sink._connection.is_open
        sink.close(0)


LEAVING = """
import socket, sys, threading
from hal_engine.transport.sockets import Bound

def connected(url):
    if url.startswith("ipc://"):
        made = socket.socket(socket.AF_UNIX)
        made.connect(url.removeprefix("ipc://"))
        return made
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))

def go_on(strangers):
    for one in strangers:
        try:
            one.send(bytes([0, 3, 0, 97, 98]))  # the rest of a name, and a message
        except OSError:
            pass  # it was shut down

for _ in range(int(sys.argv[2])):
    bound = Bound(sys.argv[1])
    url = bound.socket.last_endpoint.rstrip(bytes(1)).decode()
    strangers = [connected(url) for _ in range(60)]
    for one in strangers:
        one.send(bytes([1]))  # the length of a name, as ZeroMQ 2 begins
    bound.socket.poll(20)
    threads = [threading.Thread(target=go_on, args=[strangers]), threading.Thread(target=bound.close)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bound.release()
    for one in strangers:
        one.close()
"""


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_g26_strangers_who_say_their_name_while_a_reader_closes_end_nobody(scheme, tmp_path):
    """libzmq ends the process where such a name comes while its socket is being closed."""
    url = f"ipc://{tmp_path}/socket" if scheme == "ipc" else "tcp://127.0.0.1:*"
    command = [sys.executable, "-c", LEAVING, url, "25"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_known_senders_connection_stays_for_its_last_message(tmp_path):
    url = f"ipc://{tmp_path}/socket"
    bound, context = Bound(url), zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(url)
    peer.send(b"here")
    who, message = bound.socket.recv_multipart(copy=False)
    bound.know(message)
    end_strangers(name_of(url), bound._known.values())
    bound.socket.send_multipart([who.bytes, b"the last word"])  # an error where its connection is gone
    bound.close()
    bound.release()
    assert peer.poll(10_000)
    assert peer.recv() == b"the last word"
    context.destroy(linger=0)
