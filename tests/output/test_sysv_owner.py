"""Who owns a System V queue: never two sinks, whoever and wherever they are; and what is left when it is lost."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hal_core.errors import HalError, InvalidValue, SinkClosed, Unavailable

from hal.transport import open_sink
from hal.transport.sysv_owner import may_live
from hal.transport.sysv_queue import Queue, derive_key

sysv_ipc = pytest.importorskip("sysv_ipc")
_HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("sysv_tests", _HERE / "test_sysv.py")
shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shared)
legacy, Output, receive, told, place = shared.legacy, shared.Output, shared.receive, shared.told, shared.place

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")

#: A worker of its own: opens the sink, sends some steps, says what came of it, and does what it is told by its input.
WORKER = """
    import os, sys, time
    sys.path.insert(0, sys.argv[1])
    from test_sysv import Output
    from hal.transport import open_sink
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

#: A sender that knows nothing of locks, as FastDeploy's own writers are.
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


def started(code, *arguments, before=()):
    command = [*before, sys.executable, "-c", textwrap.dedent(code), str(_HERE), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def tell(process, line):
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline()


def in_child(function, uid=0):
    """What a forked child of that user writes: a function's text, or the error it meets."""
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


def put_until_closed(sink, step):
    """Send one step after another; whoever calls it waits for SinkClosed."""
    while True:
        sink.put(Output(step))
        step += 1
        time.sleep(0.001)


def url_of(folder, number, **options):
    extra = "".join(f"&{name}={value}" for name, value in options.items())
    return f"sysv://{folder}?layout=plain&id={number}{extra}"


def move_to_a_common_folder(place):
    """Each user may look at /dev/shm, and only this one at the test's own folder."""
    place.folder = Path("/dev/shm")
    place.key = legacy.custom_ftok(place.folder, place.number)


# Two sinks ---------------------------------------------------------------------------------------------------------


def test_g19_two_ids_on_one_key_are_one_queue_and_the_second_sink_is_refused(place):
    """8000 and 8256 are equal in their low 8 bits, all that ftok takes; the first sink loses nothing by it."""
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
    assert told(first, 5) == []


@pytest.mark.parametrize("options", [{}, {"stale": "drop"}])
def test_g19_a_queue_of_another_workers_sink_is_refused_by_name_until_that_ends(place, options):
    reader = place.reader()
    with started(WORKER, place.url(), 3) as worker:
        assert worker.stdout.readline() == f"sent {worker.pid}\n"
        assert len(receive(reader, 3)) == 3  # nothing is unread: the owner is found all the same
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


def test_g19_of_sinks_that_open_at_the_same_moment_exactly_one_gets_the_queue(place):
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
def test_a_queue_of_another_user_that_may_not_be_used_is_refused_with_whose_it_is(place):
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
    assert told(sink, 5) == []
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


def test_g19_a_sender_that_comes_later_closes_the_sink_by_name_and_loses_nothing_of_its_own(place):
    sink, reader = place.sink(), place.reader()
    sink.put(Output(1))
    assert len(receive(reader, 1)) == 1
    with started(STRANGER, place.key, 0) as stranger:
        stranger.stdout.readline()
        with pytest.raises(SinkClosed, match=f"process {stranger.pid} sends to it too"):
            put_until_closed(sink, 2)
        assert ("r0", 2, 1) in told(sink)
        stranger.kill()
    assert receive(reader, 1) == [bytes(2_056)]  # not taken back: it is not ours


@needs_root
def test_g19_a_living_sender_of_another_user_is_not_called_gone(place):
    """A signal to it is refused (EPERM), which says that it exists."""
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


# The queue is lost, or its limits ------------------------------------------------------------------------------------


def test_g19_a_queue_that_is_removed_names_the_messages_that_may_be_unread_and_their_requests(place):
    sink, reader = place.sink(), place.reader()
    for step in range(6):
        sink.put(Output(step))
    read = [legacy.parse_plain(data)["tokens"][0] for data in receive(reader, 2)]
    while sink.counters()["frames"] < 6:
        time.sleep(0.001)
    reader.remove()
    with pytest.raises(SinkClosed, match=r"it was removed; \d messages \(\d+ bytes\) in it may be unread, of r0, r1"):
        put_until_closed(sink, 6)
    lost = {position for _, position, _ in told(sink)}
    assert read == [0, 1]
    assert set(range(2, 6)) <= lost


def test_a_queue_that_is_removed_while_nothing_is_sent_is_noticed_by_itself(place):
    sink, reader = place.sink(), place.reader()
    sink.put(Output(0))
    while sink.counters()["frames"] < 1:
        time.sleep(0.001)
    reader.remove()
    sink._thread.join(20)  # the sender's thread ends with the queue
    with pytest.raises(SinkClosed, match="it was removed; 1 messages"):
        sink.put(Output(1))
    assert told(sink) == [("r0", 0, 1), ("r1", 0, 1)]


def test_a_lowered_msg_qbytes_is_named_with_its_value(place):
    sink = place.sink()
    queue = sysv_ipc.MessageQueue(place.key)
    queue.max_size = 1_000
    sink.put(Output(0))
    sink._thread.join(20)
    with pytest.raises(SinkClosed, match="msg_qbytes was lowered to 1000, a message has 2056 bytes") as caught:
        sink.put(Output(1))
    assert "ipcrm -Q" in caught.value.cure


LIMITS = """
    import sys, time
    sys.path.insert(0, sys.argv[1])
    from test_sysv import Output, told
    from hal.transport import open_sink
    from hal_core.errors import HalError
    def limit(name, value):
        open(f"/proc/sys/kernel/{name}", "w").write(str(value))
    sink = open_sink("sysv:///dev/shm?layout=plain")
    sink.put(Output(0))
    while sink.counters()["frames"] < 1:
        time.sleep(0.001)
    limit("msgmnb", 1000)  # of new queues alone
    sink.put(Output(1))
    while sink.counters()["frames"] < 2:
        time.sleep(0.001)
    limit("msgmax", 1000)
    sink.put(Output(2))
    sink._thread.join(20)
    try:
        sink.put(Output(3))
    except HalError as error:
        print(type(error).__name__, error)
    print(told(sink))
    limit("msgmnb", 16384)
    limit("msgmax", 8192)
    for name, value in (("msgmni", "0"), ("sem", "250 32000 32 0")):
        limit(name, value)
        try:
            open_sink("sysv:///dev/shm?layout=plain&id=5")
        except HalError as error:
            print(type(error).__name__, error)
        limit(name, "100" if name == "msgmni" else "250 32000 32 100")
    open_sink("sysv:///dev/shm?layout=plain&id=5").close(0)
    print("fine")
"""


def test_a_lowered_limit_is_named_with_its_value_and_its_cure():
    """In an IPC namespace of its own, so that the machine's limits stay as they are."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-i", "true"], check=False).returncode:
        pytest.skip("no IPC namespace may be made here")
    arguments = ["unshare", "-i", sys.executable, "-c", textwrap.dedent(LIMITS), str(_HERE)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    closed, lost, queues, semaphores, fine = done.stdout.splitlines()
    assert closed.startswith("SinkClosed save_output: sink: the queue 0x")
    assert "kernel.msgmax was lowered to 1000, a message has 2056 bytes; 2 messages (4112 bytes)" in closed
    assert "sysctl -w kernel.msgmax=1048576" in closed
    assert lost == str([(name, step, 1) for step in range(3) for name in ("r0", "r1")])
    assert "raise kernel.msgmni" in queues
    assert "No space left" in semaphores
    assert "kernel.sem" in semaphores
    assert fine == "fine"


# Few descriptors, no thread, no key ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [True, False])
def test_g26_without_a_descriptor_left_opening_says_so_and_owns_nothing(place, loaded):
    code = """
        import os, resource, sys
        import hal.transport.sysv_sink
        from hal.transport import open_sink
        from hal_core.errors import Unavailable
        if sys.argv[3] == "True":
            import sysv_ipc
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
        try:
            open_sink(sys.argv[2])
        except Unavailable as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        open_sink(sys.argv[2]).close(0)
    """
    place.reader()
    with started(code, place.url(), loaded) as process:
        answer, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Too many open files" in answer
    assert "ulimit -n" in answer


def test_g26_without_a_thread_opening_says_so_and_owns_nothing(place, monkeypatch):
    def refused(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(Unavailable, match="can't start new thread"):
            place.sink()
    place.sink()


def test_a_key_of_zero_is_refused():
    """It is IPC_PRIVATE: each process would have a queue of its own."""
    with pytest.raises(InvalidValue, match="is 0"):
        Queue(0, 2_056, 0o600, drop_stale=False)
