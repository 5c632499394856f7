"""Strangers of an episode (``episodes.py``): bytes below a channel's framing, within it, and hal's messages in sound
frames, sent to a reader's socket."""

from __future__ import annotations

import contextlib
import random
import socket
import struct

import numpy as np
from hal_core.frames.envelope import FrameKind, encode, seal
from hal_core.output.records import OutputRecord
from hal_engine.transport.curve import Handshake
from hal_engine.transport.protocol import OUTPUT, VERSION, Acknowledge, Bye, Hello, encode_control

GREETED = 8  #: bytes of a reader's answer, at least
SESSIONS = range(1, 9)  #: of strangers
MOST_OPEN = 20  #: connections of strangers at a time


def record(step: int) -> OutputRecord:
    """A valid record."""
    one = np.ones(1, np.uint8)
    return OutputRecord(step, ("a",), one, one * 0, np.arange(1), one.astype("i4"), np.arange(1), one < 0)


def channel_frame(draw: random.Random, content: bytes) -> bytes:
    """A frame of a channel; one in fifty lies about its length, and a few have another kind."""
    length = 1 + len(content)
    if draw.random() < 0.02:
        length = draw.choice([0, 1, length + 1, 1 << 30, (1 << 31) + 5, (1 << 32) - 1])
    return struct.pack("<IB", length, draw.choice([0, 0, 0, 0, 0, 0, 0, 1, 2, 255])) + content


def greeting(draw: random.Random) -> bytes:
    """A channel's greeting; one in ten is for another purpose, or broken."""
    found = Handshake("records" if draw.random() < 0.95 else "control", calls=True).greeting
    found = found if draw.random() < 0.95 else mutated(draw, found)
    return struct.pack("<I", len(found)) + found


def hello(draw: random.Random) -> bytes:
    """A first message, valid or nearly so."""
    version = VERSION if draw.random() < 0.9 else draw.randrange(9)
    numbers = draw.choice(SESSIONS), draw.randrange(1 << 32), draw.randrange(1, 1 << 40), draw.randrange(1, 99)
    found = encode_control(Hello(version, *numbers))
    return found if draw.random() < 0.8 else mutated(draw, found)


def hal_message(draw: random.Random) -> bytes:
    """Messages of hal's for an unknown session, valid or nearly so, and some other bytes."""
    numbers = {"session": draw.choice(SESSIONS), "sender": draw.randrange(1 << 32), "sequence": draw.randrange(1 << 40)}
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
        greeting(draw) + channel_frame(draw, hello(draw)),
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


def bytes_of(draw: random.Random) -> list[bytes]:
    """Return one stranger's bytes, before and after its first input."""
    dice = draw.random()
    if dice < 0.3:
        return [draw.choice(KNOWN)]
    if dice < 0.4:
        return [mutated(draw, draw.choice(KNOWN))]
    return [draw.randbytes(draw.randrange(1, 400))] if dice < 0.5 else conversation(draw)


class Strangers:
    """They connect, send, and leave at once, later, or never."""

    def __init__(self, url: str, draw: random.Random) -> None:
        scheme, _, where = url.partition("://")
        host, _, port = where.rpartition(":")
        self._where = where if scheme == "ipc" else (host, int(port))
        self._family = socket.AF_UNIX if scheme == "ipc" else socket.AF_INET
        self._draw, self.open = draw, []

    def attack(self) -> None:
        """One of them."""
        draw, parts = self._draw, bytes_of(self._draw)
        peer = socket.socket(self._family)
        peer.settimeout(5)
        self.open.append(peer)
        with contextlib.suppress(OSError):  # the reader may hang up at any byte
            peer.connect(self._where)
            for part in parts:
                cut = draw.randrange(len(part) + 1)
                peer.sendall(part[:cut])
                peer.sendall(part[cut:])
                if len(parts) > 1 or draw.random() < 0.2:
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
        """End all that are left."""
        while self.open:
            self.open.pop().close()
