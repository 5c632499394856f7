"""Over connections with keys large messages arrive whole, and peers without a key do not fill memory."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import textwrap

import pytest
import zmq
from hal_engine.reading import OutputReader
from hal_engine.transport import open_sink
from hal_engine.transport.curve import CurveKeys

from tests.transport.conftest import Large

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="this ZeroMQ was built without CURVE")

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
ANNOUNCED, FLOOD, PIECE = 1 << 30, 64 << 20, 1 << 20
"""Bytes that each peer announces and tries to send."""
BOUND = 48 << 20
"""Bytes by which the process may grow meanwhile. Four floods are five times as much."""

PROCESS = """
    import sys
    from hal_engine.reading import OutputReader
    from hal_engine.transport import open_sink
    from hal_engine.transport.curve import CurveKeys

    def most():  # bytes of memory that the process has had at once
        words = open("/proc/self/status").read().split()
        return int(words[words.index("VmHWM:") + 1]) << 10

    keys, other = CurveKeys.new(), CurveKeys.new()
    if sys.argv[1] == "reader":
        opened = OutputReader("tcp://127.0.0.1:*", curve=keys.knowing(other.public))
        print(opened.url.rpartition(":")[2], flush=True)
    else:
        opened = open_sink(f"tcp://127.0.0.1:{sys.argv[2]}", curve=keys.knowing(other.public))
        print("", flush=True)
    before = most()
    sys.stdin.readline()
    print(most() - before, flush=True)
    opened.close(*map(float, sys.argv[3:]))
"""


def flood(peer):
    """Greet as a peer with a key would, announce a command of a gigabyte, and send as much of it as is accepted."""
    peer.settimeout(20)
    with contextlib.suppress(ConnectionError):  # it is ended at some point, which is the aim
        peer.sendall(GREETING)
        peer.recv(len(GREETING), socket.MSG_WAITALL)
        peer.sendall(b"\x06" + struct.pack(">Q", ANNOUNCED))
        for _ in range(FLOOD // PIECE):
            peer.sendall(bytes(PIECE))


@pytest.mark.parametrize("side", ["reader", "sender"])
def test_peers_without_a_key_do_not_fill_memory(side):
    with socket.create_server(("127.0.0.1", 0)) as false_reader, contextlib.ExitStack() as peers:
        to_close = ["0"] if side == "sender" else []
        port = str(false_reader.getsockname()[1])
        command = [sys.executable, "-c", textwrap.dedent(PROCESS), side, port, *to_close]
        process = peers.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        port = process.stdout.readline()
        false_reader.settimeout(20)
        for _ in range(4):
            made = socket.create_connection(("127.0.0.1", int(port))) if port.strip() else false_reader.accept()[0]
            flood(peers.enter_context(made))
        grown, _ = process.communicate("\n", timeout=30)
        assert process.returncode == 0
        assert int(grown) < BOUND


def test_a_large_record_arrives_over_a_connection_with_keys():
    sender, reader = CurveKeys.new(), CurveKeys.new()
    with OutputReader("tcp://127.0.0.1:*", curve=reader.knowing(sender.public), timeout=20) as opened:
        sink = open_sink(opened.url, curve=sender.knowing(reader.public))
        for step in (1, 2):
            sink.put(Large(step))
        for step in (1, 2):
            record = opened.read(20).record
            assert (record.step, record.logprobs.shape) == (step, (2, Large.columns))
            assert record.logprobs[1, -1] == 2 * Large.columns - 1 + step
        opened.acknowledge()
        sink.close(20)
