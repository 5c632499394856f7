"""Fuzz a reader at its socket: bytes below a channel's framing, within it, and hal's messages in sound frames.

    python tests/output/fuzz_socket.py [--seconds 60 | --attacks 500] [--seed N] [--scheme tcp|ipc]

The reader is a process of its own, which at times does not read. Beside the strangers a sink of hal's sends. The reader
must live, deliver every record of the sink once and in order, and end with the sink's good-bye.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from hal_core.frames.envelope import FrameKind, encode, seal
from hal_core.output.records import OutputRecord
from hal_engine.transport import open_sink
from hal_engine.transport.protocol import OUTPUT, VERSION, Acknowledge, Bye, Hello, encode_control

GREETED = 8  #: bytes of a reader's answer, at least
MOST_OPEN = 20  #: connections of strangers at a time


def record(step: int) -> OutputRecord:
    """A valid record."""
    one = np.ones(1, np.uint8)
    return OutputRecord(step, ("a",), one, one * 0, np.arange(1), one.astype("i4"), np.arange(1), one < 0)


class Output:
    """Its pending output."""

    def __init__(self, step: int) -> None:
        self.step = step

    def resolve(self) -> OutputRecord:
        return record(self.step)

    def complete(self, error: BaseException | None) -> None:
        assert error is None, error


# Bytes of strangers ------------------------------------------------------------------------------------------------


def channel_frame(draw: random.Random, content: bytes) -> bytes:
    """A frame of a channel; one in fifty lies about its length, and a few have another kind."""
    length = 1 + len(content)
    if draw.random() < 0.02:
        length = draw.choice([0, 1, length + 1, 1 << 30, (1 << 31) + 5, (1 << 32) - 1])
    return struct.pack("<IB", length, draw.choice([0, 0, 0, 0, 0, 0, 0, 1, 2, 255])) + content


def hello(draw: random.Random) -> bytes:
    """A first message, valid or nearly so."""
    version = VERSION if draw.random() < 0.9 else draw.randrange(9)
    numbers = draw.randrange(1, 9), draw.randrange(1 << 32), draw.randrange(1, 1 << 40), draw.randrange(1, 99)
    found = encode_control(Hello(version, *numbers))
    return found if draw.random() < 0.8 else mutated(draw, found)


def hal_message(draw: random.Random) -> bytes:
    """Messages of hal's for an unknown session, valid or nearly so, and some other bytes."""
    numbers = {"session": draw.randrange(1, 9), "sender": draw.randrange(1 << 32), "sequence": draw.randrange(1 << 40)}
    kind = draw.choice([*FrameKind, 99])
    messages = Acknowledge(0, 3), Acknowledge(draw.randrange(9)), Bye(draw.randrange(9)), Bye(why="why")
    found = draw.choice([
        lambda: OUTPUT + seal(kind, draw.randbytes(draw.randrange(40)), **numbers),
        lambda: encode_control(draw.choice(messages)),
        lambda: hello(draw),
        lambda: OUTPUT + encode(record(1), **numbers),
        lambda: draw.randbytes(draw.randrange(200)),
        lambda: b"",
    ])()  # fmt: skip
    return found if draw.random() < 0.7 else mutated(draw, found)


def conversation(draw: random.Random) -> list[bytes]:
    """A peer that begins as a sink does, waits for the reader's answer, and goes wrong later."""
    return [
        channel_frame(draw, hello(draw)),
        b"".join(channel_frame(draw, hal_message(draw)) for _ in range(draw.choice([1, 5, 300]))),
    ]


def mutated(draw: random.Random, source: bytes) -> bytes:
    changed = bytearray(source)
    for _ in range(draw.randrange(1, 4)):
        if changed:
            changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed[: draw.randrange(len(changed) + 1)]) if draw.random() < 0.3 else bytes(changed)


KNOWN = [
    b"\xff" + bytes(7) + b"\x01\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32),  # a sink of hal 1.1
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 300\r\n\r\n" + b"x" * 300,
    b"GET / HTTP/1.0\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00" + b"\x00\x03abc" * 9,  # ZMTP 2
    b"",
]


def words_of(draw: random.Random) -> list[bytes]:
    """Return one stranger's bytes, before and after its first input."""
    dice = draw.random()
    if dice < 0.3:
        return [draw.choice(KNOWN)]
    if dice < 0.4:
        return [mutated(draw, draw.choice(KNOWN))]
    return [draw.randbytes(draw.randrange(1, 400))] if dice < 0.5 else conversation(draw)


