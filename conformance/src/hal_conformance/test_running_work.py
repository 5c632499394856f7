"""Work that runs, and much of it pending (G1, G3, G4)."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hal_core.devices.primitives import poll
from hal_core.errors import TicketTimeout
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, View

from .fixtures import hook_calls
from .fixtures.hook_cases import HOOK_CASES
from .fixtures.prepared_calls import assert_copied
from .fixtures.ring_cases import NEEDS, impatient, in_its_time, refusal
from .fixtures.sizes import sizes
from .fixtures.stream_cases import copied
from .harness import backdoor
from .harness.asserts import assert_raises
from .harness.backdoor import PATIENCE, arrive
from .harness.bits import noise
from .harness.guarantees import guarantee
from .harness.lies import lay_below
from .harness.waiters import SHORT, come_true, times_out_at_once
from .kit import Kit
from .test_tickets import STREAMS, prepared, stream_of

if TYPE_CHECKING:
    from hal_core.memory.copies import CopyTicket
    from hal_core.memory.views import Memory
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket

    from .fixtures.world import World


BYTES, ROUNDS = 32 << 20, 5
"""Bytes of a copy that runs for milliseconds, longer than the host takes from its end to a look at its last bytes."""
GATED = ("a scalar", "an array", "strided", "on the device", "insert", "leave", "submit", "copy_out")


@guarantee(1)
@pytest.mark.parametrize("way", ["query", "wait"])
def test_g01_a_copy_that_is_running_is_not_done(kit: Kit, way: str) -> None:
    """No latch shows this: work behind a held stream has not begun. The last bytes of a long copy are there last."""
    device, stream = kit.device, kit.device.default_stream
    memory = device.allocate(BYTES)
    view = View.contiguous(memory, 0, (BYTES // 8,), dtype_of("int64"))
    for turn in range(1, ROUNDS + 1):
        arrive(kit.bound.async_set_value(target=view, value=turn, stream=stream))
        copy = copied(kit, memory, stream)
        if way == "wait":
            arrive(copy)
        else:
            assert poll(copy.done, PATIENCE), f"a copy of {BYTES} bytes is not done after {PATIENCE} s"
        last = copy.data[0][BYTES - 8 : BYTES].tobytes()  # before anything else: the rest comes while the host looks
        assert last == turn.to_bytes(8, "little"), f"a copy is done by its {way}, but its last bytes are {last.hex()}"
        wrong = int((copy.data[0][:BYTES].view(np.int64) != turn).sum())
        assert not wrong, f"a copy is done by its {way}, but {wrong} of its elements are not there"


@guarantee(1, requires=("async_h2d", "async_d2h"), also=(3,))
@pytest.mark.parametrize("way", ["query", "wait"])
def test_g01_an_upload_that_is_running_is_not_done(kit: Kit, way: str) -> None:
    """Megabytes on a stream that runs: once they are said to be there, a stream that waits for nothing copies their
    last bytes."""
    device = kit.device
    stream, other = device.stream(), device.stream()
    for nbytes in sizes(kit, "bytes of an upload under way"):
        view = View.contiguous(device.allocate(nbytes), 0, (nbytes // 8,), dtype_of("int64"))
        for turn in range(1, ROUNDS + 1):
            value = np.full(nbytes // 8, turn)
            ticket = kit.bound.async_set_value(target=view, value=value, stream=stream)
            if way == "wait":
                arrive(ticket)
            else:
                assert poll(ticket.done, PATIENCE), f"an upload of {nbytes} bytes is not done after {PATIENCE} s"
            copy = device.copy_out(view.memory, [ByteRange(nbytes - 8, 8)], other)
            assert_copied(copy, value[-1:].view(np.uint8), f"an upload of {nbytes} bytes is done by its {way}; the end")


class Gated(ABC):  # noqa: B024 (an ABC for its layout, as Lie)
    """A mixin over primitives: the work of the ``chosen`` one waits for the event ``gate``, while there is one."""

    gate: Any = None
    chosen = ""
    met = 0

    def copy_in(self, target: int, source: int, nbytes: int, stream: Any) -> None:  # noqa: ANN401 (the runtime's)
        """Copy once the gate is open."""
        self.pause("copy_in", stream)
        super().copy_in(target, source, nbytes, stream)  # type: ignore[misc]

    def launch(self, launch: Any, block: int, stream: Any) -> None:  # noqa: ANN401 (the runtime's)
        """Launch once the gate is open."""
        self.pause("launch", stream)
        super().launch(launch, block, stream)  # type: ignore[misc]

    def copy_out(self, target: int, source: int, nbytes: int, stream: Any) -> None:  # noqa: ANN401 (the runtime's)
        """Copy once the gate is open."""
        self.pause("copy_out", stream)
        super().copy_out(target, source, nbytes, stream)  # type: ignore[misc]

    def pause(self, name: str, stream: Any) -> None:  # noqa: ANN401 (the runtime's)
        """Let the stream wait for the gate."""
        if name == self.chosen and self.gate is not None:
            self.met += 1
            self.stream_wait(stream, self.gate.raw)  # type: ignore[attr-defined]


VAST = 1 << 17
"""Elements of a large target."""


def gated_calls(fixture: World) -> dict[str, Callable[[], Ticket]]:
    """Return the calls of which one part is made to wait."""
    block, stream = fixture.device.allocate(9 * VAST), fixture.stream
    vast = View.contiguous(block, 0, (VAST,), dtype_of("int64"))

    def set_to(target: View, value: object) -> Callable[[], Ticket]:
        return lambda: fixture.bound.async_set_value(target=target, value=value, stream=stream)

    calls: dict[str, Callable[[], Ticket]] = {
        what: partial(hook_calls.CALLS[what], fixture) for what in GATED if what != "copy_out"
    }
    calls |= {
        "a large fill with 0": set_to(vast, 0),
        "a large fill": set_to(vast, 258),
        "a large fill of every second element": set_to(vast[::2], 3),
        "a large array": set_to(vast, np.arange(VAST)),
        "a large value on the device": set_to(vast[: VAST // 2], vast[VAST // 2 :]),
        "a value on the device that overlaps its target": set_to(vast[1:], vast[:-1]),
    }
    return calls


@guarantee(4, requires=("async_h2d", "async_d2h", "can_hold_stream", "primitives"), also=(1, 22))
@pytest.mark.parametrize("part", ["copy_in", "launch"])
def test_g04_later_work_waits_for_each_part_of_a_call(kit: Kit, part: str) -> None:
    """A part that runs beside the stream, as one of another engine, must be waited for by the stream's later work."""
    one = Kit(kit.subject, kit.effort)
    fixture, device = hook_calls.working(one), one.device
    fixture.stream = device.stream()
    lay_below(device, Gated)
    primitives: Any = device.primitives  # type: ignore[attr-defined]  # what `requires` asks for
    memory, held, made = device.allocate(64), device.stream(), gated_calls(fixture)
    backdoor.write(device, memory, 0, np.zeros(64, np.uint8), fixture.stream)
    for what, act in made.items():
        met, why = primitives.met, f"{what}, whose {part} waits for another stream"
        with one.held(held, why):
            primitives.chosen, primitives.gate = part, device.event(held)
            ticket = act()
            primitives.gate, gate = None, primitives.gate
            later = backdoor.put(device, memory, [(0, bytes(64))], fixture.stream)
            if primitives.met > met:
                assert_raises(TicketTimeout, partial(later.wait, SHORT), f"{why}: a later write of its stream")
                assert not ticket.done(), f"{why}: its ticket is done"
        for each in (ticket, later):
            arrive(each, what)
        del gate
    fixture.check(f"calls whose {part} began late")
    one.renew()
    if not primitives.met:
        pytest.skip(f"its compound primitives do not call {part}()")


