"""A sender over tcp outlasts listeners that are not readers, or refuse it: it connects again after them."""

import contextlib
import socket

import pytest
from hal_engine.reading import OutputReader
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport import open_sink
from hal_engine.transport.curve import CurveKeys


def read_and_close(url, sink, curve=None):
    """Return the step that the reader at ``url`` gets from the sink."""
    with OutputReader(url, curve=curve, timeout=20) as reader:
        step = reader.read(20).record.step
        reader.acknowledge()
        sink.close(20)
        return step


ZEROMQ = b"\xff" + bytes(7) + b"\x01\x7f"


@pytest.mark.parametrize(
    "content", [ZEROMQ, bytes(4), b"HTTP/1.1 400 Bad Request", b"\x02\0\0\0\0z", b"\x06\0\0\0\0cjunk"]
)
def test_a_sender_connects_again_after_a_listener_that_breaks_the_protocol(output, content, monkeypatch):
    monkeypatch.setattr(TIMEOUTS, "greeting", 0.2)  # the third announces a frame that does not come
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        sink = open_sink(url, heartbeat=0.05)
        sink.put(output(1))
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(20)
            peer.sendall(content)
            with contextlib.suppress(ConnectionResetError):
                while peer.recv(4096):  # until the sender has ended it
                    pass
        if content == ZEROMQ:
            assert "it is of hal 1.1 or before" in sink._delivery.trouble
    assert read_and_close(url, sink) == 1


def test_a_sender_connects_again_after_a_reader_that_did_not_let_it_in(output, caplog):
    sender, reader, other = CurveKeys.new(), CurveKeys.new(), CurveKeys.new()
    with OutputReader("tcp://127.0.0.1:*", curve=reader.knowing(other.public)) as former:
        url = former.url
        sink = open_sink(url, curve=sender.knowing(reader.public), heartbeat=0.05)
        sink.put(output(1))
        for _ in range(1000):
            former.read(0.02)
            if "its key is not let in" in caplog.text:
                break
        else:
            raise AssertionError("the sender was not refused")
    assert read_and_close(url, sink, reader.knowing(sender.public)) == 1
