"""Requests admitted by one call are those admitted one by one: bytes, refusals, and the state after insertion."""

import gc
import weakref

import numpy as np
import pytest
from hal_core import ByteRange, InvalidValue, Request, SamplingParams, SplitRole, StateConfig, StateField, TaskBatch
from hal_core.devices.cpu.device import CpuDevice
from hal_core.runtime.bound import bind
from hal_core.slots import batch_admission
from hal_core.slots.layout import ADMISSION_ID, REQUEST_ROW, lay_out
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = StateConfig(
    num_slots=12, max_model_len=60, block_size=4, max_logprobs=3, max_eos=2, max_stop_sequences=2, max_stop_length=3,
    max_bad_words=3, vocab_size=500,
)  # fmt: skip
TOKEN, RECORD = st.integers(0, 499), lay_out(SIZES).record_dtype


@pytest.fixture
def bound():
    with bind(CpuDevice(0, {})) as device:
        yield device


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.integers(0, 5),
    top_p=st.sampled_from([1.0, 0.3]),
    seed=st.integers(0, 2**63 - 1),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    min_tokens=st.integers(0, 2),
    max_tokens=st.integers(2, 9),
    stop_sequences=st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    bad_words=st.lists(TOKEN, max_size=3).map(tuple),
    eos_token_ids=st.lists(TOKEN, max_size=2).map(tuple),
    logprobs=st.none() | st.integers(0, 3),
)
FORMS = {
    "list": list,
    "tuple": tuple,
    "int32": lambda ids: np.array(ids, np.int32),
    "int64": lambda ids: np.array(ids, np.int64),
    "apart": lambda ids: np.repeat(np.array(ids, np.int64), 2)[::2],
    "int16": lambda ids: np.array(ids, np.int16),
}
WRONG = {
    "no prompt": lambda one: Request(one.request_id, [], one.params),
    "long": lambda one: Request(one.request_id, [1] * 60, one.params),
    "outside the vocabulary": lambda one: Request(one.request_id, [*one.prompt, 500], one.params),
    "negative": lambda one: Request(one.request_id, [*one.prompt, -1], one.params),
    "no number": lambda one: Request(one.request_id, [1.5], one.params),
    "of two axes": lambda one: Request(one.request_id, np.ones((2, 2), np.int32), one.params),
    "without an axis": lambda one: Request(one.request_id, np.array(5, np.int32), one.params),
    "an output that is none": lambda one: Request(one.request_id, one.prompt, one.params, output=7),
    "many bad words": lambda one: Request(one.request_id, one.prompt, SamplingParams(bad_words=(1, 2, 3, 4))),
    "an unknown field": lambda one: Request(one.request_id, one.prompt, one.params, extra={"lora": 1}),
    "no request": lambda one: one.request_id,
}
OTHERWISE = {
    "resumed": lambda one: Request(one.request_id, one.prompt, one.params, output=[7]),
    "to prefill": lambda one: Request(one.request_id, one.prompt, one.params, role=SplitRole.PREFILL),
}


@st.composite
def batches(draw):
    shared, form = draw(PARAMS), draw(st.sampled_from([*FORMS, "any"]))
    found = []
    for number in range(draw(st.integers(0, 12))):
        params = shared if draw(st.booleans()) else draw(PARAMS)
        ids = draw(st.lists(TOKEN, min_size=1, max_size=40))
        kind = draw(st.sampled_from([*FORMS])) if form == "any" else form
        one = Request(draw(st.sampled_from(["r", "ü", "a b"])) + str(number), FORMS[kind](ids), params)
        if draw(st.integers(0, 5)) == 0:
            one = draw(st.sampled_from([*WRONG.values(), *OTHERWISE.values()]))(one)
        found.append(one)
    return found


def comparable(result, kind=RECORD):
    """What is equal however a request was admitted: all but its admission id, which its record has too."""
    if isinstance(result, InvalidValue):
        return str(result)
    row = np.frombuffer(result.request_row, np.int64).copy()
    assert row[ADMISSION_ID] == result.admission_id
    row[ADMISSION_ID] = 0
    (record,) = np.frombuffer(result.packed[REQUEST_ROW.itemsize :], kind).copy()
    assert record["request_serial"] == result.admission_id
    record["request_serial"] = 0
    rows = [bytes(one) for one in result.rows]
    known = result.request_id, result.prompt_len, result.generated, result.total, result.role, result.params
    return known, row.tolist(), record.tobytes(), rows, result.tokens.tolist(), result.row_lengths, result.config_key


def one_by_one(state, requests):
    found = []
    for request in requests:
        try:
            found.append(state.admit(request))
        except InvalidValue as error:
            found.append(error)
    return found


@settings(deadline=None)
@given(batch=batches())
def test_a_batch_is_admitted_as_each_of_it_alone(batch):
    with bind(CpuDevice(0, {})) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_admission, "FEW", 0)
        check_equal_bytes(device, batch)


