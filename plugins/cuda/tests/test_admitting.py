"""The native part's admission: the same ids, errors and places as in the core's and the plugin's Python code."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from hal_core import InvalidValue, Request, SamplingParams, SplitRole, StateConfig
from hal_core.slots import batch_admission
from hal_core.slots.admission import admit
from hal_core.slots.batch_admission import admit_all, within
from hal_core.slots.layout import REQUEST_ROW, lay_out
from hal_cuda.native import columns_of
from hal_cuda.staged_requests import Chunk, StagedRequests
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from core.tests.test_batch_admission import batches, check_equal_bytes
from tests import share

from .stand_in import built

if isinstance(built(), str):
    pytest.skip(built(), allow_module_level=True)
NATIVE = built()[0]
COLUMNS = columns_of(NATIVE)
LAYOUT = lay_out(StateConfig(num_slots=1, max_model_len=4096))
PARAMS = SamplingParams(max_tokens=4000, bad_words=(3,), stop_sequences=((4, 5), (6,)))


WIDTHS = st.sampled_from([np.int32, np.int64])


class Overlong(list):
    """A list whose length is not that of its elements' array."""


def forms(ids):
    """Return the forms in which a caller may pass a list of ids; the first four are plain."""
    yield from (ids, tuple(ids))
    yield from (np.array(ids, kind) for kind in (np.int32, np.int64, np.uint16, ">i4"))
    yield np.repeat(np.array(ids, np.int32), 2)[::2]
    yield Overlong(ids)


@pytest.mark.parametrize("count", [2, 700])
def test_ids_are_those_of_the_cores_own_code(count):
    ids = [(7 * number) % 3001 for number in range(count)]
    for at, (prompt, output) in enumerate(zip(forms(ids), forms(ids[::-1]), strict=True)):
        found = NATIVE.ids(prompt, output)
        assert (found is not None) == (at < 4), type(prompt)
        if found is not None:
            assert np.frombuffer(found[0], np.int64).tolist() == ids + ids[::-1]
            assert found[1:] == (count, max(ids))
        taken = []
        for native in (COLUMNS, None):
            taken.append(admit(Request("r", prompt, PARAMS, output), LAYOUT, native=native))
        one, other = taken
        assert one.tokens.tolist() == other.tokens.tolist()
        assert not one.tokens.flags.writeable
        assert (one.prompt_len, one.generated, one.row_lengths) == (
            other.prompt_len,
            other.generated,
            other.row_lengths,
        )
        assert [bytes(row) for row in one.rows] == [bytes(row) for row in other.rows]


NO_IDS = (-1, 2**31, 2**63, -(2**70), True, 1.0, "5", None)


@given(st.lists(st.one_of(st.integers(0, 2**31 - 1), st.sampled_from(NO_IDS)), max_size=6), st.booleans())
def test_what_is_no_id_is_left_to_the_core_which_refuses_it(ids, output):
    given_ = ([5], ids) if output else (ids, [])
    plain = all(type(one) is int and 0 <= one < 2**31 for one in ids)
    assert (NATIVE.ids(*given_) is not None) == plain
    for array in (np.array([5, -1], np.int32), np.array([5, 2**31]), np.zeros((2, 2), np.int32), np.zeros(2, bool)):
        assert NATIVE.ids(array, []) is None
        with pytest.raises(InvalidValue, match="one list of token ids"):
            admit(Request("r", array, PARAMS), LAYOUT, native=COLUMNS)


def test_the_largest_id_is_named():
    with pytest.raises(InvalidValue, match="token 30 is outside the vocabulary of 30"):
        admit(Request("r", [7, 30, 2]), LAYOUT, vocab_size=30, native=COLUMNS)
    assert NATIVE.ids([], ()) == (b"", 0, -1)
    with pytest.raises(InvalidValue, match="no tokens"):
        admit(Request("r", []), LAYOUT, native=COLUMNS)


class Block:
    """Memory of the host in place of pinned memory."""

    def __init__(self, nbytes):
        self.buffer = np.full(nbytes, 0xA5, np.uint8)
        self.address, self.mirror = self.buffer.ctypes.data, 1 << 40


