"""A reader of FastDeploy's System V messages, for tests, written from the layout tables of wire-formats.md alone.

It shares no code with the writer: the key, the structures and the call into the kernel are its own. As its model does,
it receives messages of any type into a buffer of fixed size, which is filled with 0xA5 before.
"""

from __future__ import annotations

import ctypes
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)
IPC_NOWAIT, IPC_RMID = 0o4000, 0

#: Bytes of a message without its type, by operation.
SIZES = {
    "get_output": 2_056,
    "get_output_topk": 88_072,
    "speculate_get_output": 7_176,
    "speculate_get_output_topk": 530_448,
    "speculate_get_output_topk_256": 265_232,
}


def custom_ftok(path, number):
    """(st_dev & 0xf) << 28, (st_ino & 0xff) << 20, id & 0xfffff, as a signed int."""
    found = os.stat(path)
    key = ((found.st_dev & 0xF) << 28) | ((found.st_ino & 0xFF) << 20) | (number & 0xFFFFF)
    return struct.unpack("<i", struct.pack("<I", key))[0]


class LegacyQueue:
    """The engine's end: msgget with IPC_CREAT and 0666, msgrcv of type 0."""

    def __init__(self, key, operation, mode=0o666):
        self.size = SIZES[operation]
        self.msqid = _libc.msgget(ctypes.c_int(key), 0o1000 | mode)
        if self.msqid < 0:
            raise OSError(ctypes.get_errno(), "msgget")

    def receive(self, wait=False):
        """The bytes of the next message; None when there is none, unless it shall be waited for."""
        buffer = ctypes.create_string_buffer(b"\xa5" * (8 + self.size), 8 + self.size)
        got = _libc.msgrcv(self.msqid, buffer, ctypes.c_size_t(self.size), ctypes.c_long(0), 0 if wait else IPC_NOWAIT)
        if got < 0:
            if ctypes.get_errno() == 42:  # ENOMSG
                return None
            raise OSError(ctypes.get_errno(), "msgrcv")
        assert got == self.size
        assert struct.unpack_from("=q", buffer.raw)[0] == 1  # mtype
        return buffer.raw[8:]

    def send(self, data):
        message = ctypes.create_string_buffer(struct.pack("=q", 1) + data, 8 + len(data))
        if _libc.msgsnd(self.msqid, message, ctypes.c_size_t(len(data)), IPC_NOWAIT) < 0:
            raise OSError(ctypes.get_errno(), "msgsnd")

    def remove(self):
        _libc.msgctl(self.msqid, IPC_RMID, None)


def _ints(data, at, count):
    return list(struct.unpack_from(f"={count}i", data, at))


def _floats(data, at, count):
    return list(struct.unpack_from(f"={count}f", data, at))


def parse_plain(data):
    """int mtext[MAX_BSZ+2], MAX_BSZ 512."""
    stop, size = _ints(data, 0, 2)
    return {"stop": stop, "tokens": _ints(data, 8, size)}


def parse_topk(data):
    """int mtext[512*21+2]; float mtext_f[512*21]; int mtext_ranks[512]."""
    stop, size = _ints(data, 0, 2)
    return {
        "stop": stop,
        "tokens": [_ints(data, 8 + 84 * i, 21) for i in range(size)],
        "scores": [_floats(data, 43_016 + 84 * i, 21) for i in range(size)],
        "ranks": _ints(data, 86_024, size),
    }


def parse_speculative(data):
    """int mtext[256*6+256+2]: stop, bsz, counts, then tokens [slot][6] from 2+256."""
    stop, size = _ints(data, 0, 2)
    counts = _ints(data, 8, size)
    return {
        "stop": stop,
        "counts": counts,
        "tokens": [_ints(data, 1_032 + 24 * i, max(0, counts[i])) for i in range(size)],
    }


def parse_speculative_topk(data, slots=512):
    """int meta[3+slots]; per slot int tokens[6*21], float scores[6*21], int ranks[6]."""
    stop, flag, size = _ints(data, 0, 3)
    counts = _ints(data, 12, size)
    begin = 4 * (3 + slots)
    tokens, scores, ranks = [], [], []
    for i in range(size):
        at, count = begin + 1_032 * i, max(0, counts[i])
        tokens.append([_ints(data, at + 84 * j, 21) for j in range(count)])
        scores.append([_floats(data, at + 504 + 84 * j, 21) for j in range(count)])
        ranks.append(_ints(data, at + 1_008, count))
    return {"stop": stop, "flag": flag, "counts": counts, "tokens": tokens, "scores": scores, "ranks": ranks}
