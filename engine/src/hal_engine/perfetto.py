"""Spans as the packets of Perfetto's ``Trace``, written as bytes: protobuf's objects take longer to import, and to make
for each span, than a small model's steps allow.

Numbers of fields: ``protos/perfetto/trace`` in https://github.com/google/perfetto.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Any

import numpy as np

MOST = 400_000
"""Events of a process that are kept, at most some 40 MB; a span has two."""
ABOUT = {"insert_tasks": "requests", "broadcast_tokens": "ranks", "save_output": "step"}
"""The meaning of a span's number, by the span's name. A step's number is the last word of its name."""

_BEGIN, _END, _MARK = b"\x48\x01", b"\x48\x02", b"\x48\x03"  # TrackEvent.type
_PACKET, _EVENT, _DESCRIPTOR = b"\x0a", b"\x5a", b"\xe2\x03"  # of Trace, of TracePacket
_NAME = b"\xba\x01"  # of TrackEvent
_TIMESTAMP, _STAMP = 0x40, 10  # the field's tag; always so many bytes with it


class Events:
    """The last :data:`MOST` events of a process: each its time, in nanoseconds of ``CLOCK_BOOTTIME``, and its packet up
    to the time, which its :class:`Track` gives."""

    def __init__(self, pid: int) -> None:
        self._pid, self._sequence, self._process = pid, b"\x50" + _varint(pid), pid << 20
        self._tracks: list[tuple[bytes, str]] = []
        self._kept: deque[Any] = deque(maxlen=2 * MOST)  # no object each, which every garbage collection would visit
        self.add = self._kept.extend
        """Keep events, of any order: a time, a packet, a time, a packet and so on."""

    def track(self, name: str) -> Track:
        """Return a new track. Its spans lie within each other or apart."""
        uuid = _varint(self._process + len(self._tracks) + 1)
        self._tracks.append((uuid, name))
        return Track(self._sequence, b"\x58" + uuid)

    @property
    def full(self) -> bool:
        """Whether earlier events were dropped, or the next one drops one."""
        return len(self._kept) == self._kept.maxlen

    def packets(self, who: str) -> bytes:
        """Return the bytes of the process's trace, which may be joined to others'. ``who``: the process's name."""
        process = _bytes(b"\x1a", b"\x08" + _varint(self._pid) + _text(b"\x32", who))
        parent = b"\x28" + _varint(self._process)
        out = [_descriptor(b"\x08" + _varint(self._process) + process)]
        out += [_descriptor(b"\x08" + uuid + parent + _text(b"\x12", name)) for uuid, name in self._tracks]
        kept = [*self._kept]
        times, heads = np.array(kept[::2], np.int64), kept[1::2]
        order = np.argsort(times, kind="stable")
        stamps = _stamps(times[order])
        for at, index in enumerate(order.tolist()):
            out += heads[index], stamps[at * _STAMP : (at + 1) * _STAMP]
        return b"".join(out)


class Track:
    """A row of spans and marks. It returns packets up to the time. ``end``: the packet that ends the last open span.
    ``until``: the time from which the row is free, which the caller sets."""

    def __init__(self, sequence: bytes, uuid: bytes) -> None:
        self._sequence, self._uuid, self.until = sequence, uuid, 0
        self.end = self._packet(_END + uuid)
        self.mark = lru_cache(64)(lambda name: self._head(_MARK, name, 0, None))
        self._begins = lru_cache(64)(lambda *about: self._head(_BEGIN, *about))

    def begin(self, name: str, number: int | None, error: str | None = None) -> bytes:
        """Return a span's beginning, with its number (:data:`ABOUT`) and its error."""
        digits = b"" if number is None else b"%d" % number
        return self._begins(name, len(digits), error) + digits

    def _head(self, kind: bytes, name: str, digits: int, error: str | None) -> bytes:
        """Return a packet up to its number, whose digits follow: spans that differ by their numbers share this part."""
        event = kind + self._uuid
        if error is not None:
            event += _bytes(b"\x22", _text(b"\x52", "error") + _text(b"\x32", error))
        if digits and name in ABOUT:
            about = _text(b"\x52", ABOUT[name]) + b"\x32" + _varint(digits)
            event += _text(_NAME, name) + b"\x22" + _varint(len(about) + digits) + about
        else:
            words = f"{name} " if digits else name
            event += _NAME + _varint(len(words) + digits) + words.encode()
        return self._packet(event, digits)

    def _packet(self, event: bytes, digits: int = 0) -> bytes:
        packet = self._sequence + _EVENT + _varint(len(event) + digits) + event
        return _PACKET + _varint(len(packet) + digits + _STAMP) + packet


def _descriptor(track: bytes) -> bytes:
    return _bytes(_PACKET, _bytes(_DESCRIPTOR, track))


def _stamps(times: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bytes:
    """Return the timestamps, each of one length: a varint may have more bytes than it needs."""
    stamps = np.empty((len(times), _STAMP), np.uint8)
    stamps[:, 0] = _TIMESTAMP
    stamps[:, 1:] = times[:, None] >> np.arange(0, 63, 7) & 0x7F
    stamps[:, 1:-1] |= 0x80
    return stamps.tobytes()


def _varint(number: int) -> bytes:
    if number < 0x80:
        return bytes([number])
    return bytes([number & 0x7F | 0x80]) + _varint(number >> 7)


def _bytes(tag: bytes, value: bytes) -> bytes:
    return tag + _varint(len(value)) + value


def _text(tag: bytes, value: str) -> bytes:
    return _bytes(tag, value.encode("utf-8", "replace"))
