"""A reader of FastDeploy's System V messages, for tests, written from the layout tables of wire-formats.md alone.

It shares no code with the writer: the key, the structures and the call into the kernel are its own. As its model does,
it receives messages of any type into a buffer of fixed size, which is filled with 0xA5 before.

Two generations: ``parse_*`` reads the messages of FastDeploy before release 2.6, ``parse_*_today`` the later ones, and
``TodaysEngine`` handles them as that engine does for requests that it aborts or preempts.
"""

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
        """The bytes of the next message; None if there is none and ``wait`` is off."""
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


# Since release 2.6 ---------------------------------------------------------------------------------------------------


def parse_topk_today(data):
    """As before, but the second word is bsz | columns << 16, and a row has that many columns, the next close behind."""
    stop, packed = _ints(data, 0, 2)
    size, columns = packed & 0xFFFF, packed >> 16 & 0xFFFF
    if size and not columns:
        raise IndexError("rows without a column for the sampled token")
    width = 4 * columns
    return {
        "stop": stop,
        "columns": columns,
        "tokens": [_ints(data, 8 + width * i, columns) for i in range(size)],
        "scores": [_floats(data, 43_016 + width * i, columns) for i in range(size)],
        "ranks": _ints(data, 86_024, size),
    }


def parse_speculative_topk_today(data, slots=512):
    """As before, but the second word is flag | columns << 8, and only so many of the 21 columns are looked at."""
    found = parse_speculative_topk(data, slots)
    columns = found["flag"] >> 8 & 0xFFFF
    for row in (*found["tokens"], *found["scores"]):
        row[:] = [values[:columns] for values in row]
    if any(not values for row in found["tokens"] for values in row):
        raise IndexError("rows without a column for the sampled token")
    return {**found, "flag": found["flag"] & 0xFF, "columns": columns}


def sampled(found):
    """Return each slot's tokens, and its status word if it has none."""
    if "counts" in found:
        rows = ([row[0] if isinstance(row, list) else row for row in tokens] for tokens in found["tokens"])
        return [(row, count) for row, count in zip(rows, found["counts"], strict=True)]
    words = [row[0] if isinstance(row, list) else row for row in found["tokens"]]
    return [([word] if word >= 0 else [], word) for word in words]


class TodaysEngine:
    """The engine's pending aborts and preemptions: requests by batch id."""

    PREEMPTED = -9

    def __init__(self, aborting, preempting):
        self.aborting, self.preempting = set(aborting), set(preempting)
        self.tokens = {}

    def take(self, found):
        """One message. Only the preempted mark ends either kind of waiting; other words without tokens are skipped."""
        for slot, (tokens, word) in enumerate(sampled(found)):
            if word == self.PREEMPTED:
                self.aborting.discard(slot)
                self.preempting.discard(slot)
            self.tokens.setdefault(slot, []).extend(tokens)


def build(nbytes, parts):
    """Zeros, and at each byte offset the ints and floats given."""
    data = bytearray(nbytes)
    for offset, numbers in parts:
        for index, number in enumerate(numbers):
            struct.pack_into("=f" if isinstance(number, float) else "=i", data, offset + 4 * index, number)
    return bytes(data)


def build_topk(found):
    """The message of which ``parse_topk`` or ``parse_topk_today`` gives ``found``; every other byte is zero."""
    columns = found.get("columns", 21)
    size = len(found["tokens"])
    parts = [(0, [found["stop"], size | (columns << 16 if "columns" in found else 0)]), (86_024, found["ranks"])]
    for i in range(size):
        parts += [(8 + 4 * columns * i, found["tokens"][i]), (43_016 + 4 * columns * i, found["scores"][i])]
    return build(88_072, parts)


def build_speculative_topk(found, slots=512):
    """The message of which ``parse_speculative_topk`` gives ``found``; every other byte is zero."""
    parts = [(0, [found["stop"], found["flag"], len(found["counts"]), *found["counts"]])]
    for i, (tokens, scores) in enumerate(zip(found["tokens"], found["scores"], strict=True)):
        at = 4 * (3 + slots) + 1_032 * i
        parts += [(at + 84 * j, row) for j, row in enumerate(tokens)]
        parts += [(at + 504 + 84 * j, row) for j, row in enumerate(scores)]
        parts.append((at + 1_008, found["ranks"][i]))
    return build(530_448 if slots == 512 else 265_232, parts)
