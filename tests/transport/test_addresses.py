"""What an address may name, and what a reader never touches; numbers that are no seconds and no cursor."""

from __future__ import annotations

import math
import os
import socket
import sys
import threading

import pytest
from hal_core.errors import HalError, InvalidValue, Unavailable

from hal.reading import OutputReader
from hal.transport import open_sink, private_ipc_url
from hal.transport.urls import release_ipc, scheme_of


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


def test_what_a_dead_reader_left_is_replaced_and_a_living_one_is_not(tmp_path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "socket"))
    url = f"ipc://{tmp_path}/socket"
    with OutputReader(url), pytest.raises(InvalidValue, match="has a reader already"):
        OutputReader(url)


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:99999", "tcp://127.0.0.1:-1", "tcp://127.0.0.1:http", "tcp://h:"])
def test_a_port_that_is_none_is_refused(url):
    with pytest.raises(InvalidValue, match="has the port"):
        scheme_of(url)


@pytest.mark.parametrize("scheme", ["ipc", "shm"])
@pytest.mark.parametrize("opening", [open_sink, OutputReader])
def test_g26_a_path_with_a_nul_is_refused_by_both_sides(tmp_path, scheme, opening):
    with pytest.raises(InvalidValue, match="NUL") as raised:
        opening(f"{scheme}://{tmp_path}/soc\0ket")
    assert (raised.value.argument, raised.value.cure) == ("url", "leave it out")
    assert list(tmp_path.iterdir()) == []


def test_g26_without_iceoryx2_both_sides_say_what_to_install_and_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "iceoryx2", None)
    before = set(threading.enumerate())
    for opening in (open_sink, OutputReader):
        with pytest.raises(Unavailable, match=r"without iceoryx2.*pip install 'paddle-hal\[shm\]'.*x86-64"):
            opening(f"shm://{tmp_path}/socket")
    assert set(threading.enumerate()) == before
    assert list(tmp_path.iterdir()) == []
    with OutputReader(f"ipc://{tmp_path}/socket"):
        pass  # the address is free again


@pytest.mark.parametrize("folder", ["relative", "/" + "x" * 120])
def test_a_folder_that_cannot_hold_a_socket_is_told_with_the_cure_that_helps(monkeypatch, folder):
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    with pytest.raises(Unavailable) as raised:
        private_ipc_url()
    assert "XDG_RUNTIME_DIR" in raised.value.cure


@pytest.mark.parametrize("name", ["timeout", "lost_after", "grace"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1, "a", True])
def test_what_are_no_seconds_is_refused_at_opening(url, name, value):
    with pytest.raises(InvalidValue, match=name):
        OutputReader(url, **{name: value})


@pytest.mark.parametrize("after", [3, "x", (1,), (1, -1), {0: 1}, {"a": 1}])
def test_what_is_no_cursor_is_refused(url, after):
    with pytest.raises(InvalidValue, match="no \\(session, sequence\\)"):
        OutputReader(url, after=after)


def test_a_read_that_cannot_be_is_an_error_and_not_a_hang(opened):
    reader = opened.reader()
    with pytest.raises(InvalidValue, match="nan"):
        reader.read(math.nan)
    reader.close()
    with pytest.raises(HalError, match="the reader is closed"):
        reader.read(0)
