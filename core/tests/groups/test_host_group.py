"""Collectives on host memory: the values on each rank at every size and dtype, and the end of a wait."""

import socket
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from types import SimpleNamespace

import numpy as np
import pytest
from hal_core.devices import HostCommunicator
from hal_core.group import ALONE
from hal_core.memory.dtypes import BFLOAT16, DTYPES, FLOAT32, bfloat16_to_float32, dtype_of, float_to_bfloat16
from hal_core.ranks.host_group import FRAME, LARGE, PIECE, HostGroup

PATIENCE = 60.0
SIZES = [0, 1, 1024, PIECE // 4 + 2, LARGE // 4, LARGE // 4 + 1, LARGE]
"""Counts of float32: below and above a piece, the largest that each rank adds up whole, and larger ones."""
SUMMED = ["bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


@pytest.fixture
def groups():
    """Make the group of some ranks in this process, one object for each rank."""
    made = []

    def make(size):
        links = [{} for _ in range(size)]
        for one in range(size):
            for other in range(one):
                links[one][other], links[other][one] = socket.socketpair()
        made.extend(HostGroup(rank, links[rank]) for rank in range(size))
        return made[-size:]

    yield make
    for group in made:
        group.close()


def together(groups, call):
    """Return the result of ``call(group, rank)`` on each rank; all ranks run at once."""
    with ThreadPoolExecutor(len(groups)) as pool:
        found = [pool.submit(call, group, rank) for rank, group in enumerate(groups)]
        ended, waiting = wait(found, PATIENCE, FIRST_EXCEPTION)
        if waiting or any(one.exception() for one in ended):
            for group in groups:
                group.abort()  # what waits for the rank that failed
        return [one.result(PATIENCE) for one in found]


def parts(size, count):
    rng = np.random.default_rng(3)
    return [rng.standard_normal(count).astype(np.float32) for _ in range(size)]


def room(array):
    """The bytes of an array."""
    return memoryview(array.view(np.uint8)) if array.size else memoryview(bytearray())


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_is_the_same_on_every_rank_to_the_last_bit(groups, size, count):
    given, found = parts(size, count), parts(size, count)
    together(groups(size), lambda group, rank: group.all_reduce(room(found[rank]), FLOAT32))
    total = given[0]
    for part in given[1:]:
        total = total + part
    assert {part.tobytes() for part in found} == {total.tobytes()}


@pytest.mark.parametrize("count", [7, LARGE])
@pytest.mark.parametrize("name", SUMMED)
def test_every_dtype_is_summed_in_the_order_of_ranks(groups, name, count):
    dtype, size, rng = dtype_of(name), 3, np.random.default_rng(5)
    raw = [rng.standard_normal(count) * 100 for _ in range(size)]
    if dtype is BFLOAT16:
        given = [float_to_bfloat16(one) for one in raw]
    else:
        given = [(one > 0 if name == "bool" else one.astype(dtype.storage)) for one in raw]
    found = [one.copy() for one in given]
    together(groups(size), lambda group, rank: group.all_reduce(room(found[rank]), dtype))
    total = given[0]
    for one in given[1:]:
        if dtype is BFLOAT16:
            total = float_to_bfloat16(bfloat16_to_float32(total) + bfloat16_to_float32(one))
        else:
            total = total + one
    assert {one.tobytes() for one in found} == {total.tobytes()}


def test_every_dtype_of_hal_has_a_sum(groups):
    for dtype in DTYPES:
        found = [np.zeros(4, dtype.storage), np.zeros(4, dtype.storage)]
        together(groups(2), lambda group, rank, found=found, dtype=dtype: group.all_reduce(room(found[rank]), dtype))
        assert not any(one.any() for one in found)


def test_an_infinite_sum_is_no_warning(groups):
    found = [np.full(4, np.finfo(np.float32).max), np.full(4, np.finfo(np.float32).max)]
    together(groups(2), lambda group, rank: group.all_reduce(room(found[rank]), FLOAT32))
    assert np.isinf(found[0]).all()


@pytest.mark.parametrize("count", SIZES)
def test_what_is_gathered_is_in_the_order_of_ranks(groups, count):
    size, given = 3, parts(3, count)
    rooms = [np.zeros(size * count, np.float32) for _ in range(2 * size)]
    made = groups(size)
    together(made, lambda group, rank: group.gather(room(given[rank]), room(rooms[rank]), 1))
    together(made, lambda group, rank: group.all_gather(room(given[rank]), room(rooms[size + rank])))
    together(made, lambda group, rank: group.broadcast(room(np.zeros(1, np.float32)), 0))  # finds no rest of these
    expected = np.concatenate(given)
    assert [np.array_equal(one, expected) for one in rooms] == [not count, True, not count, True, True, True]


@pytest.mark.parametrize("block", [b"", b"abc"])
def test_blocks_of_any_size_are_exchanged(block):
    def watched(call, *arguments):
        call(*arguments)

    group = SimpleNamespace(ranks=(0,), process_group=HostGroup(0, {}), watched=watched)
    assert HostCommunicator(ALONE, group, bytes).exchange(block) == {0: block}


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("root", [0, 2])
def test_a_broadcast_gives_all_ranks_the_roots_bytes(groups, root, count):
    given, found = parts(3, count), parts(3, count)
    together(groups(3), lambda group, rank: group.broadcast(room(found[rank]), root))
    assert {part.tobytes() for part in found} == {given[root].tobytes()}


@pytest.mark.parametrize("nbytes", [16, LARGE + 64])
def test_a_source_waits_until_the_others_have_come(groups, nbytes):
    """So that a hanging rank is noticed at once."""
    source, other = groups(2)
    ended = threading.Event()
    given = memoryview(bytearray(nbytes))
    caller = threading.Thread(target=lambda: (source.broadcast(given, 0), ended.set()), daemon=True)
    caller.start()
    link = other._links[0]
    assert len(link.recv(FRAME.size + 16, socket.MSG_PEEK | socket.MSG_WAITALL)) == FRAME.size + 16
    assert not ended.is_set()
    other.broadcast(memoryview(bytearray(nbytes)), 0)
    assert ended.wait(PATIENCE)


def test_a_message_that_comes_in_drips_is_taken_whole(groups):
    group, other = groups(2)
    given = np.arange(4, dtype=np.float32)
    message = FRAME.pack(1, given.nbytes) + given.tobytes()
    found = np.zeros(4, np.float32)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(group.broadcast, room(found), 1)
        for at in range(0, len(message), 5):
            other._links[0].sendall(message[at : at + 5])
        taken.result(PATIENCE)
    assert found.tolist() == given.tolist()


@pytest.mark.parametrize("count", [4, 8])
def test_a_rank_in_another_collective_is_named(groups, count):
    group, other = groups(2)
    if count == 4:
        other._number += 1  # it missed one call
    other._number += 1
    other._send(room(np.zeros(count, np.float32)), 0)
    with pytest.raises(ConnectionError, match=r"rank 1 of the group is in collective [12], of (16|32) bytes, but this"):
        group.broadcast(room(np.zeros(4, np.float32)), 1)


@pytest.mark.parametrize("nbytes", [16, LARGE + 64])
@pytest.mark.parametrize("end", ["abort", "the other closes"])
def test_a_wait_ends(groups, end, nbytes):
    """A wait ends by the watchdog's abort from its thread, and by the end of the other process."""
    group, other = groups(2)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(group.all_reduce, memoryview(bytearray(nbytes)), FLOAT32)
        size = FRAME.size + 16
        assert len(other._links[0].recv(size, socket.MSG_PEEK | socket.MSG_WAITALL)) == size  # it has sent its part
        group.abort() if end == "abort" else other.close()
        with pytest.raises(OSError, match=r"closed|reset|pipe"):
            waits.result(PATIENCE)


@pytest.mark.parametrize("count", [0, 1, 1024, PIECE // 4 + 2])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_prepared_sum_is_that_of_a_call_to_the_last_bit_again_and_again(groups, size, count):
    made, given, found = groups(size), parts(size, count), parts(size, count)
    totals = [found[0], *(np.zeros_like(one) for one in found[1:])]  # into the part itself, and into another array
    calls = [group.summing(*arrays) for group, *arrays in zip(made, found, totals, strict=True)]
    for _ in range(2):
        together(made, lambda group, rank: calls[rank]())
        together(made, lambda group, rank: group.all_reduce(room(given[rank]), FLOAT32))
        for rank in range(size):
            assert totals[rank].tobytes() == given[rank].tobytes()
            given[rank][:] = found[rank]
