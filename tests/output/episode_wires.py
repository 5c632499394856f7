"""What lies between a sender and its reader in an episode: a wire that stops, drips or is cut; and peers that drip."""

import contextlib
import select
import socket
import struct
import time

from hal_engine.transport.curve import Handshake
from hal_engine.transport.protocol import VERSION, Hello, encode_control

_CONTENT = encode_control(Hello(VERSION, 5, 0, 1, 8))
_GREETING = Handshake("records", calls=True).greeting
HELLO = struct.pack("<I", len(_GREETING)) + _GREETING + struct.pack("<IB", 1 + len(_CONTENT), 0) + _CONTENT
"""What a sink sends first."""
MOST_HELD = 1 << 16
"""Bytes that a wire holds each way before it stops reading, as a network would."""


class Way:
    """One direction of a connection."""

    def __init__(self, source, target):
        self.source, self.target, self.held = source, target, bytearray()


class Wire:
    """Carries bytes between the clients and the reader, or withholds them, as commanded."""

    def __init__(self, words, listener, target):
        self.words, self.listener, self.target = words, listener, target
        self.ways, self.state = [], "go"

    def run(self):
        while True:
            word = self.words.next(0.0 if self.state in ("go", "drip") else 0.02)
            if word == "stop":
                return
            if word:
                self.obey(word)
            if self.state != "stall":  # then both ends stay open, and no bytes are read from them
                self.carry()

    def obey(self, word):
        if word == "cut" or self.state == "vanish":  # bytes are missing: the connections cannot continue
            for way in list(self.ways):
                self.end(way)
        self.state = "go" if word == "cut" else word

    def carry(self):
        reading = {way.source: way for way in self.ways if len(way.held) < MOST_HELD}
        writing = {way.target: way for way in self.ways if way.held}
        sources, targets, _ = select.select([self.listener, *reading], [*writing], [], 0.01)
        if self.listener in sources:
            self.accept()
        size = 1 if self.state == "drip" else MOST_HELD
        for way in [reading[source] for source in sources if source in reading]:
            self.take(way, size)
        for way in [writing[target] for target in targets]:
            if way in self.ways:
                with contextlib.suppress(OSError):  # it has ended, which a read detects
                    del way.held[: way.target.send(way.held[:size])]
        if self.state == "drip":
            time.sleep(0.0005)

    def accept(self):
        near, _ = self.listener.accept()
        far = socket.socket()
        try:
            far.connect(self.target)
        except OSError:  # no reader is there
            near.close()
            far.close()
            return
        for one in (near, far):
            one.setblocking(False)
        self.ways += [Way(near, far), Way(far, near)]

    def take(self, way, size):
        if way not in self.ways:
            return
        try:
            data = way.source.recv(size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.end(way)
        elif self.state != "vanish":
            way.held += data

    def end(self, way):
        """End the connection of this direction, without notice to the kernel of either side."""
        for one in (way.source, way.target):
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        self.ways = [other for other in self.ways if other.source not in (way.source, way.target)]


def wire(words, listener, target):
    """Carry bytes until the stop is set."""
    Wire(words, listener, target).run()


def drip(words, url, content):
    """Send it byte by byte, and hold the connection until the stop is set or it is closed."""
    scheme, _, where = url.partition("://")
    host, _, port = where.rpartition(":")
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX if scheme == "ipc" else socket.AF_INET) as peer:
        peer.connect(where if scheme == "ipc" else (host, int(port)))
        for byte in content:
            peer.send(bytes([byte]))
            if words.next(0.002):
                return
        while peer.recv(4096) and not words.next(0.0):
            pass


def listener_at(host):
    """Where a wire listens."""
    return socket.create_server((host, 0), backlog=64)