# Both sides ------------------------------------------------------------------------------------------------------


class Strangers:
    """They connect, send, and leave at once, later, or never."""

    def __init__(self, url: str, draw: random.Random) -> None:
        scheme, _, where = url.partition("://")
        host, _, port = where.rpartition(":")
        self._where = where if scheme == "ipc" else (host, int(port))
        self._family = socket.AF_UNIX if scheme == "ipc" else socket.AF_INET
        self._draw, self.open = draw, []

    def attack(self) -> None:
        draw, said = self._draw, words_of(self._draw)
        peer = socket.socket(self._family)
        peer.settimeout(5)
        self.open.append(peer)
        with contextlib.suppress(OSError):  # the reader may hang up at any byte
            peer.connect(self._where)
            for words in said:
                cut = draw.randrange(len(words) + 1)
                peer.sendall(words[:cut])
                peer.sendall(words[cut:])
                if len(said) > 1 or draw.random() < 0.2:
                    self._hear(peer)
            if draw.random() < 0.3:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST
        while len(self.open) > draw.randrange(MOST_OPEN):
            self.open.pop(draw.randrange(len(self.open))).close()

    @staticmethod
    def _hear(peer: socket.socket) -> None:
        """Wait until the reader has answered, if it does."""
        peer.settimeout(0.05)
        heard = b""
        with contextlib.suppress(TimeoutError):
            while len(heard) < GREETED and (more := peer.recv(1000)):
                heard += more
        peer.settimeout(5)

    def leave(self) -> None:
        while self.open:
            self.open.pop().close()


def read(url: str, seed: str) -> None:
    """The reader: it ends with the sink's session, and reports its records."""
    from hal_engine.reading import OutputReader, SessionEnded

    draw, ended, steps = random.Random(int(seed)), set(), []
    skipped = 0

    def hear(event: object) -> None:
        nonlocal skipped
        skipped += type(event).__name__ == "FrameSkipped"
        if isinstance(event, SessionEnded):
            ended.add(event.session)

    with OutputReader(url, on_event=hear, lost_after=2, grace=0) as reader:
        print(reader.url, flush=True)
        session = None
        while session is None or session not in ended:
            frame = reader.read(0.2)
            if frame is not None and frame.record.step >= 1_000_000:  # the sink's own
                assert session in (None, frame.header.session)
                session = frame.header.session
                steps.append(frame.record.step - 1_000_000)
            if draw.random() < 0.05:
                time.sleep(0.1)
        assert skipped == reader.counters()["skipped"]
    assert steps == list(range(len(steps))), steps
    print(len(steps), skipped, flush=True)


def run(scheme: str = "tcp", attacks: int | None = None, seconds: float = 1e9, seed: int = 0) -> dict[str, int]:
    """Attack a reader; return the counts. Raises AssertionError if it broke."""
    draw = random.Random(seed)
    end, made = time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory(prefix="hal-fuzz-") as folder, contextlib.ExitStack() as stack:
        url = "tcp://127.0.0.1:*" if scheme == "tcp" else f"ipc://{folder}/socket"
        command_line = [sys.executable, __file__, "--reader", url, str(seed)]
        reader = stack.enter_context(
            subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        stack.callback(reader.kill)
        url = reader.stdout.readline().strip()
        assert url, reader.stderr.read()
        strangers, sink = Strangers(url, draw), open_sink(url, deadline=60)
        stack.callback(strangers.leave)
        sent = 0
        while time.monotonic() < end and (attacks is None or made < attacks):
            strangers.attack()
            made += 1
            if made % 10 == 1:
                sink.put(Output(1_000_000 + sent))
                sent += 1
            assert reader.poll() is None, f"seed {seed}, attack {made}: it ended: {reader.stderr.read()[-2000:]}"
        sink.close(60)
        out, err = reader.communicate(timeout=60)
        assert reader.returncode == 0, f"seed {seed}: {err[-2000:]}"
        read_, skipped = map(int, out.split())
        assert read_ == sent, f"seed {seed}: {read_} of {sent} records were read"
        assert not list(Path(folder).iterdir())
    return {"attacks": made, "records": sent, "skipped": skipped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--attacks", type=int)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--scheme", choices=("tcp", "ipc"), default="tcp")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    seconds = options.seconds if options.attacks is None else 1e9
    print(run(options.scheme, options.attacks, seconds, options.seed))


if __name__ == "__main__":
    read(*sys.argv[2:]) if sys.argv[1:2] == ["--reader"] else main()
