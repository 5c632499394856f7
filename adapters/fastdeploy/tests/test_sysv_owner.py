"""Ownership of a System V queue: never two sinks, across users and containers; and the leftovers of a lost one."""

import logging
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hal_core.errors import HalError, InvalidValue, SinkClosed
from hal_engine.transport import open_sink
from hal_fastdeploy.sysv.owner import may_live
from hal_fastdeploy.sysv.queue import derive_key

from . import sysv_place as shared

sysv_ipc = pytest.importorskip("sysv_ipc")
_HERE = Path(__file__).parent
legacy, Output, place = shared.legacy, shared.Output, shared.place
receive, until, undelivered = shared.receive, shared.until, shared.undelivered
started, put_until_closed = shared.started, shared.put_until_closed

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")

#: A separate worker: opens the sink, sends some steps, prints the results, and obeys the commands of its input.
WORKER = """
    import os, sys, time
    sys.path.insert(0, sys.argv[1])
    from sysv_place import Output
    from hal_engine.transport import open_sink
    from hal_core.errors import HalError
    try:
        sink = open_sink(sys.argv[2])
    except HalError as error:
        print("refused:", error, flush=True)
        raise SystemExit
    for step in range(int(sys.argv[3])):
        sink.put(Output(step))
    while sink.counters()["frames"] < int(sys.argv[3]):
        time.sleep(0.001)
    print("sent", os.getpid(), flush=True)
    if sys.stdin.readline() == "close\\n":
        sink.close(0)
        print("closed", flush=True)
        sys.stdin.readline()
"""

#: A sender without locks, like FastDeploy's own writers.
STRANGER = """
    import os, sys
    sys.path.insert(0, sys.argv[1])
    import legacy_reader
    if sys.argv[3] != "0":
        os.setuid(int(sys.argv[3]))
    queue = legacy_reader.LegacyQueue(int(sys.argv[2]), "get_output")
    queue.send(bytes(2056))
    print("sent", flush=True)
    sys.stdin.read()
"""


def tell(process, line):
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline()


def in_child(function, uid=0):
    """Return the output of a forked child of that user: a function's text, or its error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if uid:
                os.setuid(uid)
            os.write(write, str(function()).encode())
        except HalError as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def url_of(folder, number, **options):
    extra = "".join(f"&{name}={value}" for name, value in options.items())
    return f"sysv://{folder}?layout=plain&id={number}{extra}"


def move_to_a_common_folder(place):
    """Each user may read /dev/shm, and only this one the test's own folder."""
    place.folder = Path("/dev/shm")
    place.key = legacy.custom_ftok(place.folder, place.number)


# Two sinks ---------------------------------------------------------------------------------------------------------


def test_g19_two_ids_on_one_key_are_one_queue(place):
    """8000 and 8256 are equal in their low 8 bits, all that ftok takes; the first sink loses no message."""
    place.key = derive_key(str(place.folder), 8_000, "ftok")
    assert place.key == derive_key(str(place.folder), 8_256, "ftok")
    first = open_sink(url_of(place.folder, 8_000, key="ftok"))
    place.sinks.append(first)
    for step in range(5):
        first.put(Output(step))
    with pytest.raises(InvalidValue, match="is open in this process already") as caught:
        open_sink(url_of(place.folder, 8_256, key="ftok"))
    assert "ids may share a key" in str(caught.value)
    found = [legacy.parse_plain(data)["tokens"] for data in receive(place.reader(), 5)]
    assert found == [[step, step] for step in range(5)]
    assert undelivered(first, 5) == []


@pytest.mark.parametrize("options", [{}, {"stale": "drop"}])
def test_g19_a_queue_of_another_worker_is_refused_until_it_ends(place, options):
    reader = place.reader()
    with started(WORKER, place.url(), 3) as worker:
        assert worker.stdout.readline() == f"sent {worker.pid}\n"
        assert len(receive(reader, 3)) == 3  # all messages are read: the owner is found all the same
        with pytest.raises(InvalidValue, match=f"belongs to '.+' of process {worker.pid}"):
            place.sink(**options)
        assert in_child(lambda: open_sink(place.url(**options))).startswith("InvalidValue: url: the queue")
        worker.kill()
        worker.wait()
        place.sink(**options)


def test_g19_a_sink_closed_in_a_process_that_lives_on_gives_the_queue_up(place):
    reader = place.reader()
    with started(WORKER, place.url(), 2) as worker:
        worker.stdout.readline()
        assert len(receive(reader, 2)) == 2
        assert tell(worker, "close") == "closed\n"
        sink = place.sink()  # the process is there, and sent last, but its sink is not
        sink.put(Output(7))
        assert legacy.parse_plain(receive(reader, 1)[0])["tokens"] == [7, 7]
        worker.kill()


