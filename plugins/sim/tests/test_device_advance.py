"""The kernel of ``update_inputs`` against the reference in NumPy, on any contents that the contract allows."""

from __future__ import annotations

import numpy as np
import pytest
from hal_core.runtime.bound import bind
from hal_core.slots import update as reference
from hal_core.slots.fields import StateConfig
from hal_core.slots.state import SlotState
from hal_core.slots.step import Step
from hal_sim import Mode, SimPlugin, options
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import share

NAMES = reference.STEP_FIELDS


@pytest.fixture(scope="module", params=["worker", "lazy"])
def device(request):
    with options(mode=Mode.WORKER, staged=0), bind(SimPlugin.open(0, {"mode": request.param})) as bound:
        yield bound
        bound.device.accelerator.synchronize()
        races = [str(race) for race in bound.device.races()]
        bound.device.accelerator.reset()
        assert races == []


@st.composite
def sizes(draw):
    small = st.integers(1, 4)
    return StateConfig(
        num_slots=draw(small),
        max_model_len=draw(st.integers(8, 12)),
        max_draft_tokens=draw(st.integers(0, 3)),
        max_eos=draw(small),
        max_stop_sequences=draw(small),
        max_stop_length=draw(small),
    )


@st.composite
def slots(draw, size):
    """The fields of one slot: a request anywhere between its first chunk and its end, tokens of three kinds."""
    token, small = st.integers(0, 2), st.integers(0, 4)
    prompt = draw(st.integers(1, 4))
    done = draw(st.integers(0, size.max_model_len - prompt - size.max_accept))
    encoder = draw(st.sampled_from([0, 0, 1, 2, prompt]))
    lengths = [draw(st.integers(0, size.max_stop_length)) for _ in range(size.max_stop_sequences)]
    accept = st.one_of(st.integers(0, size.max_accept), st.sampled_from([-1, size.max_accept + 1, -(2**31), 2**31 - 1]))
    row = {
        "prompt_lens": prompt,
        "step_idx": done,
        "stop_flags": draw(st.sampled_from([False, False, False, True])),
        "stop_reason": draw(small),
        "seq_lens_this_time": draw(st.sampled_from([0, 1, 1, 2])),
        "seq_lens_encoder": encoder,
        "seq_lens_decoder": draw(st.integers(0, prompt + done)),
        "draft_num": draw(small),
        "next_tokens": draw(token),
        "sampled_token_ids": draw(token),
        "accept_num": draw(accept),
        "min_dec_len": draw(small),
        "max_dec_len": draw(st.integers(1, 6)),
        "split_role": draw(st.sampled_from([0, 0, 1, 2])),
        "eos_num": draw(st.integers(0, size.max_eos)),
        "stop_seqs_num": draw(st.integers(0, size.max_stop_sequences)),
        "stop_seqs_len": lengths,
    }
    widths = {
        "accept_tokens": size.max_accept,
        "eos_token_ids": size.max_eos,
        "stop_seqs": size.max_stop_sequences * size.max_stop_length,
        "token_ids": size.max_model_len,
    }
    return row | {name: draw(st.lists(token, min_size=n, max_size=n)) for name, n in widths.items()}


@settings(
    max_examples=share.of(120), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(st.data())
def test_the_kernel_does_what_the_reference_does(device, data):
    size = data.draw(sizes())
    rows = [data.draw(slots(size)) for _ in range(size.num_slots)]
    speculative = data.draw(st.booleans()) if size.max_draft_tokens else False
    state = SlotState(device.device, size)
    stream, accelerator = device.default_stream, device.device.accelerator
    stream.synchronize()
    fields = {}
    for name in NAMES:
        place = state.layout.fields[name]
        column = [np.atleast_1d(row[name]) for row in rows]
        fields[name] = np.array(column, place.field.dtype.storage).reshape(size.num_slots, place.width)
        accelerator.poke(state.memory.address + place.offset, fields[name].tobytes())
    before = accelerator.peek(state.memory.address, state.layout.nbytes)
    step = Step(0, {state.name: np.arange(size.num_slots)}, speculative=speculative)
    device.update_inputs(state=state, step=step, stream=stream).wait()
    reference.update_inputs(fields, size, speculative=speculative)
    got = accelerator.peek(state.memory.address, state.layout.nbytes)
    should = bytearray(before)
    for name in NAMES:
        place = state.layout.fields[name]
        should[place.offset : place.offset + fields[name].nbytes] = fields[name].tobytes()
        at = slice(place.offset, place.offset + fields[name].nbytes)
        found = np.frombuffer(got[at], place.field.dtype.storage).reshape(fields[name].shape)
        assert (found == fields[name]).all(), f"{name} is {found.tolist()}, the reference has {fields[name].tolist()}"
    assert got == bytes(should), "advance changed another field"


def test_advance_is_asynchronous_and_no_write(device):
    state = device.state(StateConfig(num_slots=2, max_model_len=8))
    stream = device.default_stream
    before = device.counters()
    with device.device.hold_stream(stream):
        ticket = device.update_inputs(state=state, step=Step(0, {state.name: np.array([0])}), stream=stream)
        assert not ticket.done()
    ticket.wait()
    spent = device.counters() - before
    assert (spent.submissions, spent.copies_out, spent.host_waits) == (0, 0, 0)
