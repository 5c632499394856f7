"""One rank of a group of processes, without Paddle; prints its answer as JSON.

python rank.py NAME GROUP RANKS RANK
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np
from hal_core.errors import GroupLost
from hal_sim import Accelerator, Group, Reduce, Stream, set_option


class Rank:
    def __init__(self, group: str, ranks: int, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self.device = Accelerator(0)
        self.stream: Stream = self.device.stream()
        self.group = Group(group, ranks, rank)

    def call(self, name: str, send: np.ndarray, out: np.ndarray | None = None, **more: int) -> Any:
        """Put the arrays on the device, communicate, and return the target's content."""
        out = send if out is None else out
        src, dst = self.device.allocate(max(1, send.nbytes)), self.device.allocate(max(1, out.nbytes))
        self.device.poke(src, send.tobytes())
        self.device.poke(dst, out.tobytes())
        target = src if name == "broadcast" else dst
        count = out.size if name == "reduce_scatter" else send.size
        if name == "barrier":
            self.group.barrier(self.stream)
        elif name == "broadcast":
            self.group.broadcast(src, count, send.dtype, stream=self.stream, **more)
        else:
            getattr(self.group, name)(src, dst, count, send.dtype, stream=self.stream, **more)
        self.stream.synchronize()
        return np.frombuffer(self.device.peek(target, out.nbytes), out.dtype)

    def transfer(self, array: np.ndarray, peer: int, *, sending: bool) -> np.ndarray:
        address = self.device.allocate(array.nbytes)
        self.device.poke(address, array.tobytes())
        (self.group.send if sending else self.group.receive)(address, array.nbytes, peer, self.stream)
        self.stream.synchronize()
        return np.frombuffer(self.device.peek(address, array.nbytes), array.dtype)


def collectives(r: Rank) -> Any:
    mine = np.arange(5, dtype=np.int64) + 10 * r.rank
    large = np.full(400_000, r.rank + 1, np.float64)  # several chunks
    zeros = np.zeros(5 * r.ranks, np.int64)
    answer = {
        "broadcast": r.call("broadcast", mine, root=1).tolist(),
        "sum": r.call("all_reduce", mine).tolist(),
        "largest": r.call("all_reduce", mine, how=Reduce.MAXIMUM).tolist(),
        "average": r.call("all_reduce", mine.astype(np.float16), how=Reduce.AVERAGE).tolist(),
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
    """Return the next collective's error, and its duration."""
    start = time.monotonic()
    try:
        r.call("all_reduce", np.ones(4, np.float32))
    except Exception as error:  # noqa: BLE001 - the test compares the text
        message = f"{type(error).__name__}: {error}"
    else:
        message = "no error"
    return f"{time.monotonic() - start:.3f} {message}"


def lost(r: Rank) -> Any:
    """The last rank is killed in the middle of things."""
    r.call("barrier", np.zeros(0, np.int32))
    if r.rank == r.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [failure(r), failure(r)]


def left(r: Rank) -> Any:
    r.call("barrier", np.zeros(0, np.int32))
    if r.rank == r.ranks - 1:
        r.group.leave()
        return None
    return [failure(r)]


def hung(r: Rank) -> Any:
    """The last rank's stream is held, so it never comes; it must fail as well when it does."""
    r.call("barrier", np.zeros(0, np.int32))
    if r.rank == r.ranks - 1:
        data = r.device.allocate(16)
        with r.stream.held():
            r.group.all_reduce(data, data, 4, np.float32, r.stream)
            with contextlib.suppress(GroupLost):
                while True:
                    r.group.check()
        try:
            r.stream.synchronize()
        except Exception as error:  # noqa: BLE001 - the test compares the text
            return [f"0 {type(error).__name__}: {error}"]
        return ["0 no error"]
    return [failure(r)]


def disagree(r: Rank) -> Any:
    try:
        r.call("broadcast", np.ones(4, np.float32), root=0) if r.rank else r.call("all_reduce", np.ones(4, np.float32))
    except Exception as error:  # noqa: BLE001 - the test compares the text
        return f"{type(error).__name__}: {error}"
    return "no error"


if __name__ == "__main__":
    name, group, ranks, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    set_option("collective_timeout_ms", 1500 if name == "hung" else 20000)
    answer = globals()[name](Rank(group, ranks, rank))
    sys.stdout.write(json.dumps(answer) + "\n")