def test_g19_of_sinks_that_open_at_once_one_gets_the_queue(place):
    for _ in range(5):
        go, done = os.pipe(), os.pipe()
        children = []
        for _ in range(6):
            child = os.fork()
            if child == 0:
                try:
                    os.close(go[1])
                    os.read(go[0], 1)  # until the parent closes its end: all at once
                    open_sink(place.url())
                    os.write(done[1], b"+")
                    time.sleep(60)
                except InvalidValue:
                    os.write(done[1], b"-")
                finally:
                    os._exit(0)
            children.append(child)
        for end in (go[0], go[1], done[1]):
            os.close(end)
        answers = b""
        while len(answers) < 6 and (more := os.read(done[0], 6)):
            answers += more
        os.close(done[0])
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert sorted(answers) == sorted(b"+-----")


@needs_root
def test_g19_another_users_sink_is_met_too(place):
    move_to_a_common_folder(place)
    place.sink(mode="666")
    here = os.getpid()
    answer = in_child(lambda: open_sink(place.url(mode="666")), uid=NOBODY)
    assert re.search(rf"belongs to .*process {here}", answer)


@needs_root
def test_an_unusable_queue_of_another_user_is_refused_with_its_owner(place):
    move_to_a_common_folder(place)
    place.sink()
    answer = in_child(lambda: open_sink(place.url()), uid=NOBODY)
    assert "Permission denied; it is of user 0, mode 600" in answer


@needs_root
def test_g19_a_sink_in_another_pid_namespace_is_met_too(place):
    """As between two containers that share their IPC namespace: neither sees the other's processes."""
    before = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*before, "true"], check=False).returncode:
        pytest.skip("no pid namespace may be made here")
    sink, reader = place.sink(), place.reader()
    sink.put(Output(1))
    with started(WORKER, place.url(), 1, before=before) as worker:
        assert "belongs to a process that cannot be seen from here" in worker.stdout.readline()
    assert len(receive(reader, 1)) == 1
    assert undelivered(sink, 5) == []
    with started(WORKER, place.url(), 1, before=before) as worker:  # as when a container starts again
        assert worker.stdout.readline().startswith("sent")
        worker.stdin.close()
    reader.send(bytes(2_056))  # by this process, which the next one cannot see
    for options, answer in (({}, "cannot be seen from here may send to the queue"), ({"stale": "drop"}, "sent")):
        with started(WORKER, place.url(**options), 1, before=before) as worker:
            assert answer in worker.stdout.readline()
            worker.stdin.close()


def test_a_forked_child_neither_owns_nor_gives_up_what_its_parent_owns(place):
    sink = place.sink()
    assert in_child(lambda: sink.close(1)) == "None"
    with pytest.raises(InvalidValue, match="is open in this process already"):
        place.sink()


# What another sender left, or sends ----------------------------------------------------------------------------------


def test_what_a_killed_worker_left_is_named_with_count_and_bytes(place, caplog):
    with started(WORKER, place.url(), 4) as worker:
        worker.stdout.readline()
        worker.kill()
    with caplog.at_level(logging.WARNING, "hal"):
        sink = place.sink()
    assert f"held 4 messages (8224 bytes) of process {worker.pid}, which is gone; removed" in caplog.text
    assert sink.counters()["stale_removed"] == 4


def test_g19_a_sender_without_a_lock_is_found_though_all_it_sent_was_read(place):
    reader = place.reader()
    with started(STRANGER, place.key, 0) as stranger:
        stranger.stdout.readline()
        assert len(receive(reader, 1)) == 1
        with pytest.raises(InvalidValue, match=f"process {stranger.pid} sends to the queue .*, all it sent was read"):
            place.sink()
        stranger.kill()
        stranger.wait()
        place.sink()


def test_g19_a_later_sender_closes_the_sink_and_loses_no_message(place):
    sink, reader = place.sink(), place.reader()
    sink.put(Output(1))
    assert len(receive(reader, 1)) == 1
    with started(STRANGER, place.key, 0) as stranger:
        stranger.stdout.readline()
        with pytest.raises(SinkClosed, match=f"process {stranger.pid} sends to it too"):
            put_until_closed(sink, 2)
        assert ("r0", 2, 1) in undelivered(sink)
        stranger.kill()
    assert receive(reader, 1) == [bytes(2_056)]  # not taken back: it belongs to another sender


@needs_root
def test_g19_a_living_sender_of_another_user_is_not_called_gone(place):
    """A signal to it is refused (EPERM), which shows that it exists."""
    move_to_a_common_folder(place)
    place.reader()
    with started(STRANGER, place.key, NOBODY - 1) as stranger:
        stranger.stdout.readline()
        answer = in_child(lambda: open_sink(place.url()), uid=NOBODY)
        stranger.kill()
    assert re.search(rf"process {stranger.pid} sends to the queue", answer)


def test_a_sender_that_ended_and_was_not_waited_for_is_gone(place):
    with started(STRANGER, place.key, 0) as stranger:
        stranger.stdout.readline()
        stranger.kill()
        os.waitid(os.P_PID, stranger.pid, os.WEXITED | os.WNOWAIT)
        assert not may_live(stranger.pid)
        assert place.sink().counters()["stale_removed"] == 1
    assert may_live(os.getpid())
    assert may_live(0)
