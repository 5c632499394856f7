"""Writes to every kind of target, again and again on one stream, and behind copies on one pair of streams (G1 to G7,
G22, G23)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hal_core.errors import ConversionRefused, TicketTimeout
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, View

from .fixtures.hook_cases import SIZES
from .fixtures.stream_cases import pairs
from .harness import backdoor
from .harness.asserts import assert_raises
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .harness.waiters import SHORT
from .kit import Kit
from .oracle.values import REFUSED, converted

if TYPE_CHECKING:
    from hal_core.memory.copies import CopyTicket
    from hal_core.streams import Stream

COUNT, ROUNDS = SIZES.num_slots, 3
INT64 = dtype_of("int64")


def _state(kit: Kit) -> View:
    return kit.bound.state(SIZES, name="target").view("next_tokens")


def _companion(kit: Kit) -> View:
    state = kit.bound.state(SIZES, name="target", companions=("first", "second"))
    return state.companions[-1].view("next_tokens")


def _bare(kit: Kit) -> View:
    return View.contiguous(kit.device.allocate(512), 128, (COUNT,), INT64)


def _tensor(kit: Kit) -> object:
    if kit.missing(("tensors",)):
        pytest.skip("needs tensors")
    return kit.subject.support.tensor(kit.device, np.zeros(COUNT, np.int64))


TARGETS: dict[str, Callable[[Kit], Any]] = {
    "a state's field": _state,
    "the last companion's field": _companion,
    "bare memory": _bare,
    "a framework's tensor": _tensor,
}
FORMS = ("an array", "a list", "an array of int32", "a scalar", "a value on the device")


def _given(
    kit: Kit, form: str, items: np.ndarray[Any, Any], stream: Stream, kept: dict[str, Any] | None = None
) -> tuple[Any, Callable[[], object]]:
    """Return a value of this form, and what its caller does to it after the call. ``kept``: one object each time."""
    kept = {} if kept is None else kept
    if form == "a scalar":
        items[...] = items.flat[0]
        return items.flat[0].item(), lambda: None
    if form == "a value on the device":
        if form not in kept:
            kept[form] = View.contiguous(kit.device.allocate(items.nbytes), 0, items.shape, INT64)
        memory = kept[form].memory
        backdoor.put(kit.device, memory, [(0, items.tobytes())], stream)
        return kept[form], lambda: backdoor.put(kit.device, memory, [(0, bytes(items.nbytes))], stream)
    if form == "a list":
        listed = kept.setdefault(form, [])
        listed[:] = items.tolist()
        return listed, lambda: listed.__setitem__(slice(None), [0] * len(listed))
    array = kept.setdefault(form, np.empty(items.shape, np.int32 if "int32" in form else np.int64))
    array[...] = items
    return array, lambda: array.fill(0)


def _copied(kit: Kit, view: View, stream: Stream) -> CopyTicket:
    """Start a copy of the target's bytes."""
    low, end = view.bounds()
    return kit.device.copy_out(view.memory, [ByteRange(low, end - low)], stream)


def _values(copy: CopyTicket) -> list[int]:
    return [int(item) for item in np.array(copy.data[0]).view(np.int64)[:COUNT]]


@guarantee(4, also=(1, 2, 3, 5, 7))
@pytest.mark.parametrize("own", [False, True], ids=["default", "own"])
@pytest.mark.parametrize("what", TARGETS)
def test_g04_each_of_many_writes_to_a_target_is_there_in_its_turn(kit: Kit, what: str, own: bool) -> None:
    """Each form of a value three times, one after the other on a held stream, and changed after its call.

    On a stream of its own the value is one object each time."""
    device = kit.device
    stream, target = device.stream() if own else device.default_stream, TARGETS[what](kit)
    view = target if isinstance(target, View) else device.resolve(target)
    written, pending = [], kit.can_hold and kit.capabilities.async_h2d
    kept: dict[str, Any] | None = {} if own else None
    with kit.held(stream if pending else device.stream(), f"writes to {what}"):
        for turn in range(ROUNDS * len(FORMS)):
            form = FORMS[turn % len(FORMS)]
            items = 1000 * (turn + 1) + np.arange(COUNT, dtype=np.int64)
            value, change = _given(kit, form, items, stream, kept)
            ticket = kit.bound.async_set_value(target=target, value=value, stream=stream)
            case = f"write {turn} ({form}) to {what}"
            if pending:
                assert not ticket.done(), f"{case} is done, but its stream is held"
            elif not kit.capabilities.async_h2d:
                assert ticket.done(), f"{case} is not done when the call returns"
            change()
            written.append((case, items.tolist(), ticket, _copied(kit, view, stream)))
    for case, should, ticket, copy in written:
        arrive(ticket, case)
        arrive(copy, case)
        assert (got := _values(copy)) == should, f"after {case} the target was {got}, but should be {should}"


