"""Folders that go while their domains are in use: nothing of those is left, and nobody makes them anew."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from hal.reading import OutputReader
from hal.reading.receiver import Receiver
from hal.transport import domains, open_sink, release_ipc, shared_memory
from hal.transport.shared_memory import SharedSender
from hal.transport.urls import remove_stale_folders, socket_of

from .conftest import files_of, needs_iceoryx2

pytestmark = needs_iceoryx2

#: A reader in a process of its own, with a queue, and thus with all of its files.
READER = """
    import sys
    from hal.reading import OutputReader
    from hal.transport import private_ipc_url
    url = sys.argv[1] if len(sys.argv) > 1 else private_ipc_url(shared=True)
    reader = OutputReader(url)
    queue = reader._receiver._memory.queue(1)
    assert queue is not None
    print(url, reader._receiver._memory.name, flush=True)
    sys.stdin.readline()
"""


def start(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def end(process, *, kill):
    """Kill the process, or let it come to its end."""
    if kill:
        process.kill()
    process.stdin.close()
    process.wait(20)
    process.stdout.close()


def left_of(name):
    return sorted(domains.MEMORY.glob(f"{domains.prefix_of(name)}*"))


@pytest.fixture
def url(shared_url):
    return shared_url


def test_a_reader_that_is_never_closed_leaves_nothing_when_its_process_ends():
    reader = start(READER)
    url, name = reader.stdout.readline().split()
    assert left_of(name)
    end(reader, kill=False)
    assert reader.returncode == 0
    assert left_of(name) == []
    assert not socket_of(url).parent.exists()


def test_a_folder_that_is_released_takes_the_memory_of_a_living_reader_along(url):
    reader = start(READER, url)
    _, name = reader.stdout.readline().split()
    release_ipc(url)
    assert left_of(name) == []
    end(reader, kill=True)
    assert left_of(name) == []
    assert not socket_of(url).parent.exists()


def test_a_dead_engines_folder_goes_with_the_memory_of_a_living_reader(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    code = "import sys\nfrom hal.transport import private_ipc_url\n"
    engine = start(code + "print(private_ipc_url(shared=True), flush=True)\nsys.stdin.readline()")
    url = engine.stdout.readline().strip()
    reader = start(READER, url)
    _, name = reader.stdout.readline().split()
    end(engine, kill=True)
    # The reader's process has not adopted the folder: its lock was held when it opened
    assert remove_stale_folders(tmp_path) == [socket_of(url).parent]
    assert left_of(name) == []
    end(reader, kill=True)
    assert left_of(name) == []
    assert list(tmp_path.iterdir()) == []


def test_a_reader_whose_sockets_cannot_be_closed_still_removes_its_memory(url, monkeypatch):
    reader = OutputReader(url)
    name, close_sockets = reader._receiver._memory.name, Receiver._close_sockets

    def fails(receiver):
        close_sockets(receiver)
        raise OSError("interrupted")

    monkeypatch.setattr(Receiver, "_close_sockets", fails)
    assert left_of(name)
    with pytest.raises(OSError, match="interrupted"):
        reader.close()
    assert left_of(name) == []


def test_a_worker_whose_memory_cannot_be_given_back_closes_all_else(url, monkeypatch):
    told, closes = [], SharedSender.close

    def fails(sender):
        closes(sender)
        raise OSError("interrupted")

    monkeypatch.setattr(threading, "excepthook", lambda found: told.append(found.exc_value))
    monkeypatch.setattr(SharedSender, "close", fails)
    sink = open_sink(url)
    descriptor = sink._wake_end
    sink.close(10)
    assert sink._connection.is_closed
    assert sink._wake == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert [str(error) for error in told] == ["interrupted"]


@pytest.fixture
def removed(opened, large):
    """A reader, whose domain the test removes, and a sink that has made places there and holds nothing any more."""
    reader, sink = opened.reader(), opened.sink()
    sink.put(large(1))
    assert reader.read(10).record.step == 1
    reader.acknowledge()
    with sink._room:
        assert sink._room.wait_for(lambda: not len(sink._window), 10)
    return reader, sink


def test_a_worker_does_not_make_a_removed_folder_anew(removed, opened, large, caplog):
    reader, sink = removed
    folder, name = reader._receiver._memory._folder, reader._receiver._memory.name
    domains.remove_domain(folder)
    larger = large(2, requests=[f"r{row}" for row in range(8)])  # needs places anew
    sink.put(larger)
    assert reader.read(10).record == larger.resolve()  # the socket is still there, and serves
    assert reader.counters()["shared"] == 1
    assert not folder.exists()
    assert left_of(name) == []
    assert "large frames go through the socket: no domain of shared memory" in caplog.text


@pytest.mark.parametrize("mode", [0o700, 0o750])  # by umask
def test_a_folder_that_is_removed_while_a_worker_makes_places_is_not_left_anew(
    removed, large, caplog, monkeypatch, mode
):
    """Between the worker's look and iceoryx2, which makes the whole path again if it is not there."""
    reader, sink = removed
    folder, name = reader._receiver._memory._folder, reader._receiver._memory.name
    made = []

    def reserve(sender, slot):
        domains.remove_domain(folder)
        folder.mkdir(mode)  # as iceoryx2 does
        (domains.MEMORY / f"{domains.prefix_of(name)}late").touch()
        made.append(slot)

    monkeypatch.setattr(SharedSender, "_reserve", reserve)
    larger = large(2, requests=[f"r{row}" for row in range(8)])
    sink.put(larger)
    assert reader.read(10).record == larger.resolve()
    assert made
    assert not folder.exists()
    assert left_of(name) == []
    assert "large frames go through the socket" in caplog.text