@guarantee(1, requires=("async_h2d", "async_d2h", "can_hold_stream", "primitives"), also=(2, 3, 22))
@pytest.mark.parametrize("part", ["copy_in", "launch", "copy_out"])
def test_g01_a_ticket_waits_for_each_part_of_its_work(kit: Kit, part: str) -> None:
    """A latch between the parts of one call: its event comes after the last of them, not after the upload, say."""
    one = Kit(kit.subject, kit.effort)
    fixture, device = hook_calls.working(one), one.device
    lay_below(device, Gated)
    primitives: Any = device.primitives  # type: ignore[attr-defined]  # what `requires` asks for
    primitives.chosen, held = part, device.stream()
    for what in GATED:
        met = primitives.met
        with one.held(held, f"{what}, whose {part} waits for another stream"):
            primitives.gate = device.event(held)
            ticket = hook_calls.CALLS[what](fixture)
            primitives.gate, gate = None, primitives.gate
            if primitives.met > met:
                times_out_at_once(f"{what}, whose {part} has not begun", ticket)
        arrive(ticket, what)
        del gate
        fixture.check(f"{what}, whose {part} began late")
    one.renew()
    if not primitives.met:
        pytest.skip(f"its compound primitives do not call {part}()")


@guarantee(3, requires=("async_h2d", "async_d2h", "can_hold_stream"), also=(1,))
@pytest.mark.parametrize("which", STREAMS)
def test_g03_work_that_no_thread_waits_for_is_executed(kit: Kit, which: str) -> None:
    """The host only asks. A runtime that keeps commands until a wait (OpenCL before clFlush) must submit them."""
    acts = [(what, act) for what, act in prepared(kit, tuple(HOOK_CASES)) if not what.startswith("save_output")]
    device, stream, other = kit.device, stream_of(kit, which), kit.device.stream()
    memory, should = device.allocate(4096), noise(7, 4096)
    for what, act in acts:
        come_true({f"{what}, on {which}, for which no thread waits": act(stream)}, kit.effort.hang)
    write = backdoor.put(device, memory, [(0, should.tobytes())], stream)
    event = device.event(stream)
    other.wait(event)
    copy = copied(kit, memory, other)
    come_true({"a copy on a stream that waits for another one's event": copy}, kit.effort.hang)
    assert poll(event.done, kit.effort.hang), f"an event on {which} has not passed, though no work is before it"
    come_true({f"the write before the event on {which}": write}, kit.effort.hang)
    assert (copy.data[0][:4096] == should).all(), "a copy behind an event has other bytes than were written before it"


