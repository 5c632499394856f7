"""Small collectives on host memory over the group's own connections; large ones over gloo.

Through Paddle's gloo a sum of 4 KB took milliseconds when two ranks had two busy cores, as it hands each message from
thread to thread. Here it is one message each way (benchmarks/ranks.py). A split model makes two sums a layer.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
from collections.abc import Callable, Iterator, Mapping
from struct import Struct
from typing import Any

import numpy as np

from ..places import paddle_core

ProcessGroup = Any
Tensor = Any
"""A Paddle tensor."""
Call = Any
"""The result of a process group's call, with a ``wait``."""
LARGE = 1 << 20
"""Bytes of a rank's tensor above which gloo moves it: with many ranks its ring sends less."""
PIECE = 1 << 16
"""Bytes that ranks send to each other at once. All send before they receive, and a rank is at most one piece ahead of
another, so two pieces must fit into the buffers of a connection."""
FRAME = Struct("<QQ")
"""The number of the piece or collective, which all ranks count alike, and its bytes."""
_NOTHING = memoryview(bytearray())
_SUMMED = {"float32": np.float32, "float64": np.float64, "int32": np.int32, "int64": np.int64}


class DirectGroup:
    """The subset of Paddle's process group ``gloo`` that hal calls, with the same interface. Calls return when done.

    Sums are added in the order of ranks, so that all ranks get the same bits. A failure is an ``OSError``.
    """

    def __init__(
        self, gloo: ProcessGroup, me: int, links: Mapping[int, socket.socket], abort: Callable[[], None], keep: object
    ) -> None:
        """``me``: this rank's index in the group; ``links``: connections with every other rank, by index. ``abort``
        ends a waiting call of gloo, and ``keep`` lives as long as this object."""
        self._gloo, self._me, self._links = gloo, me, dict(links)
        self._abort, self._keep, self._number = abort, keep, 0
        self._size, self._sum = len(links) + 1, paddle_core().ReduceOp.SUM
        self._room, self._frame = memoryview(bytearray(PIECE)), memoryview(bytearray(FRAME.size))
        for link in self._links.values():
            link.setblocking(True)
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                link.setsockopt(socket.SOL_SOCKET, buffer, 4 * PIECE)

    def broadcast(self, tensor: Tensor, root: int, sync: bool) -> Call:
        """Make ``tensor`` equal to that of the rank ``root``. As over gloo, the root's call ends when the other ranks
        have come."""
        if (own := _bytes(tensor)) is None:
            return self._gloo.broadcast(tensor, root, sync)
        self._number += 1
        if root == self._me:
            self._send(own, *self._links)
            for index in self._links:
                self._receive(index, _NOTHING)
        else:
            self._receive(root, own)
            self._send(_NOTHING, root)
        return self

    def all_reduce(self, tensor: Tensor, operation: object, sync: bool) -> Call:
        """Make ``tensor`` the sum of those of all ranks."""
        dtype = _SUMMED.get(str(tensor.dtype).removeprefix("paddle."))
        own = None if dtype is None or operation != self._sum else _bytes(tensor)
        if dtype is None or own is None:
            return self._gloo.all_reduce(tensor, operation, sync)
        for piece in _pieces(own):
            self._number += 1
            self._send(piece, *self._links)
            total, mine, room = None, np.frombuffer(piece, dtype), self._room[: len(piece)]
            for index in range(self._size):
                part = mine
                if index != self._me:
                    self._receive(index, room)
                    part = np.frombuffer(room, dtype)
                total = part.copy() if total is None else total + part
            mine[:] = total
        return self

    def gather(self, tensor: Tensor, found: Tensor, root: int, sync: bool, on_stream: bool) -> Call:
        """On the rank ``root``, fill ``found`` with the tensors of all ranks in order."""
        if (own := _bytes(tensor)) is None:
            return self._gloo.gather(tensor, found, root, sync, on_stream)
        self._number += 1
        if root != self._me:
            self._send(own, root)
            return self
        for index, part in enumerate(self._parts(found, len(own))):
            if index == root:
                part[:] = own
            else:
                self._receive(index, part)
        return self

    def all_gather(self, found: Tensor, tensor: Tensor, sync: bool) -> Call:
        """Fill ``found`` with the tensors of all ranks, on every rank."""
        if (own := _bytes(tensor)) is None:
            return self._gloo.all_gather(found, tensor, sync)
        parts = self._parts(found, len(own))
        parts[self._me][:] = own
        for pieces in zip(*map(_pieces, parts), strict=True):
            self._number += 1
            self._send(pieces[self._me], *self._links)
            for index in self._links:
                self._receive(index, pieces[index])
        return self

    def wait(self) -> None:
        """Return at once: calls are done when they return."""

    def abort(self) -> None:
        """End waiting calls for good; from any thread."""
        for link in self._links.values():
            with contextlib.suppress(OSError):  # the peer may be gone
                link.shutdown(socket.SHUT_RDWR)
        self._abort()

    def close(self) -> None:
        """Close the connections. Idempotent."""
        for link in self._links.values():
            link.close()

    def _parts(self, found: Tensor, nbytes: int) -> list[memoryview]:
        address = found.data_ptr()
        return [_memory(address + index * nbytes, nbytes) for index in range(self._size)]

    def _send(self, own: memoryview, *to: int) -> None:
        frame = FRAME.pack(self._number, len(own))
        for index in to:
            sent = self._links[index].sendmsg([frame, own])
            if sent < len(frame) + len(own):
                self._links[index].sendall((frame + own.tobytes())[sent:])

    def _receive(self, index: int, into: memoryview) -> None:
        """Receive that rank's message for this collective."""
        link, buffers = self._links[index], [self._frame, into]
        came, whole = 0, FRAME.size + len(into)
        while came < whole:
            count = link.recvmsg_into(buffers)[0]
            if not count:
                raise ConnectionResetError(f"the connection with rank {index} of the group was closed")
            if came < FRAME.size <= came + count:
                self._check(index, len(into))
            came += count
            buffers = _after(buffers, count)

    def _check(self, index: int, nbytes: int) -> None:
        """Raise unless the message belongs to this rank's current collective."""
        if (its := FRAME.unpack(self._frame)) != (self._number, nbytes):
            what = f"rank {index} of the group is in collective {its[0]}, of {its[1]} bytes, but this one in"
            raise ConnectionError(f"{what} {self._number}, of {nbytes} bytes")


def _bytes(tensor: Tensor) -> memoryview | None:
    """Return the bytes of a tensor that goes over the connections; None for another one. The result is equal on all
    ranks."""
    count = tensor.element_size()
    for length in tensor.shape:
        count *= length
    return _memory(tensor.data_ptr(), count) if 0 < count <= LARGE and tensor.is_contiguous() else None


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _pieces(whole: memoryview) -> Iterator[memoryview]:
    return (whole[at : at + PIECE] for at in range(0, len(whole), PIECE))


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the unfilled rest of buffers of which ``count`` bytes are filled."""
    left = []
    for buffer in buffers:
        left += [buffer[count:]] if count < len(buffer) else []
        count = max(0, count - len(buffer))
    return left