def test_a_private_folder_that_was_made_anew_is_removed_too_and_no_other(tmp_path):
    for parent, stays in (("hal-12345678", False), ("mine", True)):
        folder = tmp_path / parent / f"output.shm-{'0' * 16}"
        folder.mkdir(parents=True)
        domains.remove_if_revived(folder)
        assert not folder.exists()
        assert folder.parent.exists() == stays


def test_a_reader_does_not_make_its_removed_folder_anew(opened, url, caplog):
    reader = opened.reader()
    memory = reader._receiver._memory
    folder = memory._folder
    domains.remove_domain(folder)
    assert memory.queue(5) is None
    assert not folder.exists()
    assert files_of(reader) == []
    assert "it comes through the socket: no domain of shared memory" in caplog.text


def test_what_a_killed_reader_left_is_removed_by_the_next_whatever_that_reads(url):
    dying = start(READER, url)
    _, name = dying.stdout.readline().split()
    end(dying, kill=True)
    assert left_of(name)
    with OutputReader(url.replace("shm:", "ipc:")):
        assert left_of(name) == []
        assert not list(socket_of(url).parent.glob("*.shm-*"))


@pytest.mark.parametrize("why", ["room", "path"])
def test_a_reader_that_fails_leaves_no_socket(tmp_path, monkeypatch, why):
    if why == "room":
        monkeypatch.setattr(domains, "MARGIN", 1 << 60)
    folder = tmp_path / ("here" if why == "room" else 'h"re')
    folder.mkdir()
    with pytest.raises(shared_memory.Unavailable):
        OutputReader(f"shm://{folder}/socket")
    assert list(Path(folder).iterdir()) == []


def test_a_name_from_a_peer_is_cut_in_the_log(url, caplog):
    with OutputReader(url):
        sender = SharedSender(socket_of(url), 5, 64 << 20)
        sender.follow("x" * 5000)
        frame = shared_memory.Parts((b"x" * 70_000,))
        assert not sender.offer(frame, 1, 1)
    assert "names no domain" in caplog.text
    assert len(caplog.text) < 500 + len(os.fspath(socket_of(url)))