def check_equal_bytes(device, batch):
    """Admit a batch together and one by one, and insert both; compare results and every byte of the states."""
    states = [device.state(SIZES, name=name) for name in ("one", "all")]
    alone, together = one_by_one(states[0], batch), states[1].admit_all(batch)
    assert [*map(comparable, together)] == [*map(comparable, alone)]
    images = []
    for state, admitted in zip(states, (alone, together), strict=True):
        fit = [one for one in admitted if not isinstance(one, InvalidValue)]
        slots = [*range(len(fit))]
        totals, blocks = [one.total for one in fit], [[0] * -(-one.total // 4) for one in fit]
        tasks = TaskBatch.prefill(slots, fit, totals, blocks)
        device.insert_tasks(state=state, tasks=tasks, stream=device.default_stream).wait()
        span = ByteRange(0, state.layout.nbytes)
        copied = device.device.copy_out(state.memory, [span], device.default_stream)
        copied.wait()
        images.append({name: column.copy() for name, column in state.columns(copied.data[0], span).items()})
    for name in images[0].keys() - {"request_serial"}:
        np.testing.assert_array_equal(images[0][name], images[1][name], err_msg=name)


def plain(count, length=10, form="int32"):
    return [Request(f"r{at}", FORMS[form]([at % 500] * length), SamplingParams(max_tokens=5)) for at in range(count)]


@pytest.mark.parametrize("odd", [*WRONG, *OTHERWISE])
@pytest.mark.parametrize("form", FORMS)
def test_one_of_a_batch_that_is_not_plain_is_as_alone(bound, odd, form, monkeypatch):
    state, batch = bound.state(SIZES), plain(9, form=form)
    batch[4] = (WRONG | OTHERWISE)[odd](batch[4])
    found = state.admit_all(batch)
    assert [*map(comparable, found)] == [*map(comparable, one_by_one(state, batch))]
    assert isinstance(found[4], InvalidValue) == (odd in WRONG)


@pytest.mark.parametrize("vocab_size", [None, 100])
def test_a_limit_of_ids_holds_without_and_with_a_vocabulary(bound, vocab_size):
    sizes = StateConfig(num_slots=2, max_model_len=60)
    state, batch = bound.state(sizes), plain(9, form="int64")
    batch[4].prompt[3] = 2**31 if vocab_size is None else 100
    found = state.admit_all(batch, vocab_size=vocab_size)
    assert [isinstance(one, InvalidValue) for one in found] == [at == 4 for at in range(9)]


def test_ids_of_a_batch_are_in_the_order_of_its_requests(bound):
    found = bound.state(SIZES).admit_all(plain(12))
    assert [one.admission_id - found[0].admission_id for one in found] == [*range(12)]


def test_a_refused_request_leaves_the_others_packed_together(bound, monkeypatch):
    state, batch, parts = bound.state(SIZES), plain(12), []
    monkeypatch.setattr(bound.device, "on_admit_all", lambda state, columns: parts.append(len(columns.requests)))
    batch[3] = WRONG["many bad words"](batch[3])
    found = state.admit_all(batch)
    assert parts == [11]
    assert isinstance(found[3], InvalidValue)
    assert "r3" in str(found[3])


def test_a_large_batch_is_packed_in_parts_that_keep_the_interpreters_lock(bound, monkeypatch):
    monkeypatch.setattr(batch_admission, "MOST_IDS", 50)
    parts = []
    monkeypatch.setattr(bound.device, "on_admit_all", lambda state, columns: parts.append(columns))
    found = bound.state(SIZES).admit_all([*plain(20), Request("long", [1] * 55)])
    assert [len(one.requests) for one in parts] == [5, 5, 5, 5, 1]
    assert [one.request_id for one in found] == [*(f"r{at}" for at in range(20)), "long"]


def test_a_request_that_stays_keeps_no_ids_of_the_others(bound):
    found = bound.state(SIZES).admit_all(plain(12))
    kept = found[5]
    others = [weakref.ref(one) for one in found if one is not kept]
    del found
    gc.collect()
    assert not any(other() for other in others)
    assert len(kept.ids) == 40


def test_declared_fields_and_companions_are_admitted_alone(bound):
    lora = StateField("lora", dtype="int32", value="extra")
    state = bound.state(SIZES, fields=[lora])
    batch = [Request(f"r{at}", [1, 2], extra={"lora": at}) for at in range(9)]
    kind = state.layout.record_dtype
    alone = [comparable(one, kind) for one in one_by_one(state, batch)]
    assert [comparable(one, kind) for one in state.admit_all(batch)] == alone
    both = bound.state(SIZES, name="both", companions=("proposer",))
    assert [*map(comparable, both.admit_all(plain(9)))] == [*map(comparable, one_by_one(both, plain(9)))]


@pytest.mark.parametrize("vocab_size", [0, "many", 2.5, True])
def test_a_wrong_vocabulary_is_refused_as_for_one(bound, vocab_size):
    state = bound.state(SIZES)
    with pytest.raises(InvalidValue, match="vocab_size"):
        state.admit_all(plain(9), vocab_size=vocab_size)
    with pytest.raises(InvalidValue, match="vocab_size"):
        state.admit(plain(1)[0], vocab_size=vocab_size)
