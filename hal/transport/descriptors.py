"""File descriptors that must be free before ZeroMQ is asked for anything: where it finds none it ends the process."""

from __future__ import annotations

import errno
import os
import resource

from hal_core import Unavailable

#: What ZeroMQ makes of a socket with its monitor: its threads with their polls and mailboxes, the sockets' own; one
#: connection and the look at who is at its other end; and the pipe that wakes the sink's thread.
SENDER = 12
#: The same with the listener, its address's lock, and two connections, which ZeroMQ accepts in a thread of its own.
READER = 12
#: What the authenticator adds for keys: its event loop, and the sockets by which it is asked and told.
GATE = 8
#: A search for an installed transport, a folder and a file at a time, and its import.
SEARCH = 3
#: What a rank has open at most, and for each rank of its job besides: Paddle's store and gloo's connections. Seen: 63
#: in the first of 2 ranks, 69 in the first of 4.
RANK, RANK_OF_A_JOB = 56, 8


def check_rank_limit(ranks: int, *, argument: str) -> None:
    """Raise Unavailable if a process under this one's limit on open files cannot be one of so many ranks."""
    needed, limit = RANK + RANK_OF_A_JOB * ranks, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if resource.RLIM_INFINITY != limit < needed:
        what = f"each of {ranks} ranks takes up to {needed} file descriptors, and the limit is {limit}"
        raise Unavailable(what, cure=f"raise the limit on open files (ulimit -n {needed})", argument=argument)


def check_descriptors(count: int, what: str, *, argument: str = "") -> None:
    """Raise Unavailable unless ``what`` can open so many more."""
    held: list[int] = []
    try:
        for _ in range(count):
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise Unavailable(
            f"{what} takes up to {count} file descriptors, {len(held)} are free of {limit}: {error.strerror}",
            cure="raise the limit on open files (ulimit -n), or close some",
            argument=argument,
        ) from error
    finally:
        for descriptor in held:
            os.close(descriptor)
