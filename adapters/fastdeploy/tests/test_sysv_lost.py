"""A System V queue that is lost, whose limits are lowered, or that cannot be opened: errors and kept records."""

import shutil
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from hal_core.errors import InvalidValue, SinkClosed, Unavailable
from hal_fastdeploy.sysv.queue import Queue

from . import sysv_place as shared

sysv_ipc = pytest.importorskip("sysv_ipc")
legacy, Output, place = shared.legacy, shared.Output, shared.place
receive, until, undelivered = shared.receive, shared.until, shared.undelivered
started, put_until_closed = shared.started, shared.put_until_closed


# The queue is lost, or its limits ------------------------------------------------------------------------------------


def test_g19_a_removed_queue_names_the_unread_messages_and_requests(place):
    sink, reader = place.sink(), place.reader()
    for step in range(6):
        sink.put(Output(step))
    read = [legacy.parse_plain(data)["tokens"][0] for data in receive(reader, 2)]
    while sink.counters()["frames"] < 6:
        time.sleep(0.001)
    reader.remove()
    with pytest.raises(SinkClosed, match=r"it was removed; \d messages \(\d+ bytes\) in it may be unread, of r0, r1"):
        put_until_closed(sink, 6)
    lost = {position for _, position, _ in undelivered(sink)}
    assert read == [0, 1]
    assert set(range(2, 6)) <= lost


def test_a_queue_removed_while_idle_is_noticed(place):
    sink, reader = place.sink(), place.reader()
    sink.put(Output(0))
    while sink.counters()["frames"] < 1:
        time.sleep(0.001)
    reader.remove()
    sink._thread.join(20)  # the sender's thread ends with the queue
    with pytest.raises(SinkClosed, match="it was removed; 1 messages"):
        sink.put(Output(1))
    assert undelivered(sink) == [("r0", 0, 1), ("r1", 0, 1)]


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
    from sysv_place import Output, undelivered
    from hal_engine.transport import open_sink
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
    print(undelivered(sink))
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
    arguments = ["unshare", "-i", sys.executable, "-c", textwrap.dedent(LIMITS), str(shared.HERE)]
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
        import hal_fastdeploy.sysv.sink
        from hal_engine.transport import open_sink
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
