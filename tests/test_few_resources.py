"""Few descriptors, a full disk: opening works, or its one-line error names the shortage; no files are left behind."""

import errno
import os
import shutil
import subprocess
import tempfile
import textwrap

import pytest
from hal_core.errors import Unavailable
from hal_engine.reading import OutputReader
from hal_engine.transport import open_sink, private_ipc_url, release_ipc
from hal_engine.transport.curve import CurveKeys

from tests import share

from .commands import LIBRARIES, environment, left_in, start

pytestmark = pytest.mark.long(18)

NAMESPACE = ("unshare", "-m")
MAY_MOUNT = shutil.which(NAMESPACE[0]) is not None and not subprocess.run([*NAMESPACE, "true"], check=False).returncode
WARM, WARM_UNDER = LIBRARIES, NAMESPACE if MAY_MOUNT else ()

#: Opens one kind under every limit, from one that allows no opening up to one with which all works.
FEW = """
    import os, resource, sys
    from hal_engine.reading import OutputReader
    from hal_engine.transport import open_sink, private_ipc_url, release_ipc
    from hal_engine.transport.curve import CurveKeys
    from hal_core.errors import HalError

    ENGINE, WORKER = CurveKeys.new(), CurveKeys.new()

    def close(opened):
        opened.close(0.0) if hasattr(opened, "put") else opened.close()

    KINDS = {
        "private": lambda: OutputReader(),
        "ipc": lambda: OutputReader(f"ipc://{os.environ['TMPDIR']}/reader"),
        "tcp": lambda: OutputReader("tcp://127.0.0.1:*"),
        "keys": lambda: OutputReader("tcp://127.0.0.1:*", curve=ENGINE.knowing(WORKER.public)),
        "sink": lambda: open_sink(f"ipc://{os.environ['TMPDIR']}/nobody"),
        "sink with keys": lambda: open_sink("tcp://127.0.0.1:9", curve=WORKER.knowing(ENGINE.public)),
    }
    kind = sys.argv[1]
    make = KINDS[kind]
    close(make())  # what is imported late
    held = [int(name) for name in os.listdir("/proc/self/fd")]
    used = max(held[:-1]) + 1
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    failed = worked = 0
    for free in range(0, 40):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, hard))
        try:
            opened = make()
        except HalError as error:
            assert not worked, f"{free}: {error}"
            failed += 1
            assert "\\n" not in str(error) and "(" in str(error), str(error)
            assert "file descriptors" in str(error) or "ulimit -n" in str(error), str(error)
        else:
            worked += 1
            if hasattr(opened, "read"):
                opened.read(0.01)
            close(opened)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        left = [name for folder in ("TMPDIR", "XDG_RUNTIME_DIR") for name in os.listdir(os.environ[folder])]
        assert left == [], left
        now = [int(name) for name in os.listdir("/proc/self/fd")]
        assert len(now) == len(held), f"{free}: descriptors leaked"
    print(failed, worked)
"""
KINDS = ["private", "ipc", "tcp", "keys", "sink", "sink with keys"]


