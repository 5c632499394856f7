"""Comparisons between ranks: the terms when a state opens, and the header of each broadcast, on any device."""

from dataclasses import replace

import numpy as np
import pytest
from hal_core.devices.cpu.device import CpuDevice
from hal_core.errors import GroupLost, StateUnusable
from hal_core.group import Group
from hal_core.memory.copies import HostCopy
from hal_core.ranks import channel
from hal_core.ranks.channel import CheckedTicket
from hal_core.ranks.shared_config import BLOCK_BYTES, SharedConfig, differences
from hal_core.runtime.bound import bind
from hal_core.slots.declared import StateField
from hal_core.slots.fields import StateConfig
from hal_core.tickets import DONE, PromiseTicket
from hypothesis import given
from hypothesis import strategies as st

PAIR = Group((0, 1), 0)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=8), st.text(max_size=400), min_size=1, max_size=10))
def test_g14_blocks_have_one_size_and_differ_exactly_where_terms_do(items):
    ours = SharedConfig.of(items)
    assert len(ours.block()) == BLOCK_BYTES
    assert differences({0: ours.block(), 3: SharedConfig.of(items).block()}) == []
    label = next(iter(items))
    other = SharedConfig.of(items | {label: items[label] + "!"})
    assert ours.digest() != other.digest()
    (found,) = differences({0: ours.block(), 3: other.block()})
    assert found.startswith(f"{label}: rank 0 has ")


SIZES = StateConfig(num_slots=4, max_model_len=16)


def terms(sizes=SIZES, name="target", ranks=(0, 1), version=None, kept=False):
    """Return what a rank of a group has to agree about."""
    with pytest.MonkeyPatch.context() as patch, bind(CpuDevice(0, {})) as device:
        if version:
            patch.setattr(channel, "core_version", lambda: version)
        state = device.state(sizes, name=name, fields=[StateField("own", "float32", kept=kept)])
        return channel.shared_config_of(state, Group(ranks, 0)).block()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sizes": replace(SIZES, num_slots=5)}, "sizes: rank 0 has 'num_slots=4"),
        ({"sizes": replace(SIZES, max_model_len=4096)}, "max_model_len=4096"),
        (
            {"sizes": replace(SIZES, max_draft_tokens=2)},
            "rank 0 has 'sampled_token_ids', rank 1 'sampled_token_ids accept_tokens",
        ),
        ({"name": "mtp"}, "state: rank 0 has 'target', rank 1 'mtp'"),
        ({"ranks": (1, 0)}, "source: rank 0 has 'rank 0', rank 1 'rank 1'"),
        ({"version": "9.9"}, "contract: rank 0 has 'paddle-hal-core"),
        ({"kept": True}, "layout: rank 0 has "),
    ],
)
def test_g14_a_difference_is_named(change, named):
    """That no rank goes on with one is for the kit, whose ranks differ in each of these, and in the slot table."""
    assert named in "; ".join(differences({0: terms(), 1: terms(**change)}))


class Alone(CpuDevice):
    """A device that is its own group; ``broadcast`` applies ``after`` to the slice."""

    after = staticmethod(lambda memory, part: None)
    ticket = DONE

    def __init__(self):
        super().__init__(0, {})

    def communicator(self, group):
        return self

    def exchange(self, block):
        return {0: block, 1: block}

    def broadcast(self, memory, part, stream):
        self.after(memory, part)
        return self.ticket


def test_g14_the_header_is_checked_once_an_async_collective_ends():
    device = bind(Alone())
    device.device.ticket = pending = PromiseTicket("async")
    state, stream = device.state(StateConfig(num_slots=2, max_model_len=8)), device.default_stream
    ticket = device.broadcast_tokens(state=state, group=PAIR, stream=stream)
    assert not ticket.done()
    assert ticket.failure() is None
    assert ticket.mode == "async"
    pending.complete()
    assert ticket.done()
    ticket.wait(0)
    wrong = CheckedTicket(state.channels[PAIR.ranks], pending, HostCopy([np.zeros(64, np.uint8)]), bytes(range(64)))
    with pytest.raises(StateUnusable, match="begins with a header of zeros"):
        wrong.wait(0)


def test_g14_a_collective_that_failed_says_so_and_leaves_the_state_alone():
    device = bind(Alone())
    device.device.ticket = pending = PromiseTicket("async")
    state, stream = device.state(StateConfig(num_slots=2, max_model_len=8)), device.default_stream
    ticket = device.broadcast_tokens(state=state, group=PAIR, stream=stream)
    pending.complete(GroupLost("gone"))
    with pytest.raises(GroupLost, match="gone"):
        ticket.wait(0)
    state.check_usable()
