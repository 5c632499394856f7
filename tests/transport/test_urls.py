"""Invalid urls that a user may write: refused by name, with a cure that helps, by reader and sink alike."""

import os

import pytest
from hal_core.errors import InvalidValue, Unavailable
from hal_engine.reading import OutputReader
from hal_engine.transport import open_sink, private_ipc_url

IPC, TCP = "write ipc:///folder/name, or use private_ipc_url()", "write tcp://host:port"
PORT = "write a port of 1 to 65535; a reader may take any with *"


@pytest.mark.parametrize("opening", [open_sink, OutputReader])
@pytest.mark.parametrize(
    ("url", "message", "cure"),
    [
        ("nonsense", "no scheme of ipc, tcp", ""),
        ("http://x:1", "no scheme of ipc, tcp", ""),
        ("shm:///folder/name", "no scheme of ipc, tcp", ""),
        ("tcp://nowhere", "names no host and port", TCP),
        ("tcp://[::1]:5555", "IPv6", "write the host's name, or its IPv4 address"),
        ("tcp://::1:5555", "IPv6", "write the host's name, or its IPv4 address"),
        ("tcp://127.0.0.1:notaport", "has the port", PORT),
        ("tcp://127.0.0.1:99999", "has the port", PORT),
        ("tcp://127.0.0.1:-1", "has the port", PORT),
        ("tcp://h:", "has the port", PORT),
        ("tcp://h:" + "9" * 5000, "has the port", PORT),
        ("tcp://é..b:1", "has a host that is no name", "write the host's name, or its IPv4 address"),
        (f"tcp://{'é' * 70}:1", "has a host that is no name", "write the host's name, or its IPv4 address"),
        ("tcp://h\udcff:1", "bytes that are no UTF-8", "use a host or folder whose name is text"),
        ("ipc:///tmp/name-\udcff", "bytes that are no UTF-8", "use a host or folder whose name is text"),
        ("ipc://relative", "is no absolute path", IPC),
        ("ipc:///" + "x" * 120, "more than 107 bytes", "use a shorter folder, or set TMPDIR to one"),
        ("ipc:///", "names no file", IPC),
        ("ipc:///tmp/socket/", "names no file", IPC),
        ("ipc:///tmp/..", "names no file", IPC),
        ("ipc:///tmp/.", "names no file", IPC),
        ("ipc:///tmp/soc\0ket", "NUL", "leave it out"),
    ],
    ids=lambda given: ascii(given)[:40],
)
def test_g26_a_url_that_cannot_be_is_refused_by_both_sides_with_the_cure(opening, url, message, cure):
    with pytest.raises(InvalidValue, match=message) as raised:
        opening(url)
    assert raised.value.argument == "url"
    assert raised.value.cure.startswith(cure or "write ipc:///folder/name or tcp://host:port")


def test_a_non_utf8_private_folder_is_refused_before_it_is_made(tmp_path, monkeypatch):
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    monkeypatch.setenv("XDG_RUNTIME_DIR", os.fsdecode(folder))
    with pytest.raises(Unavailable, match="is no UTF-8") as raised:
        private_ipc_url()
    assert "XDG_RUNTIME_DIR" in raised.value.cure
    assert os.listdir(folder) == []


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_sink_refuses_what_can_never_be_a_readers(tmp_path, kind):
    """It would wait for its deadline, and then report that there is no listener."""
    path = tmp_path / "thing"
    path.mkdir() if kind == "folder" else path.write_text("precious")
    with pytest.raises(InvalidValue, match=f"names a {kind}, not a socket"):
        open_sink(f"ipc://{path}")


@pytest.mark.parametrize("port", ["*", "0"])
def test_a_sink_has_to_be_told_the_port(port):
    with pytest.raises(InvalidValue, match=f"has the port '{port}'") as raised:
        open_sink(f"tcp://127.0.0.1:{port}")
    assert "the reader" in raised.value.cure


@pytest.mark.parametrize("host", ["192.0.2.1", "unknown.invalid", "127.0.0.1;127.0.0.2"])
def test_an_address_of_another_host_cannot_be_bound_and_the_cure_says_why(host):
    with pytest.raises(InvalidValue, match=r"cannot bind .*that is no address of this host") as raised:
        OutputReader(f"tcp://{host}:5555")
    assert "folder" not in raised.value.cure


def test_a_port_that_is_taken_is_told_as_that():
    with OutputReader("tcp://127.0.0.1:*") as reader, pytest.raises(InvalidValue, match="another program") as raised:
        OutputReader(reader.url)
    assert raised.value.cure == "choose a free port"
