"""Small collectives over a group's own connections: the values on each rank, the fallback to gloo, and the end of a
wait.
"""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

paddle = pytest.importorskip("paddle", exc_type=ImportError)

from hal_core.devices.paddle.places import paddle_core  # noqa: E402
from hal_core.devices.paddle.ranks.direct_group import FRAME, LARGE, PIECE, DirectGroup  # noqa: E402

SUM, PATIENCE = paddle_core().ReduceOp.SUM, 60.0
SIZES = [1, 1024, PIECE // 4 + 2, LARGE // 4]
"""Counts of float32: below and above a piece, and the largest that is sent directly."""


class Gloo:
    """Records the collectives that it is asked for."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(name)


@pytest.fixture
def groups():
    """Make the group of some ranks in this process, one object for each rank."""
    made = []

    def make(size):
        links = [{} for _ in range(size)]
        for one in range(size):
            for other in range(one):
                links[one][other], links[other][one] = socket.socketpair()
        made.extend(DirectGroup(Gloo(), rank, links[rank], lambda: None, None) for rank in range(size))
        return made[-size:]

    yield make
    for group in made:
        group.close()


def together(groups, call):
    """Return the result of ``call(group, rank)`` on each rank; all ranks run at once."""
    with ThreadPoolExecutor(len(groups)) as pool:
        found = [pool.submit(call, group, rank) for rank, group in enumerate(groups)]
        return [one.result(PATIENCE) for one in found]


def parts(size, count):
    rng = np.random.default_rng(3)
    return [rng.standard_normal(count).astype(np.float32) for _ in range(size)]


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_is_the_same_on_every_rank_to_the_last_bit(groups, size, count):
    given, tensors = parts(size, count), [paddle.to_tensor(part) for part in parts(size, count)]
    together(made := groups(size), lambda group, rank: group.all_reduce(tensors[rank], SUM, True).wait())
    total = given[0]
    for part in given[1:]:
        total = total + part
    assert {tensor.numpy().tobytes() for tensor in tensors} == {total.tobytes()}
    assert not any(group._gloo.calls for group in made)


@pytest.mark.parametrize("count", SIZES)
def test_what_is_gathered_is_in_the_order_of_ranks(groups, count):
    size, given = 3, np.stack(parts(3, count))
    tensors = [paddle.to_tensor(part) for part in given]
    rooms = [paddle.zeros([size * count]) for _ in range(2 * size)]
    made = groups(size)
    together(made, lambda group, rank: group.gather(tensors[rank], rooms[rank], 1, True, False).wait())
    together(made, lambda group, rank: group.all_gather(rooms[size + rank], tensors[rank], True).wait())
    found = [room.numpy().tobytes() == given.tobytes() for room in rooms]
    assert found == [False, True, False, True, True, True]


@pytest.mark.parametrize("count", SIZES)
def test_a_broadcast_gives_all_ranks_the_roots_bytes(groups, count):
    given, tensors = parts(3, count), [paddle.to_tensor(part) for part in parts(3, count)]
    together(groups(3), lambda group, rank: group.broadcast(tensors[rank], 2, True).wait())
    assert {tensor.numpy().tobytes() for tensor in tensors} == {given[2].tobytes()}


def test_a_source_waits_until_the_others_have_come(groups):
    """As over gloo, so that a hanging rank is noticed at once."""
    source, other = groups(2)
    ended = threading.Event()
    caller = threading.Thread(target=lambda: (source.broadcast(paddle.ones([4]), 0, True), ended.set()), daemon=True)
    caller.start()
    link = other._links[0]
    assert len(link.recv(FRAME.size + 16, socket.MSG_PEEK | socket.MSG_WAITALL)) == FRAME.size + 16
    assert not ended.is_set()
    other.broadcast(paddle.zeros([4]), 0, True)
    assert ended.wait(PATIENCE)


def test_large_tensors_and_other_kinds_go_by_gloo(groups):
    group, _ = groups(2)
    large, half = paddle.zeros([LARGE // 4 + 1]), paddle.zeros([4], "float16")
    turned = paddle.ones([8, 4]).T
    group.all_reduce(large, SUM, True)
    group.all_reduce(half, SUM, True)
    group.all_reduce(paddle.ones([4]), paddle_core().ReduceOp.MAX, True)
    group.broadcast(large, 0, True)
    group.gather(turned, turned, 0, True, False)
    group.all_gather(large, large, True)
    assert group._gloo.calls == [*["all_reduce"] * 3, "broadcast", "gather", "all_gather"]


def test_a_message_that_comes_in_drips_is_taken_whole(groups):
    group, other = groups(2)
    given = np.arange(4, dtype=np.float32)
    message = FRAME.pack(1, given.nbytes) + given.tobytes()
    tensor = paddle.zeros([4])
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(group.broadcast, tensor, 1, True)
        for at in range(0, len(message), 5):
            other._links[0].sendall(message[at : at + 5])
        taken.result(PATIENCE)
    assert tensor.numpy().tolist() == given.tolist()


@pytest.mark.parametrize("count", [4, 8])
def test_a_rank_in_another_collective_is_named(groups, count):
    group, other = groups(2)
    if count == 4:
        other._number += 1  # it missed one call
    other._number += 1
    other._send(memoryview(np.zeros(count, np.float32)).cast("B"), 0)
    with pytest.raises(ConnectionError, match=r"rank 1 of the group is in collective [12], of (16|32) bytes, but this"):
        group.broadcast(paddle.zeros([4]), 1, True)


@pytest.mark.parametrize("end", ["abort", "the other closes"])
def test_a_wait_ends(groups, end):
    """A wait ends by the watchdog's abort from its thread, and by the end of the other process."""
    group, other = groups(2)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(group.all_reduce, paddle.ones([4]), SUM, True)
        size = FRAME.size + 16
        assert len(other._links[0].recv(size, socket.MSG_PEEK | socket.MSG_WAITALL)) == size  # it has sent its part
        group.abort() if end == "abort" else other.close()
        with pytest.raises(OSError, match=r"closed|reset"):
            waits.result(PATIENCE)
