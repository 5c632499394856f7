"""The slot table and its layout: groups are slices, places do not overlap, different tables have different digests."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hal_core.devices.cpu import CpuPlugin
from hal_core.devices.cpu.device import CpuDevice
from hal_core.errors import InvalidValue
from hal_core.memory.views import ByteRange
from hal_core.runtime.bound import bind
from hal_core.slots.fields import GROUPS, HEADER_BYTES, STATE_TABLE, StateConfig
from hal_core.slots.layout import ALIGNMENT, lay_out
from hal_core.slots.state import SlotState
from hal_core.tickets import DONE
from hypothesis import given
from hypothesis import strategies as st

sizes = st.builds(
    StateConfig,
    num_slots=st.integers(1, 9),
    max_model_len=st.integers(1, 70),
    block_size=st.integers(1, 8),
    max_draft_tokens=st.integers(0, 4),
    max_logprobs=st.integers(0, 3),
)


@given(sizes)
def test_places_are_aligned_and_apart_and_groups_are_what_lies_between(chosen):
    layout = lay_out(chosen)
    spans = [(p.offset, p.offset + p.stride * chosen.num_slots) for p in layout.fields.values()]
    spans += [(h.offset, h.end) for h in {*layout.headers.values()}]  # the two slices begin with one header
    spans.sort()
    assert all(begin % ALIGNMENT == 0 for begin, _ in spans)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert spans[-1][1] <= layout.nbytes < spans[-1][1] + ALIGNMENT
    for group in GROUPS:
        part = layout.groups[group]
        inside = {n for n, p in layout.fields.items() if part.offset <= p.offset < part.end}
        assert inside == {n for n, p in layout.fields.items() if group in p.field.groups}


def test_g13_the_broadcast_lists_are_the_contracts_after_a_header():
    layout = lay_out(StateConfig(num_slots=4, max_model_len=8, max_draft_tokens=3))
    named = {g: [n for n, p in layout.fields.items() if g in p.field.groups] for g in GROUPS}
    assert named["broadcast"] == ["sampled_token_ids"]
    verified = ["accept_tokens", "accept_num", "step_idx", "stop_flags"]
    assert named["broadcast_speculative"] == ["sampled_token_ids", *verified]  # such a state runs plain steps too
    for group, header in layout.headers.items():
        assert header.offset == layout.groups[group].offset
        assert header.nbytes == HEADER_BYTES


def test_g14_the_digest_differs_when_the_order_of_fields_differs():
    swapped = list(STATE_TABLE)
    swapped[4], swapped[5] = swapped[5], swapped[4]
    one = StateConfig(num_slots=2, max_model_len=8)
    assert lay_out(one).digest != lay_out(one, swapped).digest


def test_fields_of_a_group_that_lie_apart_are_refused():
    apart = [STATE_TABLE[3], STATE_TABLE[-1], STATE_TABLE[5]]
    with pytest.raises(InvalidValue, match="broadcast_speculative are not adjacent: \\['token_ids'\\]"):
        lay_out(StateConfig(num_slots=2, max_model_len=8), apart)


def test_the_state_takes_what_its_table_adds_up_to():
    """128 slots x 8,192 tokens: alignment and headers cost less than 1 MB, and so does the host's table."""
    chosen = StateConfig(num_slots=128, max_model_len=8192)
    layout = lay_out(chosen)
    wanted = sum(f.dtype.itemsize * chosen.width(f.width) * chosen.num_slots for f in STATE_TABLE)
    assert wanted <= layout.nbytes <= wanted + 64 * len(STATE_TABLE) + 2 * HEADER_BYTES


def test_a_state_may_have_fields_of_more_than_one_write_can_fill():
    class Roomy(CpuDevice):
        """A device with room for any state, which executes no plan."""

        def allocate(self, nbytes):
            return SimpleNamespace(nbytes=nbytes, address=0, device=self)

        def submit(self, plan, stream):
            plans.append(plan)
            return DONE

    plans = []
    sizes = StateConfig(num_slots=512, max_model_len=1 << 20)
    tokens = SlotState(Roomy(0, {}), sizes).layout.fields["token_ids"]
    begins = [write["dst"] for write in plans[0].writes if write["dst"] >= tokens.offset]
    lengths = [int(write["nbytes"]) for write in plans[0].writes if write["dst"] >= tokens.offset]
    assert sum(lengths) == tokens.stride * sizes.num_slots == 1 << 32
    assert begins == [tokens.offset, tokens.offset + lengths[0]]


@pytest.mark.parametrize("name", ["num_slots", "max_model_len", "block_size", "max_eos"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_sizes_refuse_what_is_no_count(name, value):
    with pytest.raises(InvalidValue, match=name):
        StateConfig(**{"num_slots": 1, "max_model_len": 1, name: value})


@given(sizes, st.data())
def test_fields_of_copied_bytes_are_those_of_the_layout(chosen, data):
    """For any part, of a group or across fields, singly and at once; a field that is not wholly in the part is left
    out.
    """
    with bind(CpuPlugin.open(0, {})) as device:
        state = device.state(chosen)
        groups = [*state.layout.groups.values(), ByteRange(0, state.layout.nbytes)]
        part = data.draw(st.sampled_from(groups))
        cut = data.draw(st.integers(0, part.nbytes)) // ALIGNMENT * ALIGNMENT
        part = ByteRange(part.offset, cut) if data.draw(st.booleans()) else part
        copied = np.random.default_rng(1).integers(0, 1, part.nbytes, np.uint8, endpoint=True)
        lazy, eager = state.copied_fields(copied, part), state.columns(copied, part)
        assert list(lazy) == list(eager)
        assert len(lazy) == len(eager)
        for name, place in state.layout.fields.items():
            begin, end = place.offset - part.offset, place.offset + place.stride * chosen.num_slots - part.offset
            if begin < 0 or end > part.nbytes:
                with pytest.raises(KeyError, match=name):
                    lazy[name]
                continue
            kind = place.field.dtype.storage
            rows = (
                copied[begin:end].reshape(chosen.num_slots, place.stride)[:, : place.width * kind.itemsize].view(kind)
            )
            for found in (lazy[name], eager[name]):
                assert found.dtype == kind
                assert np.array_equal(found, rows)
                assert np.shares_memory(found, copied)