MANY = 300
"""Calls that fit into any launch queue; a call may wait for its stream while the queue is full (G3)."""
HELD = ("async_h2d", "async_d2h", "can_hold_stream")


def values(form: str, turn: int, view: View) -> tuple[View, Any, np.ndarray[Any, Any]]:
    """Return a target, a value and the elements of call ``turn`` over a row of 16 elements."""
    if form == "scalars":
        return view[turn % 16 : turn % 16 + 1], turn, np.array([turn])
    if form == "strided arrays":
        return view[::2], np.arange(turn, turn + 8), np.arange(turn, turn + 8)
    return view[:15], np.arange(turn, turn + 15), np.arange(turn, turn + 15)


@guarantee(3, requires=HELD, also=(1, 2, 4))
@pytest.mark.parametrize("form", ["scalars", "arrays", "strided arrays", "mixed"])
@pytest.mark.parametrize("default", [True, False], ids=["default", "own"])
def test_g03_hundreds_of_calls_are_pending_and_each_is_right(kit: Kit, form: str, default: bool) -> None:
    """To one place, each with a copy out of its bytes after it; tickets are waited for from the last to the
    first."""
    device = kit.device
    stream = device.default_stream if default else device.stream()
    memory, now = device.allocate(128), np.zeros(16, np.int64)
    backdoor.write(device, memory, 0, now.view(np.uint8), stream)
    view, tickets, copies, should = View.contiguous(memory, 0, (16,), dtype_of("int64")), [], [], []
    forms = ["scalars", "arrays", "strided arrays"] if form == "mixed" else [form]
    with kit.held(stream, f"{MANY} {form}"):
        for turn in range(1, MANY + 1):
            target, value, cells = values(forms[turn % len(forms)], turn, view)
            tickets.append(kit.bound.async_set_value(target=target, value=value, stream=stream))
            place = np.ndarray(target.shape, np.int64, now.data, target.offset, target.strides)
            place[...] = cells
            if turn % 10 == 0:
                copies.append(device.copy_out(memory, [ByteRange(0, 128)], stream))
                should.append(now.copy())
        done = sum(ticket.done() for ticket in tickets)
        assert not done, f"{done} of {MANY} {form} are done, but their stream is held"
    for ticket in reversed(tickets):
        arrive(ticket)
    compare(copies, should, form)