@given(st.lists(st.tuples(st.binary(max_size=70), st.lists(st.binary(max_size=50), max_size=5)), max_size=12))
def test_bytes_are_staged_whole_each_piece_on_16_bytes(requests):
    chunk, end, expected = Chunk(0, Block(400), 400, NATIVE.stage), 0, np.full(400, 0xA5, np.uint8)
    for record, rows in requests:
        padded = [piece.ljust(-(-len(piece) // 16) * 16, b"?") for piece in (record, *rows)]
        fits = end + sum(map(len, padded)) <= 400
        assert chunk.put(record, tuple(map(memoryview, rows))) == (end if fits else -1)
        for piece, room in zip((record, *rows), padded, strict=True) if fits else ():
            expected[end : end + len(piece)] = np.frombuffer(piece, np.uint8)
            end += len(room)
        assert chunk.used == end
    np.testing.assert_array_equal(chunk.block.buffer, expected)


def test_a_chunk_that_is_full_is_left_for_another():
    staged = StagedRequests(Block, nullcontext, limit=3 << 22, stage=NATIVE.stage, stage_all=NATIVE.stage_all)
    state = SimpleNamespace()
    for number in range(3):
        request = admit(Request(f"r{number}", np.full(4000, number + 1, np.int32)), LAYOUT)
        setattr(state, f"r{number}", request)
        staged.put(request, bytes(3 << 20))
        assert staged.table[request.admission_id % len(staged.table)][0] == request.admission_id
    assert len(staged.chunks) == 3


def test_wrong_calls_are_refused():
    for call in (lambda: NATIVE.ids(), lambda: NATIVE.stage(1, b""), lambda: NATIVE.stage(1, b"", (b"",) * 8)):
        with pytest.raises(TypeError):
            call()
    chunk = Chunk(0, Block(64), 64, NATIVE.stage)
    with pytest.raises((TypeError, BufferError)):
        chunk.put(b"", ("no bytes",))
    assert chunk.used == 0


@given(
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from([PARAMS, SamplingParams()])), min_size=7, max_size=20),
    WIDTHS,
)
def test_requests_staged_together_lie_as_those_staged_one_by_one(drawn, kind):
    requests = [Request(f"r{at}", np.arange(count, dtype=kind), params) for at, (count, params) in enumerate(drawn)]
    alone, together = staged_one_by_one(requests), staged_together(requests)
    found = []
    for staged, admitted in (alone, together):
        (chunk,) = staged.chunks
        lines = [staged.table[one.admission_id % len(staged.table)].tolist() for one in admitted]
        assert [line[0] for line in lines] == [one.admission_id for one in admitted]
        data = chunk.block.buffer.tobytes()
        for one, line in zip(admitted, lines, strict=True):
            begin = line[1] - chunk.block.mirror + LAYOUT.record_dtype.fields["request_serial"][1]
            assert data[begin : begin + 8] == one.admission_id.to_bytes(8, "little")
            data = data[:begin] + bytes(8) + data[begin + 8 :]
        found.append((chunk.used, [line[1:] for line in lines], data))
    assert found[0] == found[1]
    staged, admitted = together
    del alone, together, one
    last = admitted.pop()
    admitted.clear()
    assert not staged._idle(chunk), last
    del last
    assert staged._idle(chunk), "a request that was dropped waits for its insertion"


def staged_one_by_one(requests):
    staged = StagedRequests(Block, nullcontext, limit=3 << 22, stage=NATIVE.stage, stage_all=NATIVE.stage_all)
    admitted = [admit(one, LAYOUT) for one in requests]
    for one in admitted:
        staged.put(one, one.packed[REQUEST_ROW.itemsize :])
    return staged, admitted


def staged_together(requests):
    staged, done = StagedRequests(Block, nullcontext, limit=3 << 22, stage=NATIVE.stage, stage_all=NATIVE.stage_all), []
    admitted = admit_all(requests, LAYOUT, None, lambda columns: done.append(staged.put_all(columns)))
    assert done == [True]
    return staged, admitted


def test_requests_that_cannot_be_staged_together_leave_no_trace():
    staged = StagedRequests(Block, nullcontext, limit=1 << 10, stage=NATIVE.stage, stage_all=NATIVE.stage_all)
    before, done = staged.table.copy(), []
    admitted = admit_all(
        [Request(f"r{at}", [1] * 100) for at in range(9)],
        LAYOUT,
        None,
        lambda columns: done.append((staged.put_all(columns), columns)),
    )
    assert not done[0][0]
    np.testing.assert_array_equal(staged.table, before)
    columns = done[0][1]
    table, chunk = staged.table.data.cast("B"), np.array([0, 0, 1 << 20, 0, 0], np.int64)
    right = columns.packed, columns.lists, columns.ids, columns.width
    for at, wrong in enumerate((b"", (b"12", b"", b""), [*columns.ids[:-1], columns.ids[-1][:-4]], 5)):
        given = [*right[:at], wrong, *right[at + 1 :]]
        with pytest.raises(ValueError, match="as long as"):
            NATIVE.stage_all(chunk.ctypes.data, 0, table, *given)
    with pytest.raises(TypeError):
        NATIVE.stage_all(chunk.ctypes.data)
    assert len(admitted) == 9


def fit(ids, limit):
    return COLUMNS.of_requests([Request("r", ids)], Request, limit, 2**31, 2**31) is not None


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("check", [fit, within])
def test_ids_are_checked_together(kind, check):
    ids = np.arange(1003, dtype=kind)
    assert check(ids, 1003)
    assert check(ids, 2**31)
    assert not check(ids, 1002)
    for at in (0, 700, 1002):
        for wrong in (-1, 1003, np.iinfo(kind).min, np.iinfo(kind).max):
            ids[at] = wrong
            assert not check(ids, 1003), (at, wrong)
        ids[at] = at


@pytest.mark.parametrize("count", [1, 2, 700])
def test_plain_requests_are_read_by_native_code(count):
    ids = [(7 * number) % 3001 for number in range(count)]
    for at, prompt in enumerate(forms(ids)):
        found = COLUMNS.of_requests((Request("r", prompt, PARAMS),), Request, 3001, 701, 1)
        assert (found is not None) == (at < 4)
        assert found is None or found == (["r"], [PARAMS], [np.array(ids, np.int32).tobytes()])


def test_requests_that_are_not_plain_are_left_to_the_core():
    right = Request("r", [1, 2])
    others = {"role": SplitRole.DECODE, "output": [3], "extra": {"lora": 1}, "prompt": []}
    for wrong in (*(replace(right, **{name: value}) for name, value in others.items()), "r"):
        assert COLUMNS.of_requests([right, wrong], Request, 10, 10, 9) is None
    assert COLUMNS.of_requests([right], Request, 10, 2, 9) is None
    assert COLUMNS.of_requests([right], Request, 10, 3, 9) is not None
    assert COLUMNS.of_requests(iter([right]), Request, 10, 3, 9) is None
    for wrong in ((), ((),) * 10, (("a",) * 6, *(None,) * 9)):
        with pytest.raises(TypeError):
            NATIVE.gather_requests(*wrong)


def test_a_large_batch_is_read_in_parts(monkeypatch):
    monkeypatch.setattr(batch_admission, "MOST_IDS", 50)
    requests, parts = [Request(f"r{at}", [at % 500] * 10, PARAMS) for at in range(19)], []
    found = admit_all([*requests, Request("long", [1] * 55)], LAYOUT, None, parts.append, native=COLUMNS)
    assert [len(one.requests) for one in parts] == [5, 5, 5, 5]
    assert found == [one for part in parts for one in part.requests]
    assert [one.request_id for one in found] == [*(f"r{at}" for at in range(19)), "long"]


@pytest.mark.parametrize("path", ["opened", "fallback"])
def test_a_batch_leaves_the_bytes_of_each_of_it_alone(path, request, monkeypatch):
    """On the native path and on the fallback."""
    monkeypatch.setattr(batch_admission, "FEW", 0)
    bound = request.getfixturevalue(path)()

    @settings(max_examples=share.of(100), deadline=None)
    @given(batch=batches())
    def check(batch):
        check_equal_bytes(bound, batch)

    check()
