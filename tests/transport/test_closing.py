"""A reader's socket closes within bounds, whatever the fate of its peers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import zmq
from hal_engine.reading import OutputReader
from hal_engine.transport import open_sink
from hal_engine.transport.sockets import Bound
from zmq.utils.monitor import recv_monitor_message

NAME = b"sender"
GREETED, ENDED = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


def greeted(path):
    """A sender, as ZeroMQ greets, on a connection with small buffers."""
    made = socket.socket(socket.AF_UNIX)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(str(path))
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity" + struct.pack(">I", len(NAME)) + NAME
    made.sendall(b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32))
    made.sendall(struct.pack("BB", 4, len(ready)) + ready)
    return made


def happened(bound, monitor, wanted):
    """Wait for an event, and let the socket take the bytes that came with it."""
    while True:
        assert monitor.poll(30_000), "it did not come about"
        if recv_monitor_message(monitor)["event"] == wanted:
            break
    bound.socket.poll(0)


def fill(bound):
    """Send until messages wait in ZeroMQ, as the peer does not read."""
    with contextlib.suppress(zmq.Again):
        while True:
            bound.socket.send_multipart([NAME, bytes(100_000)], zmq.NOBLOCK)


def test_a_reconnected_sender_does_not_delay_a_closing_reader(tmp_path):
    """Messages queued on the former connection have no owner any more; libzmq waited for them without end."""
    bound = Bound(f"ipc://{tmp_path}/socket")
    monitor = bound.socket.get_monitor_socket(GREETED | ENDED)
    with greeted(tmp_path / "socket") as former:
        happened(bound, monitor, GREETED)
        fill(bound)
        with greeted(tmp_path / "socket"):  # as after a cable was pulled, before the end is noticed
            happened(bound, monitor, GREETED)
            former.close()
            happened(bound, monitor, ENDED)
            bound.socket.disable_monitor()
            monitor.close()
            closing = threading.Thread(target=bound.close, daemon=True)
            closing.start()
            closing.join(30)
            assert not closing.is_alive()
            bound.release()


def test_a_sink_without_records_ends_its_session_at_a_silent_reader():
    """The reader took the end of the connection for a loss."""
    with OutputReader() as reader:
        sink = open_sink(reader.url)
        assert reader.sockets[0].poll(30_000), "no greeting came"
        sink.close(30.0)
        assert reader.read(30.0) is None
