"""Staged requests without a GPU: chunks of pinned memory, with stand-ins for the driver's blocks and events."""

from collections import deque
from contextlib import nullcontext

import numpy as np
import pytest
from hal_core import Request, SamplingParams, StateConfig
from hal_core.errors import OutOfMemory
from hal_core.slots.admission import admit
from hal_core.slots.fields import ROW_FIELDS
from hal_core.slots.layout import REQUEST_ROW, lay_out
from hal_cuda import staged_requests
from hal_cuda.staged_requests import StagedRequests
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import share

from .stand_in import built

if isinstance(built(), str):
    pytest.skip(built(), allow_module_level=True)
NATIVE = built()[0]
LAYOUT = lay_out(StateConfig(num_slots=4, max_model_len=400, max_stop_length=3))
CHUNK = 1 << 13


class Block:
    """Pinned memory with a mirror, to which the test copies in place of an upload."""

    made = released = 0

    def __init__(self, nbytes):
        self.buffer, self.copied = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        self.address, self.mirror = self.buffer.ctypes.data, self.copied.ctypes.data
        Block.made += 1

    def release(self):
        Block.released += 1


class Event:
    """An event that passes once the test sets ``passed``."""

    def __init__(self, passed=False):
        self.passed = passed

    def done(self):
        return self.passed

    def wait(self, timeout=None):
        return self.passed


@pytest.fixture
def staging(monkeypatch):
    monkeypatch.setattr(staged_requests, "CHUNK", CHUNK)
    monkeypatch.setattr(Block, "made", 0)
    monkeypatch.setattr(Block, "released", 0)
    return staging_of(Block, 3 * CHUNK)


def staging_of(allocate, limit):
    return StagedRequests(allocate, nullcontext, limit=limit, stage=NATIVE.stage, stage_all=NATIVE.stage_all)


def has(staging, request):
    """Return whether a request's bytes are staged now."""
    return place_of(staging, request.admission_id)[0] == request.admission_id


def place_of(staging, admission_id):
    """Return the entry of the table that an insertion reads, as a view."""
    return staging.table[admission_id % len(staging.table)]


def staged(staging, name, tokens):
    request = admit(Request(name, tokens, SamplingParams(bad_words=(3, 4), stop_sequences=((1,),))), LAYOUT)
    staging.put(request, request.packed[REQUEST_ROW.itemsize :])
    return request


def found_at(staging, request):
    """Insert a request as native code does, and return its bytes from the pinned memory; None if it is not staged."""
    if not has(staging, request):
        return None
    place = place_of(staging, request.admission_id)
    place[3] = 0  # it no longer waits for its insertion
    for chunk in staging.chunks:
        at = int(place[1]) - chunk.block.mirror
        if 0 <= at < chunk.nbytes:
            return chunk.block.buffer[at:]
    raise AssertionError("the address is in no chunk")


def check_list(staging):
    """Check that native code has the addresses and numbers of all chunks."""
    chunks = [staging._filling, *staging.chunks]
    assert staging.listed.tolist() == [one.numbers.buffer_info()[0] if one else 0 for one in chunks]
    for one in staging.chunks:
        assert one.numbers.tolist() == [one.block.address, one.block.mirror, one.nbytes, one.used, one.uploaded]


