"""Collectives of a group on host memory, over connections between its members.

Every member is connected with every other. Up to :data:`LARGE` bytes each rank sends its whole part to each other one,
which takes one message each way. Above that each rank adds up one slice and sends its sum to all: no rank then sends
more than it would in a ring. Sums are added in the order of ranks in both cases, so that all ranks get the same bits.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any

import numpy as np

from ..memory.dtypes import BFLOAT16, DType, bfloat16_to_float32, dtype_of, float_to_bfloat16

HOST = "hal's own"
"""The name of this library, in a device's capabilities and for :func:`hal_core.devices.open_groups`."""
LARGE = 1 << 20
"""Bytes of a rank's part above which each rank adds up a slice only; a broadcast has messages of so many."""
PIECE = 1 << 17
"""Bytes that ranks send to each other at once. All send before they receive, so a piece must fit into the buffers of a
connection."""
LINE = 64
"""Bytes; slices begin on a multiple of them."""
FRAME = Struct("<QQ")
"""The number of the piece or collective, which all ranks count alike, and its bytes."""
_NOTHING = memoryview(bytearray())


class HostGroup:
    """The collectives of one rank of a group. All ranks make the same calls in the same order.

    Parts are the contiguous bytes of host memory, writable where a call writes. Calls return when done. A failure is an
    ``OSError``; the group cannot be used afterwards.
    """

    def __init__(self, me: int, links: Mapping[int, socket.socket]) -> None:
        """``me``: this rank's index in the group; ``links``: connections with every other rank, by index."""
        self._me, self._links, self._number = me, dict(links), 0
        self._size = len(links) + 1
        self._buffers = memoryview(bytearray(PIECE)), memoryview(bytearray(PIECE))
        self._frame = memoryview(bytearray(FRAME.size))
        for link in self._links.values():
            link.setblocking(True)
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                link.setsockopt(socket.SOL_SOCKET, buffer, 2 * PIECE)

    def broadcast(self, part: memoryview, root: int) -> None:
        """Make ``part`` equal to that of the rank with index ``root``, whose call ends when the others have come."""
        for at in range(0, len(part), LARGE):
            self._number += 1
            if root == self._me:
                self._send(part[at : at + LARGE], *self._links)
            else:
                self._receive(root, part[at : at + LARGE])
        self._number += 1
        if root != self._me:
            self._send(_NOTHING, root)
            return
        for index in self._links:
            self._receive(index, _NOTHING)

    def all_reduce(self, part: memoryview, dtype: DType) -> None:
        """Make ``part``, elements of ``dtype``, the sum of those of all ranks; of bools their disjunction."""
        if len(part) <= LARGE:
            for at in range(0, len(part), PIECE):
                piece = part[at : at + PIECE]
                self._add_up(dict.fromkeys(self._links, piece), piece, dtype)
            return
        slices = _slices(part, self._size)
        for at in range(0, len(slices[0]), PIECE):
            pieces = [one[at : at + PIECE] for one in slices]
            self._add_up({index: pieces[index] for index in self._links}, pieces[self._me], dtype)
        self._share(slices)

    def summing(self, part: np.ndarray[Any, Any], total: np.ndarray[Any, Any]) -> Callable[[], None]:
        """Return a call that makes ``total`` the sum of the parts of all ranks, as :meth:`all_reduce` does, at a third
        of its cost: contiguous arrays of one shape, which may be one. It may be made again as long as they keep their
        memory. NumPy warns of an infinite sum."""
        sent = _bytes(part)
        if len(sent) > PIECE:

            def whole() -> None:
                np.copyto(total, part)
                self.all_reduce(_bytes(total), dtype_of(total.dtype))

            return whole
        found = [part if index == self._me else np.empty_like(part) for index in range(self._size)]
        others = [(index, _bytes(found[index])) for index in self._links]
        totals = [*[np.empty_like(part) for _ in found[2:]], total]
        sums = [*zip([found[0], *totals], found[1:], totals, strict=False)]

        def call() -> None:
            self._number += 1
            self._send(sent, *self._links)
            for index, into in others:
                self._receive(index, into)
            for one, other, out in sums:
                np.add(one, other, out=out)

        return call

    def gather(self, part: memoryview, into: memoryview, root: int) -> None:
        """On the rank with index ``root``, fill ``into`` with the parts of all ranks in order."""
        self._number += 1
        if root != self._me:
            self._send(part, root)
            return
        for index, place in enumerate(self._places(into, len(part))):
            if index == root:
                place[:] = part
            else:
                self._receive(index, place)

    def all_gather(self, part: memoryview, into: memoryview) -> None:
        """Fill ``into`` with the parts of all ranks in order, on every rank."""
        places = self._places(into, len(part))
        places[self._me][:] = part
        self._share(places)

    def abort(self) -> None:
        """End waiting calls for good; from any thread."""
        for link in self._links.values():
            with contextlib.suppress(OSError):  # the peer may be gone
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        for link in self._links.values():
            link.close()

    def _places(self, into: memoryview, nbytes: int) -> list[memoryview]:
        """Return the place of each rank's part, ``nbytes`` long."""
        return [into[index * nbytes : (index + 1) * nbytes] for index in range(self._size)]

    def _add_up(self, sent: Mapping[int, memoryview], mine: memoryview, dtype: DType) -> None:
        """Send each other rank its piece; then make ``mine`` its sum with the pieces of all ranks, in their order."""
        self._number += 1
        for index, piece in sent.items():
            self._send(piece, index)
        came, total = self._buffers[0][: len(mine)], _NOTHING
        for index in range(self._size):
            part = mine
            if index != self._me:
                part = came
                self._receive(index, part)
            if index == 0:
                total = part
                came = self._buffers[1][: len(mine)]  # the next one must not overwrite the first
            elif len(mine):
                into = mine if index == self._size - 1 else self._buffers[0][: len(mine)]
                _add(total, part, into, dtype)
                total = into

    def _share(self, parts: list[memoryview]) -> None:
        """Send this rank's part to all others, and receive theirs. None is longer than the first."""
        for at in range(0, len(parts[0]), PIECE):
            self._number += 1
            self._send(parts[self._me][at : at + PIECE], *self._links)
            for index in self._links:
                self._receive(index, parts[index][at : at + PIECE])

    def _send(self, part: memoryview, *to: int) -> None:
        frame = FRAME.pack(self._number, len(part))
        for index in to:
            sent = self._links[index].sendmsg([frame, part])
            if sent < len(frame):
                self._links[index].sendall(frame[sent:])
            if sent < len(frame) + len(part):
                self._links[index].sendall(part[max(0, sent - len(frame)) :])

    def _receive(self, index: int, into: memoryview) -> None:
        """Receive that rank's message for this collective."""
        link, buffers = self._links[index], [self._frame, into]
        came, length = 0, FRAME.size + len(into)
        while True:
            count = link.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
            if not count:
                raise ConnectionResetError(f"the connection with rank {index} of the group was closed")
            if came < FRAME.size <= came + count:
                self._check(index, len(into))
            came += count
            if came == length:
                return
            buffers = _after(buffers, count)

    def _check(self, index: int, nbytes: int) -> None:
        """Raise unless the message belongs to this rank's current collective."""
        if (found := FRAME.unpack(self._frame)) != (self._number, nbytes):
            what = f"rank {index} of the group is in collective {found[0]}, of {found[1]} bytes, but this one in"
            raise ConnectionError(f"{what} {self._number}, of {nbytes} bytes")


def _add(one: memoryview, other: memoryview, into: memoryview, dtype: DType) -> None:
    """Write the sums of two pieces, rounded once, into a third, which may be one of them."""
    a, b, total = (np.frombuffer(piece, dtype.storage) for piece in (one, other, into))
    with np.errstate(all="ignore"):  # a sum may be infinite
        if dtype is BFLOAT16:
            total[:] = float_to_bfloat16(bfloat16_to_float32(a) + bfloat16_to_float32(b))
        else:
            np.add(a, b, out=total)


def _bytes(array: np.ndarray[Any, Any]) -> memoryview:
    return memoryview(array.data).cast("B") if array.size else _NOTHING


def _slices(part: memoryview, size: int) -> list[memoryview]:
    """Return a slice for each rank: equal ones, the last ones shorter or empty."""
    length = -(-len(part) // size // LINE) * LINE
    return [part[index * length : (index + 1) * length] for index in range(size)]


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the unfilled rest of buffers of which ``count`` bytes are filled."""
    left = []
    for buffer in buffers:
        left += [buffer[count:]] if count < len(buffer) else []
        count = max(0, count - len(buffer))
    return left
