"""Connections of strangers, ended before the reader's socket is.

libzmq 4.3.5 ends the process ("Resource temporarily unavailable", process_routing_id_msg in zmtp_engine.cpp) in one
case: a peer that greets like ZeroMQ 2 gives its name while the socket is being closed. ZeroMQ can refuse such peers
only by its authentication, whose requests have the same fault. So a connection without a message of ours is shut down
while the socket is still open, and ZeroMQ drops it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import time
from collections.abc import Container, Iterator

from hal_engine.timeouts import TIMEOUTS

_ANY = ("0.0.0.0", "::")
_SO_ATTACH_FILTER, _BPF_RET = 26, 6
"""Linux: asm-generic/socket.h, linux/bpf_common.h."""

Name = str | tuple[str, int]
"""Where a socket is bound: a path, or an address with a port."""


def name_of(endpoint: str) -> Name:
    """Return the name in ZeroMQ's description of a bound socket: ``ipc://PATH`` or ``tcp://HOST:PORT``, in numbers."""
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return rest
    host, _, port = rest.rpartition(":")
    return host.strip("[]"), int(port)


def end_strangers(name: Name, known: Container[int]) -> None:
    """Shut down this process's connections at ``name`` whose inodes are not ``known``, and wait until they are closed.

    No new ones appear: a path must have been removed before, and at an address the kernel drops new connections.
    (Unbinding would end all connections as closing does, with the same fault.)
    """
    end = time.monotonic() + TIMEOUTS.strangers
    while True:
        left = False
        for one in _sockets_at(name):
            with one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    _take_no_more(one)
                elif os.fstat(one.fileno()).st_ino not in known:
                    left = True
                    _shut_down(one)
        if not left or time.monotonic() > end:
            return
        time.sleep(TIMEOUTS.strangers_look)


def _take_no_more(listening: socket.socket) -> None:
    """Let the kernel drop every packet for the socket, those that open a connection too: a filter of one
    instruction."""
    if listening.family == socket.AF_UNIX:
        return
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RET, 0, 0, 0))
    with contextlib.suppress(OSError):  # a kernel without filters: a connection may still arrive in the last moment
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(drop_all)))


def _shut_down(one: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer has already ended it
        one.shutdown(socket.SHUT_RDWR)


def _sockets_at(name: Name) -> Iterator[socket.socket]:
    """Yield a duplicate of each socket of this process that is bound at ``name``; the caller closes it."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(entry)))
        except OSError:  # another thread, its owner, has closed it meanwhile
            continue
        if _is_at(one, name):
            yield one
        else:
            one.close()


def _is_at(one: socket.socket, name: Name) -> bool:
    try:
        found = one.getsockname()
    except OSError:
        return False
    if isinstance(name, str) or not isinstance(found, tuple):
        return bool(found == name)
    return bool(found[1] == name[1] and (name[0] in _ANY or found[0] == name[0]))
