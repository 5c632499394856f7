"""What those that die or fork leave in shared memory: nothing, or what the next one knows."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from hal.reading import SessionLost
from hal.transport import domains
from hal.transport.shared_memory import SLOTS
from hal.transport.urls import remove_stale_folders, socket_of

from .conftest import files_of, needs_iceoryx2

pytestmark = needs_iceoryx2


@pytest.fixture
def url(shared_url):
    return shared_url


WORKER = """
    import os, signal, sys
    import numpy as np
    from hal.transport import open_sink
    from hal_core.output.records import OutputRecord

    class Output:
        step = int(sys.argv[2])
        def resolve(self):
            one, ids = np.ones(1, np.uint8), np.zeros((1, 1 << 14), np.int32)
            return OutputRecord(self.step, ("a",), one, one * 0, np.arange(1), one.astype("i4"), np.arange(1), one < 0,
                                logprob_token_ids=ids, logprobs=ids.astype("f4"))
        def settle(self, error):
            pass

    open_sink(sys.argv[1], heartbeat=0.05).put(Output())
    if "forks" in sys.argv and os.fork() == 0:
        print(os.getpid(), flush=True)
    signal.pause()
"""

READER = """
    import os, signal, sys
    from hal.reading import OutputReader
    with OutputReader(sys.argv[1], auto_ack=False) as reader:
        assert reader.read(30).record.step == 1
        print(reader._receiver._memory.name, flush=True)
        if "forks" in sys.argv and os.fork() == 0:
            print(os.getpid(), flush=True)
            os.kill(os.getppid(), 9)
            signal.pause()
        signal.pause() if "forks" in sys.argv else None
        os.kill(os.getpid(), 9)
"""


def start(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("forks", [False, True])
def test_a_killed_worker_leaves_nothing_while_its_reader_lives(opened, url, forks):
    """Also where a forked child of it lives on, which has all that it had open."""
    reader = opened.reader(grace=0.2, lost_after=0.5)
    alone = files_of(reader)
    for life in (1, 2):
        worker = start(WORKER, url, str(life), *(["forks"] if forks else []))
        record = reader.read(30).record
        child = int(worker.stdout.readline()) if forks else 0
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        with pytest.raises(SessionLost):
            reader.read(10)
        assert not record.logprobs.any()  # still there
        del record
        gc.collect()
        assert files_of(reader) == alone
        if forks:
            os.kill(child, signal.SIGKILL)


def test_a_killed_reader_is_known_as_dead_by_its_lock_although_a_forked_child_lives_on(opened, url, large):
    """The child holds the socket too, so a next reader needs another url; its memory is removed all the same."""
    dying = start(READER, url, "forks")
    opened.sink().put(large(1))
    name, child = (dying.stdout.readline().strip() for _ in range(2))
    dying.wait()
    dying.stdout.close()
    folder = socket_of(url).parent
    assert [path.name for path in domains.remove_stale_domains(folder)] == [f"output.shm-{name}"]
    assert not list(domains.MEMORY.glob(f"{domains.prefix_of(name)}*"))
    os.kill(int(child), signal.SIGKILL)


def test_a_killed_readers_memory_is_removed_by_the_next_and_the_worker_goes_on(opened, url, large, steps):
    sink = opened.sink()
    dying = start(READER, url)
    sink.put(large(1))
    name = dying.stdout.readline().strip()
    dying.wait()
    dying.stdout.close()
    assert list(domains.MEMORY.glob(f"{domains.prefix_of(name)}*"))
    for step in range(2, 2 + SLOTS):  # nobody takes them out
        sink.put(large(step))
    reader = opened.reader()
    assert steps(reader, 1 + SLOTS) == list(range(1, 2 + SLOTS))
    sink.put(large(100))
    assert steps(reader, 1) == [100]
    assert reader.counters()["shared"] >= 1
    assert not list(domains.MEMORY.glob(f"{domains.prefix_of(name)}*"))
    assert [path.name for path in socket_of(url).parent.glob("*.shm-*")] == [reader._receiver._memory._folder.name]


def test_what_both_sides_leave_when_they_are_killed_goes_with_their_private_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    code = "import sys\nfrom hal.transport import private_ipc_url\nimport os, signal\n"
    code += "print(private_ipc_url(shared=True), flush=True)\nsignal.pause()"
    owner = start(code)
    url = owner.stdout.readline().strip()
    worker, reader = start(WORKER, url, "1"), start(READER, url)
    name = reader.stdout.readline().strip()
    for process in (worker, reader, owner):
        process.kill()
        process.wait()
        process.stdout.close()
    assert list(domains.MEMORY.glob(f"{domains.prefix_of(name)}*.data"))
    assert remove_stale_folders(tmp_path) == [socket_of(url).parent]
    assert not list(domains.MEMORY.glob(f"{domains.prefix_of(name)}*"))
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_that_ends_takes_nothing_away(opened, large, steps):
    """Neither files nor places: what the child drops, and its end, are none of the parent's business."""
    reader, sink = opened.reader(), opened.sink()
    sink.put(large(1))
    kept = [reader.read(10).record]
    files = files_of(reader)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            kept.clear()
            reader.close()
            for session in reader._receiver.sessions.values():
                session.shared.close()
            reader._receiver._memory.close()
            sink.close(1)
            sink._wire.close_memory()
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert files_of(reader) == files
    for step in range(2, 2 + 2 * SLOTS):
        sink.put(large(step))
        assert steps(reader, 1) == [step]
    assert reader.counters()["shared"] == 1 + 2 * SLOTS
    assert kept[0] == large(1).resolve()