@guarantee(3, requires=NEEDS, also=(1, 4, 22, 26))
@pytest.mark.parametrize("default", [True, False], ids=["default", "own"])
def test_g03_a_full_queue_refuses_after_its_deadline_and_queues_nothing(kit: Kit, default: bool) -> None:
    """Each call into a held stream is pending, or refused in its time and without effect; then all of it is done, as is
    what a second held stream had to do behind them."""
    one, many = kit.another(), max(sizes(kit, "calls until a stream's queue is full"))
    device = one.device
    stream = device.default_stream if default else device.stream()
    memory, should = device.allocate(8 * many), np.zeros(many, np.int64)
    backdoor.write(device, memory, 0, should.view(np.uint8), stream)
    view, tickets, refused = View.contiguous(memory, 0, (many,), dtype_of("int64")), list["Ticket"](), 0
    second, copies = device.stream(), list["CopyTicket"]()
    elsewhere, other = device.allocate(64), device.allocate(64)
    backdoor.write(device, elsewhere, 0, np.zeros(64, np.uint8), stream)
    with one.held(stream, f"{many} calls"), one.held(second, "a call of a second stream"), impatient(one):
        for turn in range(many):
            began, call = monotonic(), "copy_out"
            try:
                copies.append(one.bound.copy_out(memory=elsewhere, parts=[ByteRange(8, 8)], stream=stream))
                call = "async_set_value"
                tickets.append(one.bound.async_set_value(target=view[turn], value=turn + 1, stream=stream))
                should[turn] = turn + 1
            except Exception as error:  # noqa: BLE001 (whatever it is, it must be the contract's)
                in_its_time(one, began, call)
                refusal(one, error, call)
                refused += 1
                if refused == 2:
                    break
        done = sum(ticket.done() for ticket in (*copies, *tickets))
        assert not done, f"{done} of {len(tickets)} calls are done, but their stream is held"
        if not refused:
            copies.append(behind(one, other, second))
            assert not copies[-1].done(), "a copy on a second held stream is done, behind those of the first"
    for ticket in (*reversed(tickets), *copies):
        arrive(ticket)
    early = [at for at, copy in enumerate(copies) if copy.data[0][0] != (9 if copy.data[0].nbytes > 8 else 0)]
    assert not early, f"of {len(copies)} copies on held streams, {early[:9]} are not of the bytes of their moment"
    got = backdoor.read(device, memory, stream)[: should.nbytes].view(np.int64)
    wrong = np.flatnonzero(got != should).tolist()
    assert not wrong, f"of {len(tickets)} calls taken by a held stream and {refused} refused, {wrong[:9]} are wrong"
    arrive(one.bound.async_set_value(target=view, value=3, stream=stream))
    one.renew()


def behind(kit: Kit, memory: Memory, stream: Stream) -> CopyTicket:
    """Write nines, and copy them out."""
    backdoor.put(kit.device, memory, [(0, bytes([9]) * 64)], stream)
    return copied(kit, memory, stream)


def compare(copies: list[CopyTicket], should: list[np.ndarray[Any, Any]], form: str) -> None:
    """Compare each copy with the bytes at its call."""
    __tracebackhide__ = True
    for at, (copy, cells) in enumerate(zip(copies, should, strict=True)):
        assert_copied(copy, cells.view(np.uint8), f"the copy after {10 * (at + 1)} of {MANY} {form} on a held stream")


@guarantee(1, requires=HELD, also=(2, 26))
def test_g01_an_event_outlives_its_stream(kit: Kit) -> None:
    """It belongs to work that is pending when the stream is dropped; other streams wait for it, one of them twice."""
    device, held, memory = kit.device, kit.device.stream(), kit.device.allocate(64)
    waiting, dropped = [device.stream(), device.stream()], device.stream()
    further = [device.stream() for _ in range(16)]
    backdoor.write(device, memory, 0, np.zeros(64, np.uint8), held)
    with kit.held(held, "an event of a stream that was dropped"):
        dropped.wait(device.event(held))
        write = backdoor.put(device, memory, [(0, bytes([7]) * 64)], dropped)
        event = device.event(dropped)
        del dropped
        device.allocate(1)  # a device looks for free memory when it allocates
        others = [device.event(stream) for stream in further]
        copies = []
        for stream in waiting:
            stream.wait(event)
            stream.wait(others[0])
            stream.wait(event)
            copies.append(device.copy_out(memory, [ByteRange(0, 64)], stream))
        assert not event.wait(0.02), "an event has passed, but its stream waits for a held one"
        done = [copy.done() for copy in copies]
        assert not any(done), f"copies behind an event of a dropped stream have done={done}"
    for ticket in (write, *copies):
        arrive(ticket)
    assert event.wait(backdoor.PATIENCE), "the event of a dropped stream has not passed, though its work is done"
    for copy in copies:
        assert (copy.data[0] == 7).all(), "a copy behind an event of a dropped stream came before its work"