@pytest.mark.parametrize("kind", KINDS)
def test_g26_with_few_descriptors_it_works_or_says_so_and_leaves_nothing(tmp_path, warm, kind):
    done = warm.run(kind, code=textwrap.dedent(FEW), env=environment(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    failed, worked = map(int, done.stdout.split())
    assert failed >= 5
    assert worked >= 5


@pytest.mark.parametrize("limit", share.cases([8, 12, 24, 34], {12, 24}.__contains__))
def test_hal_run_works_with_few_descriptors_or_says_so(tmp_path, limited, limit):
    is_fresh = limit == 24
    done = limited(limit, "run", "--prompt", "def f(", "--temperature=0", "--max-tokens", "2", is_fresh=is_fresh)
    assert (done.returncode, done.stdout.startswith("def f(")) in [(0, True), (2, False)], done.stderr
    assert done.stderr.count("\n") == 1
    if done.returncode:
        assert "ulimit -n" in done.stderr
    assert left_in(tmp_path) == []
    assert (done.returncode == 0) == (limit >= 24)


@pytest.mark.parametrize("limit", [8, 16, 32])
def test_hal_tail_works_with_few_descriptors_or_says_so(tmp_path, limited, limit):
    done = limited(limit, "tail", f"ipc://{tmp_path}/s", "--timeout", "0.1")
    assert done.returncode in (0, 2)
    assert done.stderr.count("\n") == 1
    assert ("ulimit -n" in done.stderr) == bool(done.returncode)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("arguments", [("--version",), ("devices",), ("devices", "--open"), ("conform", "cpu")])
def test_other_commands_end_in_one_line_or_work(tmp_path, limited, arguments):
    done = limited(9, *arguments)
    assert "Traceback" not in done.stderr + done.stdout
    assert done.returncode in (0, 2), done.stderr
    assert done.returncode == 0 or done.stderr.count("\n") == 1, done.stderr
    assert left_in(tmp_path) == []


#: In a process with so few descriptors.
LIMITED = """
    import os, resource, sys
    limit = int(sys.argv.pop(1))
    os.closerange(3, 1000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    from hal.cli import main
    main()
"""


@pytest.fixture
def limited(warm, tmp_path):
    """Run a command in a fork of the warm process, or ``whole``: Paddle's import needs descriptors too."""

    def run(limit, *arguments, is_fresh=False):
        code, env = textwrap.dedent(LIMITED), environment(tmp_path)
        if not is_fresh:
            return warm.run(str(limit), *arguments, code=code, env=env)
        process = start(tmp_path, str(limit), *arguments, code=code)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


def used_by(make):
    """How many descriptors it has opened, with a connection where there is one."""
    before = len(os.listdir("/proc/self/fd"))
    opened = make()
    try:
        return len(os.listdir("/proc/self/fd")) - before
    finally:
        opened.close(0.0) if hasattr(opened, "put") else opened.close()


def test_what_is_required_covers_what_is_used():
    from hal_engine.transport import descriptors

    url = private_ipc_url()
    engine, worker = CurveKeys.new(), CurveKeys.new()
    try:
        assert used_by(lambda: OutputReader(url)) + 1 < descriptors.READER
        assert used_by(lambda: open_sink(url)) + 1 < descriptors.SENDER
        keys = used_by(lambda: OutputReader("tcp://127.0.0.1:*", curve=engine.knowing(worker.public)))
        assert keys + 1 < descriptors.READER
    finally:
        release_ipc(url)


#: On a separate file system with room for so many more files, in a mount namespace of these tests' own.
DISK = """
    import os, subprocess, sys
    folder, room, *arguments = sys.argv[1:]
    mount = ["mount", "-t", "tmpfs", "-o", "nr_inodes=40,size=64k", "tmpfs", folder]
    subprocess.run(mount, check=True)
    os.environ["XDG_RUNTIME_DIR"] = os.environ["TMPDIR"] = folder
    try:
        with open(f"{folder}/blocks", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    except OSError:
        assert os.path.getsize(f"{folder}/blocks") == 65536
    names = []
    while True:
        try:
            open(f"{folder}/{len(names)}", "wb").close()
        except OSError:
            break
        names.append(f"{folder}/{len(names)}")
    for name in names[: int(room)]:
        os.remove(name)
    before = sorted(os.listdir(folder))
    pid = os.fork()
    if pid == 0:
        sys.argv[1:] = arguments
        from hal.cli import main
        main()
        sys.exit()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert sorted(os.listdir(folder)) == before, os.listdir(folder)
    sys.exit(status)
"""


#: The files that a command makes: an address has its socket, a private folder itself and its own lock.
FILES = {"run": 0, "tail": 1, "devices": 0}


ROOMS = [(command, room) for command, files in FILES.items() for room in range(files + 1)]


@pytest.mark.parametrize(("command", "room"), ROOMS)
def test_on_a_full_disk_it_works_or_says_so_and_leaves_nothing(tmp_path, warm, command, room):
    """``room``: the number of further files, up to the number that the command makes; there are no free blocks."""
    if not MAY_MOUNT:
        pytest.skip("no mount namespace may be made here")
    arguments = {
        "run": ["run", "--prompt", "def f(", "--temperature=0", "--max-tokens", "2"],
        "tail": ["tail", f"ipc://{tmp_path}/s", "--timeout", "0.1"],
        "devices": ["devices", "--open"],
    }[command]
    options = os.environ | {"HAL_DEVICE": "cpu", "HAL_PLUGINS": ""}
    done = warm.run(str(tmp_path), str(room), *arguments, code=textwrap.dedent(DISK), env=options)
    if "CalledProcessError" in done.stderr:
        pytest.skip("nothing may be mounted here")
    assert "AssertionError" not in done.stderr, done.stderr
    assert done.returncode in (0, 2), done.stderr
    if done.returncode:
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("hal: error: ")
        assert "make room" in done.stderr or "folder that exists and can be written" in done.stderr
    assert (done.returncode == 0) == (room >= FILES[command]), done.stderr


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EMFILE, errno.EDQUOT])
@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_private_folder_that_cannot_be_locked_is_not_left(tmp_path, monkeypatch, call, error):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def fail(*_, **__):
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(f"hal_engine.transport.urls.{'os.open' if call == 'open' else 'fcntl.flock'}", fail)
        with pytest.raises(Unavailable, match=os.strerror(error)) as caught:
            private_ipc_url()
    assert caught.value.cure
    assert list(tmp_path.iterdir()) == []


def test_no_folder_for_temporary_files_is_an_error_of_ours(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)

    def fail():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    with pytest.raises(Unavailable, match=r"No usable temporary directory.*\(make room in one of them"):
        private_ipc_url()


@pytest.mark.parametrize("failing", ["hub.select.epoll", "places._identity"])
def test_a_reader_that_fails_half_opened_leaves_neither_folder_nor_socket(tmp_path, monkeypatch, failing):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(f"hal_engine.transport.{failing}", fail)
    with pytest.raises(MemoryError):
        OutputReader()
    with pytest.raises(MemoryError):
        OutputReader(f"ipc://{tmp_path}/socket")
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_sink_that_gets_no_thread_leaves_no_descriptor(tmp_path, monkeypatch):
    before = len(os.listdir("/proc/self/fd"))

    def fail(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("hal_engine.transport.acknowledged_sink.threading.Thread.start", fail)
    with pytest.raises(RuntimeError, match="can't start"):
        open_sink(f"ipc://{tmp_path}/socket")
    assert len(os.listdir("/proc/self/fd")) == before
