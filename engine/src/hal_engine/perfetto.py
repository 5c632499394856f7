"""Spans as the packets of Perfetto's ``Trace``, written as bytes: protobuf's objects take longer to import, and to make
for each span, than a small model's steps allow. They are written at the end, those of one name together.

Numbers of fields: ``protos/perfetto/trace`` in https://github.com/google/perfetto.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np

MOST = 250_000
"""Spans of a process that are kept, at most some 40 MB."""
ABOUT = {"insert_tasks": "requests", "broadcast_tokens": "ranks", "save_output": "step", "step": "number"}
"""The meaning of a span's number, by the span's name."""

_BEGIN, _END = b"\x48\x01", b"\x48\x02"  # TrackEvent.type
_PACKET, _EVENT, _DESCRIPTOR = b"\x0a", b"\x5a", b"\xe2\x03"  # of Trace, of TracePacket
_NAME, _TRACK, _NOTE = b"\xba\x01", b"\x58", b"\x22"  # of TrackEvent
_TIMESTAMP, _WIDTH = b"\x40", 9
"""Bytes of a timestamp and of a span's number, whatever it is: a varint may have more than it needs."""
_FIELDS = 6


class Spans:
    """The last :data:`MOST` spans of a process."""

    def __init__(self, pid: int) -> None:
        self._pid, self._process = pid, pid << 20
        self._kept: deque[Any] = deque(maxlen=_FIELDS * MOST)  # no object each, which a garbage collection would visit
        self.add = self._kept.extend
        """Keep a span: its begin and end in nanoseconds, its track, its name, its number (:data:`ABOUT`), its error or
        None. It will lie on the first row of its track that was free when it began."""

    @property
    def full(self) -> bool:
        """Whether earlier ones were dropped, or the next one drops one."""
        return len(self._kept) == self._kept.maxlen

    def packets(self, who: str, later: int = 0) -> bytes:
        """Return the bytes of the process's trace, which may be joined to others'. ``who``: the process's name;
        ``later``: nanoseconds from the spans' clock to ``CLOCK_BOOTTIME``, which is Perfetto's."""
        free: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))  # when a track's row is
        alike: defaultdict[tuple[str, int, str, str | None], list[int]] = defaultdict(list)
        kept = iter([*self._kept])
        for began, ended, track, name, number, error in zip(*[kept] * _FIELDS, strict=True):
            row, rows = 0, free[track]
            while rows[row] >= began:
                row += 1
            rows[row] = ended
            alike[track, row, name, error].extend((began, ended, number))
        parent = _varint(self._process)
        process = _bytes(b"\x1a", b"\x08" + _varint(self._pid) + _text(b"\x32", who))
        out = [_descriptor(b"\x08" + parent + process)]
        uuids = {at: _varint(self._process + 1 + n) for n, at in enumerate(dict.fromkeys(one[:2] for one in alike))}
        for (track, _), uuid in uuids.items():
            out.append(_descriptor(b"\x08" + uuid + b"\x28" + parent + _text(b"\x12", track)))
        for (track, row, name, error), values in alike.items():
            numbers = np.array(values, np.int64).reshape(-1, 3)
            numbers[:, :2] += later
            out.append(self._alike(_TRACK + uuids[track, row], name, error, numbers))
        return b"".join(out)

    def _alike(self, track: bytes, name: str, error: str | None, numbers: np.ndarray[Any, Any]) -> bytes:
        """Return the packets of spans that differ by their begins, ends and numbers: copies of one's."""
        event = _BEGIN + track + _text(_NAME, name)
        if error is not None:
            event += _bytes(_NOTE, _text(b"\x52", "error") + _text(b"\x32", error))
        if name in ABOUT:
            event += _bytes(_NOTE, _text(b"\x52", ABOUT[name]) + b"\x20" + bytes(_WIDTH))
        first = self._packet(event)
        span = first + self._packet(_END + track)
        packets = np.tile(np.frombuffer(span, np.uint8), (len(numbers), 1))
        varints = (numbers[:, :, None] >> np.arange(0, 7 * _WIDTH, 7)).astype(np.uint8) | 0x80
        varints[:, :, -1] &= 0x7F
        ends = [(0, len(first)), (1, len(span))]
        if name in ABOUT:
            ends.append((2, len(first) - _WIDTH - len(_TIMESTAMP)))
        for number, end in ends:
            packets[:, end - _WIDTH : end] = varints[:, number]
        return packets.tobytes()

    def _packet(self, event: bytes) -> bytes:
        """Return a packet that ends with its timestamp, before which the event ends."""
        packet = b"\x50" + _varint(self._pid) + _bytes(_EVENT, event) + _TIMESTAMP + bytes(_WIDTH)
        return _bytes(_PACKET, packet)


def _descriptor(track: bytes) -> bytes:
    return _bytes(_PACKET, _bytes(_DESCRIPTOR, track))


def _varint(number: int) -> bytes:
    if number < 0x80:
        return bytes([number])
    return bytes([number & 0x7F | 0x80]) + _varint(number >> 7)


def _bytes(tag: bytes, value: bytes) -> bytes:
    return tag + _varint(len(value)) + value


def _text(tag: bytes, value: str) -> bytes:
    return _bytes(tag, value.encode("utf-8", "replace"))
