"""Valid addresses, and files that a reader never touches; invalid seconds and cursors."""

import contextlib
import math
import os
import socket
import subprocess
import sys
import textwrap

import pytest
from hal_core.errors import HalError, InvalidValue, Unavailable
from hal_engine.reading import OutputReader
from hal_engine.transport import open_sink, private_ipc_url
from hal_engine.transport.urls import release_ipc, socket_of

from .conftest import Large


@pytest.mark.parametrize(("kind", "named"), [("file", "file"), ("folder", "folder"), ("link", "symbolic link")])
def test_a_reader_refuses_what_is_no_socket_and_leaves_it_alone(tmp_path, kind, named):
    path, kept = tmp_path / "thing", tmp_path / "kept"
    kept.write_text("precious")
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(kept)
    with pytest.raises(InvalidValue, match=f"names a {named}") as raised:
        OutputReader(f"ipc://{path}")
    assert raised.value.cure
    release_ipc(f"ipc://{path}")
    assert os.path.lexists(path)
    assert path.is_dir() or path.read_text() == "precious"


def test_a_file_that_took_the_place_of_the_socket_stays(tmp_path):
    reader = OutputReader(f"ipc://{tmp_path}/socket")
    os.unlink(tmp_path / "socket")
    (tmp_path / "socket").write_text("precious")
    release_ipc(reader.url)
    assert (tmp_path / "socket").read_text() == "precious"
    os.unlink(tmp_path / "socket")
    reader.close()


def test_a_lock_of_another_program_stays_as_it_is(tmp_path):
    (lock := tmp_path / "poetry.lock").write_text("the lock of another program")
    with OutputReader(f"ipc://{tmp_path}/poetry"):
        pass
    (tmp_path / "package").mkdir()
    with pytest.raises(InvalidValue, match="names a folder"):
        OutputReader(f"ipc://{tmp_path}/package")
    assert lock.read_text() == "the lock of another program"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package", "poetry.lock"]


def test_what_a_dead_reader_left_is_replaced_and_a_living_one_is_not(tmp_path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "socket"))
    url = f"ipc://{tmp_path}/socket"
    with OutputReader(url), pytest.raises(InvalidValue, match="has a reader already"):
        OutputReader(url)


def test_what_another_program_listens_at_is_left_alone(tmp_path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "socket"))
        other.listen(1)
        with pytest.raises(InvalidValue, match=f"has a reader already: process {os.getpid()} "):
            OutputReader(f"ipc://{tmp_path}/socket")
        release_ipc(f"ipc://{tmp_path}/socket")
        assert [path.name for path in tmp_path.iterdir()] == ["socket"]


def test_a_reader_does_not_remove_the_socket_that_replaced_its_own(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as other:
        with OutputReader(f"ipc://{path}"):
            path.unlink()
            other.bind(str(path))
        assert path.is_socket()


def test_an_addresss_reader_is_named_and_survives_a_foreign_release(tmp_path):
    url = f"ipc://{tmp_path}/socket"
    code = f"""
        import os, pytest
        from hal_engine.reading import OutputReader
        from hal_engine.transport import release_ipc
        release_ipc({url!r})
        with pytest.raises(Exception, match="has a reader already: process {os.getpid()} "):
            OutputReader({url!r})
    """
    with OutputReader(url):
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
        assert [path.name for path in tmp_path.iterdir()] == ["socket"]
    assert list(tmp_path.iterdir()) == []


RACER = """
    import sys
    from hal_core.errors import InvalidValue
    from hal_engine.reading import OutputReader

    print("ready", flush=True)
    for url in sys.stdin:  # each at the moment at which the others get it too
        try:
            reader = OutputReader(url.strip(), grace=0)
            print("has", flush=True)
        except InvalidValue as error:
            reader = None
            print(error.what, flush=True)
        sys.stdin.readline()
        if reader is not None:
            reader.close()
        print("over", flush=True)
"""


@pytest.mark.parametrize("left", [False, True], ids=["new", "left by a dead reader"])
def test_of_readers_that_start_at_one_moment_exactly_one_gets_the_address(tmp_path, left):
    def say(line):
        for racer in racers:
            racer.stdin.write(line)
        for racer in racers:
            racer.stdin.flush()

    url = f"ipc://{tmp_path}/socket"
    command = [sys.executable, "-c", textwrap.dedent(RACER)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        racers = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(3)]
        for racer in racers:
            stack.callback(racer.kill)
            assert racer.stdout.readline() == "ready\n"
        for _ in range(30):
            if left:
                with socket.socket(socket.AF_UNIX) as dead:
                    dead.bind(str(tmp_path / "socket"))
            say(f"{url}\n")
            lines = [racer.stdout.readline().strip() for racer in racers]
            holder = lines.index("has")
            others = [words for number, words in enumerate(lines) if number != holder]
            assert all(f"has a reader already: process {racers[holder].pid} " in words for words in others)
            say("\n")
            assert [racer.stdout.readline() for racer in racers] == ["over\n"] * 3
            assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mask", [0, 0o77, 0o777])
def test_modes_do_not_depend_on_the_umask(tmp_path, monkeypatch, mask):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    before = os.umask(mask)
    try:
        url = private_ipc_url()
        with OutputReader(url, timeout=10) as reader:
            sink = open_sink(url)
            sink.put(Large(1))
            assert reader.read(10) is not None
            folder = socket_of(url).parent
            modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
            mode = folder.stat().st_mode & 0o777
            reader.acknowledge()
            sink.close(10)
        release_ipc(url)
    finally:
        os.umask(before)
    assert modes == {"output": 0o600, "paddle-hal.lock": 0o600}
    assert mode == 0o700


def test_a_socket_is_at_no_time_open_to_others(tmp_path, monkeypatch):
    """Its mode at the very moment at which it appears."""
    seen, bind = [], socket.socket.bind

    def noted(self, where):
        bind(self, where)
        seen.append(os.stat(where).st_mode & 0o777)

    monkeypatch.setattr(socket.socket, "bind", noted)
    before = os.umask(0)
    try:
        OutputReader(f"ipc://{tmp_path}/socket").close()
    finally:
        os.umask(before)
    assert seen == [0o600]


@pytest.mark.parametrize("folder", ["relative", "/" + "x" * 120])
def test_a_folder_that_cannot_hold_a_socket_is_named_with_the_cure(monkeypatch, folder):
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    with pytest.raises(Unavailable) as raised:
        private_ipc_url()
    assert "XDG_RUNTIME_DIR" in raised.value.cure


@pytest.mark.parametrize("name", ["timeout", "lost_after", "grace"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1, "a", True])
def test_what_are_no_seconds_is_refused_at_opening(url, name, value):
    with pytest.raises(InvalidValue, match=name):
        OutputReader(url, **{name: value})


@pytest.mark.parametrize("after", [3, "x", (1,), (1, -1), (1, 2.0), {0: 1}, {"a": 1}])
def test_what_is_no_cursor_is_refused(url, after):
    with pytest.raises(InvalidValue, match="not a \\(session, sequence\\)"):
        OutputReader(url, after=after)


def test_a_read_that_cannot_be_is_an_error_and_not_a_hang(opened):
    reader = opened.reader()
    with pytest.raises(InvalidValue, match="nan"):
        reader.read(math.nan)
    reader.close()
    with pytest.raises(HalError, match="the reader is closed"):
        reader.read(0)
