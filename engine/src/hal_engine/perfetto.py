"""Spans as the packets of Perfetto's ``Trace``, written as bytes: protobuf's objects take longer to import, and to make
for each span, than a small model's steps allow.

Numbers of fields: ``protos/perfetto/trace`` in https://github.com/google/perfetto.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from operator import itemgetter

import numpy as np

CALLS = "calls"
"""The track whose spans enclose each other. Those of any other that overlap have several tracks of its name."""
ABOUT = {"insert_tasks": "requests", "broadcast_tokens": "ranks", "save_output": "step"}
"""What a span's number is, by the span's name."""
Row = tuple[int, int, str, str, int | None, str | None]
"""A span: begin and end, in nanoseconds of ``CLOCK_BOOTTIME``; track; name; a number (:data:`ABOUT`); an error. Where
begin and end are equal it is a mark."""

_BEGIN, _END, _MARK = b"\x48\x01", b"\x48\x02", b"\x48\x03"  # TrackEvent.type
_PACKET, _EVENT, _DESCRIPTOR = b"\x0a", b"\x5a", b"\xe2\x03"  # of Trace, of TracePacket
_TIMESTAMP, _STAMP = 0x40, 10  # the field's tag; always so many bytes with it


def packets(rows: Iterable[Row], pid: int, who: str) -> bytes:
    """Return the bytes of a process's trace, which may be joined to others'. ``rows``: in the order of their ends;
    ``who``: the name of the process."""
    tracks = _Tracks(pid, who)
    begins, heads, ends, closing = [], [], [], []
    outer_first = [*rows][::-1]
    outer_first.sort(key=itemgetter(0))
    for begin, end, where, name, number, error in outer_first:
        track = tracks.free(where, begin, end)
        begins.append(begin)
        heads.append(track.head(_MARK if begin == end else _BEGIN, name, number, error))
        if begin < end:
            ends.append(end)
            closing.append(track.closing)
    # Of events at one time, ends come first, of the inner span before the outer one's.
    times = np.array(ends[::-1] + begins, np.int64)
    heads = closing[::-1] + heads
    order = np.argsort(times, kind="stable")
    stamps = _stamps(times[order])
    out = tracks.described
    for at, index in enumerate(order.tolist()):
        out += heads[index], stamps[at * _STAMP : (at + 1) * _STAMP]
    return b"".join(out)


class _Tracks:
    """The tracks of a process; ``described``: their packets."""

    def __init__(self, pid: int, who: str) -> None:
        self._sequence, self._process, self._count = b"\x50" + _varint(pid), pid << 20, 0
        self._tracks: dict[str, list[_Track]] = {}
        process = _bytes(b"\x1a", b"\x08" + _varint(pid) + _text(b"\x32", who))
        self.described = [_descriptor(b"\x08" + _varint(self._process) + process)]

    def free(self, name: str, begin: int, end: int) -> _Track:
        """Return the first track of this name that nothing occupies, occupied until ``end``."""
        named = self._tracks.setdefault(name, [])
        for track in named:
            if track.until <= begin or name == CALLS:
                track.until = end
                return track
        self._count += 1
        uuid = _varint(self._process + self._count)
        parent = b"\x28" + _varint(self._process)
        self.described.append(_descriptor(b"\x08" + uuid + parent + _text(b"\x12", name)))
        named.append(_Track(self._sequence, b"\x58" + uuid, end))
        return named[-1]


class _Track:
    """A track: heads of its events, which are their packets up to the time. ``until``: the end of its last span."""

    def __init__(self, sequence: bytes, uuid: bytes, until: int) -> None:
        self._sequence, self._uuid, self.until = sequence, uuid, until
        self.closing = self._packet(_END + uuid)
        self.head = lru_cache(32)(self._head)

    def _head(self, kind: bytes, name: str, number: int | None, error: str | None) -> bytes:
        event = kind + self._uuid + _text(b"\xba\x01", name)
        if number is not None:
            event += _note(ABOUT[name], str(number))
        if error is not None:
            event += _note("error", error)
        return self._packet(event)

    def _packet(self, event: bytes) -> bytes:
        packet = self._sequence + _bytes(_EVENT, event)
        return _PACKET + _varint(len(packet) + _STAMP) + packet


@lru_cache(8)
def _note(name: str, value: str) -> bytes:
    return _bytes(b"\x22", _text(b"\x52", name) + _text(b"\x32", value))


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
