"""File descriptors that must be free before something is opened, so that one error names the limit."""

from __future__ import annotations

import errno
import os
import resource

from hal_core import Unavailable

#: Descriptors of a sink: its connection, and the pipe that wakes its thread; one more to look for the reader.
SENDER = 6
#: Descriptors of a reader: its listener, what it polls, and two connections; one more for its address.
READER = 6
#: Descriptors of a search for an installed transport (one folder and one file at a time) and its import.
SEARCH = 3
#: Descriptors that a rank has open at most, and in addition for each rank of its job: the connections of its groups.
#: Measured: 63 in the first of 2 ranks, 69 in the first of 4.
RANK, RANK_OF_A_JOB = 56, 8


def check_rank_limit(ranks: int, *, argument: str) -> None:
    """Raise Unavailable if this process's limit on open files is too low for one of so many ranks."""
    needed, limit = RANK + RANK_OF_A_JOB * ranks, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if resource.RLIM_INFINITY != limit < needed:
        what = f"each of {ranks} ranks takes up to {needed} file descriptors, and the limit is {limit}"
        raise Unavailable(what, cure=f"raise the limit on open files (ulimit -n {needed})", argument=argument)


def check_descriptors(count: int, what: str, *, argument: str = "") -> None:
    """Raise Unavailable unless ``what`` can open ``count`` more descriptors."""
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
