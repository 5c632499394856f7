"""One rank of a group of processes, without Paddle; prints its answer as JSON.

python rank.py NAME GROUP RANKS RANK
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np
from hal_sim import Accelerator, Stream, set_option
from hal_sim._native import native

TYPES = {"uint8": 2, "int32": 8, "int64": 9, "float16": 10, "float32": 11, "float64": 12}
SUM, AVERAGE, MAXIMUM = 0, 1, 2


class Rank:
    def __init__(self, group: str, ranks: int, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self.device, self.native = Accelerator(0), native()
        self.stream: Stream = self.device.stream()
        handle = ctypes.c_void_p()
        self.native.check(self.native.group_join(group.encode(), ranks, rank, ctypes.byref(handle)))
        self.group = handle.value

    def call(self, name: str, send: np.ndarray, out: np.ndarray | None = None, *, how: int = SUM, root: int = 0) -> Any:
        """Puts the arrays on the device, communicates, and returns what is in the target."""
        out = send if out is None else out
        src, dst = self.device.allocate(max(1, send.nbytes)), self.device.allocate(max(1, out.nbytes))
        self.device.poke(src, send.tobytes())
        self.device.poke(dst, out.tobytes())
        target = src if name == "broadcast" else dst
        count = {"all_gather": send.size, "reduce_scatter": out.size}.get(name, send.size)
        self.native.check(
            self.native.collective(
                self.group, self.stream.handle, name.encode(), src, target, count, TYPES[send.dtype.name], how, root
            )
        )
        self.stream.synchronize()
        return np.frombuffer(self.device.peek(target, out.nbytes), out.dtype)

    def transfer(self, array: np.ndarray, peer: int, *, sending: bool) -> np.ndarray:
        address = self.device.allocate(array.nbytes)
        self.device.poke(address, array.tobytes())
        n = self.native
        n.check(n.transfer(self.group, self.stream.handle, address, array.nbytes, peer, int(sending)))
        self.stream.synchronize()
        return np.frombuffer(self.device.peek(address, array.nbytes), array.dtype)


def collectives(r: Rank) -> Any:
    mine = np.arange(5, dtype=np.int64) + 10 * r.rank
    large = np.full(400_000, r.rank + 1, np.float64)  # several chunks
    zeros = np.zeros(5 * r.ranks, np.int64)
    answer = {
        "broadcast": r.call("broadcast", mine, root=1).tolist(),
        "sum": r.call("all_reduce", mine).tolist(),
        "largest": r.call("all_reduce", mine, how=MAXIMUM).tolist(),
        "average": r.call("all_reduce", mine.astype(np.float16), how=AVERAGE).tolist(),
        "reduce": r.call("reduce", mine, np.zeros_like(mine), root=1).tolist(),
        "gather": r.call("all_gather", mine, zeros).tolist(),
        "scatter": r.call("reduce_scatter", np.arange(2 * r.ranks, dtype=np.int32), np.zeros(2, np.int32)).tolist(),
        "large": sorted(set(r.call("all_reduce", large).tolist())),
        "empty": r.call("all_reduce", mine[:0]).tolist(),
        "barrier": r.call("barrier", mine[:0]).tolist(),
    }
    if r.rank < 2:
        message = np.arange(300_000, dtype=np.int32) * (r.rank + 1)
        got = r.transfer(message, 1 - r.rank, sending=r.rank == 0)
        answer["received"] = bool((got == np.arange(300_000)).all())
    r.call("barrier", mine[:0])
    return answer


def failure(r: Rank) -> str:
    """What the next collective says, and how long that took."""
    start = time.monotonic()
    try:
        r.call("all_reduce", np.ones(4, np.float32))
    except Exception as error:  # noqa: BLE001 - the test compares the text
        said = f"{type(error).__name__}: {error}"
    else:
        said = "no error"
    return f"{time.monotonic() - start:.3f} {said}"


def lost(r: Rank) -> Any:
    """The last rank is killed in the middle of things."""
    r.call("barrier", np.zeros(0, np.int32))
    if r.rank == r.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [failure(r), failure(r)]


def left(r: Rank) -> Any:
    r.call("barrier", np.zeros(0, np.int32))
    if r.rank == r.ranks - 1:
        r.native.check(r.native.group_leave(r.group))
        return None
    return [failure(r)]


def hung(r: Rank) -> Any:
    """The last rank's stream is held, so it never comes; it must fail as well when it does."""
    r.call("barrier", np.zeros(0, np.int32))
    if r.rank == r.ranks - 1:
        data = r.device.allocate(16)
        with r.stream.held():
            r.native.check(
                r.native.collective(r.group, r.stream.handle, b"all_reduce", data, data, 4, TYPES["float32"], SUM, 0)
            )
            while r.native.group_check(r.group) == 0:
                pass
        try:
            r.stream.synchronize()
        except Exception as error:  # noqa: BLE001 - the test compares the text
            return [f"0 {type(error).__name__}: {error}"]
        return ["0 no error"]
    return [failure(r)]


def disagree(r: Rank) -> Any:
    try:
        r.call("broadcast" if r.rank else "all_reduce", np.ones(4, np.float32))
    except Exception as error:  # noqa: BLE001 - the test compares the text
        return f"{type(error).__name__}: {error}"
    return "no error"


if __name__ == "__main__":
    name, group, ranks, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    set_option("collective_timeout_ms", 1500 if name == "hung" else 20000)
    answer = globals()[name](Rank(group, ranks, rank))
    sys.stdout.write(json.dumps(answer) + "\n")