@guarantee(22, requires=("async_h2d", "async_d2h", "can_hold_stream"), also=(1, 4, 23))
@pytest.mark.parametrize("what", TARGETS)
def test_g22_a_write_comes_after_each_copy_on_one_pair_of_streams(kit: Kit, what: str) -> None:
    """A copy on one stream, a write on the other, three times: that the writer has waited once orders no later copy.

    In the profile quick each kind of target on one pair, which is another for the next kind."""
    chosen = pairs(kit)
    if kit.effort.profile == "quick":
        chosen = [chosen[[*TARGETS].index(what) % len(chosen)]]
    for case, reader, writer in chosen:
        target = TARGETS[what](kit)
        view, before = target if isinstance(target, View) else kit.device.resolve(target), [0] * COUNT
        arrive(kit.bound.async_set_value(target=target, value=0, stream=writer))
        for turn in range(ROUNDS):
            why = f"write {turn} to {what} behind a held copy, {case}"
            items = 1000 * (turn + 1) + np.arange(COUNT, dtype=np.int64)
            with kit.held(reader, why):
                copy = _copied(kit, view, reader)
                value, _ = _given(kit, FORMS[turn], items, writer)
                ticket = kit.bound.async_set_value(target=target, value=value, stream=writer)
                assert_raises(TicketTimeout, partial(ticket.wait, SHORT), f"{why}: its ticket")
            for each in (copy, ticket):
                arrive(each, why)
            assert (got := _values(copy)) == before, f"{why}: the copy is {got}, but should be {before}"
            before = items.tolist()


@guarantee(1, requires=("can_hold_stream", "async_d2h"), also=(4,))
def test_g01_a_stream_waits_each_time_for_another(kit: Kit) -> None:
    """Three rounds on one pair of streams: that a stream has waited for another once orders no later work."""
    device = kit.device
    for what, first, second in pairs(kit):
        memory = device.allocate(64)
        for turn in range(ROUNDS):
            with kit.held(first, f"a stream that waits for another, {what}"):
                data = bytes([turn + 1]) * 64
                if kit.capabilities.async_h2d:
                    backdoor.put(device, memory, [(0, data)], first)
                second.wait(device.event(first))
                copy = device.copy_out(memory, [ByteRange(0, 64)], second)
                assert_raises(TicketTimeout, partial(copy.wait, SHORT), f"{what}, round {turn}: a copy that must wait")
            arrive(copy)
            got = copy.data[0].tobytes()
            assert got == data or not kit.capabilities.async_h2d, f"{what}, round {turn}: the copy is of {got[:4]!r}"


PARTS = (np.s_[:3], np.s_[::2], np.s_[:3], np.s_[5:2:-1], np.s_[::-2], np.s_[:2], np.s_[::3])
"""Parts of six elements; several begin at the same one, are of the same shape, and have other strides."""


@guarantee(5, also=(4,))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", TARGETS)
def test_g05_parts_that_begin_at_one_element_are_told_apart(kit: Kit, what: str, form: str) -> None:
    device, stream, target = kit.device, kit.device.default_stream, TARGETS[what](kit)
    view = target if isinstance(target, View) else device.resolve(target)
    arrive(kit.bound.async_set_value(target=view, value=0, stream=stream))
    should = backdoor.read(device, view.memory, stream)
    for turn, part in enumerate(PARTS):
        into = view[part]
        items = (1000 * (turn + 1) + np.arange(into.size, dtype=np.int64)).reshape(into.shape)
        value, _ = _given(kit, form, items, stream)
        arrive(kit.bound.async_set_value(target=into, value=value, stream=stream))
        np.ndarray(into.shape, np.int64, should, into.offset, into.strides)[...] = items
        wrong = np.flatnonzero(backdoor.read(device, view.memory, stream) != should)
        assert not len(wrong), f"{form} for {part} of {what}: {len(wrong)} bytes are wrong, the first is {wrong[0]}"


CLASSES: tuple[object, ...] = (
    True, 7, -1, 2**62, 2.0, 0.5, np.int8(3), np.uint64(2**63), np.float32(1.5), np.bool_(False),
)  # fmt: skip
FIELDS = ("next_tokens", "stop_flags", "top_p", "block_tables")
"""Fields of int64, bool, float32 and int32."""


@guarantee(6, also=(5, 26))
@pytest.mark.parametrize("form", ["a scalar", "an array", "a list"])
@pytest.mark.parametrize("companion", [False, True], ids=["state", "companion"])
def test_g06_a_states_fields_take_what_their_types_take(kit: Kit, companion: bool, form: str) -> None:
    """Values of every class, in turn, for one slot and for every second one: converted or refused as in bare memory."""
    state = kit.bound.state(SIZES, name="target", companions=("first",))
    fields, stream = state.companions[0] if companion else state, kit.device.stream()
    for name in FIELDS:
        full = fields.view(name)
        for at, element in enumerate(CLASSES):
            target = full[1] if at % 2 else full[::2]
            value: Any = element
            if form != "a scalar":
                value = np.full(target.shape, element)
                value = value.tolist() if form == "a list" else value
            plain: Any = element.item() if isinstance(element, np.generic) else element
            found = converted(plain, target.dtype)
            what = f"{form} of {element!r} for {name} ({target.dtype})"
            call = partial(kit.bound.async_set_value, target=target, value=value, stream=stream)
            before = backdoor.read(kit.device, state.memory, stream)
            if found == REFUSED:
                assert_raises(ConversionRefused, call, what)
            else:
                arrive(call(), what)
                image = np.ndarray(target.shape, target.dtype.storage, before, target.offset, target.strides)
                image[...] = np.frombuffer(found, target.dtype.storage)[0]  # type: ignore[arg-type]  # no NaN here
            wrong = np.flatnonzero(backdoor.read(kit.device, state.memory, stream) != before)
            assert not len(wrong), f"{what}: {len(wrong)} bytes are wrong, the first is byte {wrong[0]} of the state"