def check(data, request):
    """Check that the bytes are the record and the rows, as the kernel reads them."""
    record = request.packed[REQUEST_ROW.itemsize :]
    assert data[: len(record)].tobytes() == record
    at = -(-len(record) // 16) * 16
    for name, row in zip(ROW_FIELDS, request.rows, strict=True):
        if name != "block_tables":
            assert data[at : at + len(row)].tobytes() == bytes(row), name
            at += -(-len(row) // 16) * 16


@settings(max_examples=share.of(40), deadline=None)
@given(data=st.data())
def test_g02_g11_every_staged_request_is_found_whole_until_it_was_inserted(data):
    """No waiting request is overwritten, in any order of staged_requests, insertions, drops and ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged_requests, "CHUNK", CHUNK)
        staging, waiting, events = staging_of(Block, 3 * CHUNK), [], []
        for turn in range(data.draw(st.integers(1, 40), label="turns")):
            act = data.draw(st.sampled_from(["admit", "admit", "insert", "drop", "finish"]), label="act")
            if act == "admit":
                waiting.append(staged(staging, f"r{turn}", [turn] * data.draw(st.integers(1, 399), label="tokens")))
            elif act == "insert" and waiting:
                request = waiting.pop(data.draw(st.integers(0, len(waiting) - 1), label="which"))
                if has(staging, request):
                    check(found_at(staging, request), request)
                    events.append(Event())
                    for chunk in staging.chunks:  # as an insertion does: each on a stream of its own
                        chunk.fences[len(events)] = events[-1]
            elif act == "drop" and waiting:
                del waiting[data.draw(st.integers(0, len(waiting) - 1), label="which")]
            elif act == "finish" and events:
                events[data.draw(st.integers(0, len(events) - 1), label="event")].passed = True
            assert staging.held <= 3 * CHUNK
            check_list(staging)
        for request in waiting:
            if has(staging, request):
                check(found_at(staging, request), request)


def fill(staging, name):
    """Admit requests until another chunk is being filled."""
    made, before = [staged(staging, f"{name}-0", [1] * 300)], staging._filling
    while staging._filling is before and has(staging, made[-1]) and len(made) < 20:
        made.append(staged(staging, f"{name}-{len(made)}", [1] * 300))
    return made


def test_g03_a_chunk_is_not_used_again_while_the_gpu_reads_it(staging):
    requests = fill(staging, "a") + fill(staging, "b") + fill(staging, "c")
    assert not has(staging, requests[-1]), "three chunks hold no more"
    event = Event()
    for request in requests[:-1]:
        assert found_at(staging, request) is not None
    for chunk in staging.chunks:
        chunk.fences[1] = event
    assert not has(staging, staged(staging, "early", [1]))
    event.passed = True
    assert has(staging, staged(staging, "later", [1] * 300))
    assert Block.made == 3


def test_what_a_burst_took_is_given_back(staging):
    requests = fill(staging, "a") + fill(staging, "b") + fill(staging, "c")
    del requests
    for turn in range(3):
        fill(staging, f"d{turn}")
    assert Block.released == 1
    assert staging.held == 2 * CHUNK


def test_requests_that_are_gone_make_room(staging):
    requests = fill(staging, "a") + fill(staging, "b") + fill(staging, "c")
    assert not has(staging, staged(staging, "none", [1] * 300))
    del requests
    assert has(staging, staged(staging, "some", [1] * 300))


def test_a_serial_of_an_emptied_chunk_finds_nothing(staging):
    (first, *rest) = fill(staging, "a") + fill(staging, "b") + fill(staging, "c")
    for request in (first, *rest[:-1]):
        assert found_at(staging, request) is not None
    staged(staging, "d", [1] * 300)  # takes over the first chunk
    assert found_at(staging, first) is None


def test_a_request_that_no_chunk_can_hold_is_not_staged(monkeypatch):
    monkeypatch.setattr(staged_requests, "CHUNK", 64)
    none = staging_of(Block, 0)
    assert not has(none, staged(none, "a", [1] * 100))
    assert none.held == 0
    one = staging_of(Block, CHUNK)
    assert has(one, staged(one, "a", [1] * 300)), "longer than a chunk: it gets one of its own"


def test_serials_of_another_device_find_nothing(staging):
    other = staging_of(Block, CHUNK)
    request = staged(other, "a", [1])
    staged(staging, "b", [2])
    assert found_at(staging, request) is None
    assert place_of(staging, 0)[0] != 0


def test_a_chunk_that_another_thread_takes_first_is_no_error(staging):
    """Between the question whether one leaves and its removal another admission may have removed it."""

    class Contended(deque):
        def __bool__(self):
            self.clear()
            return True

    staged(staging, "a", [1, 2, 3])
    staging._leaving = Contended([None])
    assert has(staging, staged(staging, "b", [1, 2, 3]))


def test_closing_releases_what_the_gpu_has_left(staging):
    fill(staging, "a")
    first, second = staging.chunks
    first.fences[1] = Event(passed=True)
    second.fences[1] = Event()
    staging.close(release=True)
    assert (Block.released, staging.chunks) == (1, [])
    assert not has(staging, staged(staging, "late", [1]))


def test_more_requests_wait_than_there_are_places(monkeypatch):
    """A place whose request still waits is not used for another request."""
    monkeypatch.setattr(staged_requests, "PLACES", 8)
    monkeypatch.setattr(staged_requests, "CHUNK", 1 << 16)
    staging = staging_of(Block, 1 << 16)
    requests = [staged(staging, f"r{i}", [i]) for i in range(20)]
    held = [request for request in requests if has(staging, request)]
    assert len(held) == 8
    for request in held:
        check(found_at(staging, request), request)
    assert has(staging, staged(staging, "after", [1])), "an insertion has made room"


class NoMemory:
    """An allocator that raises after so many blocks."""

    def __init__(self, blocks):
        self.left = blocks

    def __call__(self, nbytes):
        if not self.left:
            raise OutOfMemory("cuMemAlloc: none", cure="free some")
        self.left -= 1
        return Block(nbytes)


def test_without_memory_for_another_chunk_staging_stays_as_it_is(monkeypatch, caplog):
    monkeypatch.setattr(staged_requests, "CHUNK", CHUNK)
    staging = staging_of(NoMemory(1), 9 * CHUNK)
    requests = fill(staging, "a")
    assert not has(staging, requests[-1])
    assert staging.limit == staging.held == CHUNK
    assert "are staged in 8192 bytes from now on" in caplog.text
    for request in requests[:-1]:
        check(found_at(staging, request), request)
    assert has(staging, staged(staging, "again", [1] * 300)), "its requests were inserted: the chunk is filled anew"


def test_a_chunk_that_leaves_is_not_filled_any_more(monkeypatch):
    """An idle chunk is too short for a request and occupies memory that the request needs: it is released."""
    monkeypatch.setattr(staged_requests, "CHUNK", 2048)
    monkeypatch.setattr(Block, "released", 0)
    staging = staging_of(Block, 4096)
    first = staged(staging, "first", [1] * 10)
    assert found_at(staging, first) is not None
    assert not has(staging, staged(staging, "long", [1] * 390))
    assert (Block.released, staging.chunks, staging._filling) == (1, [], None)
    check_list(staging)
    again = staged(staging, "again", [1] * 390)
    check(found_at(staging, again), again)


def test_requests_inserted_by_the_general_way_wait_no_longer(staging):
    requests = fill(staging, "a") + fill(staging, "b") + fill(staging, "c")
    assert not has(staging, staged(staging, "none", [1] * 300))
    staging.inserted(np.array([request.admission_id for request in requests]))
    assert has(staging, staged(staging, "some", [1] * 300))
    other = staged(staging, "kept", [2])
    staging.inserted(np.array([0, 10**9]))
    check(found_at(staging, other), other)


def test_a_limit_below_one_chunk_is_a_limit_still(monkeypatch):
    monkeypatch.setattr(staged_requests, "CHUNK", 1 << 20)
    staging = staging_of(Block, CHUNK)
    assert has(staging, staged(staging, "a", [1] * 100))
    assert staging.held == CHUNK


def test_a_forks_child_stages_nothing(staging, monkeypatch):
    monkeypatch.setattr(staged_requests.os, "getpid", lambda: -1)
    assert not has(staging, staged(staging, "child", [1]))
    assert staging.held == 0
