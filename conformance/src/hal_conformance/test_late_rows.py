"""Rows of errors known late and of recovered workers (G19), and the order of a worker's own writes (G23)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from hal_core.errors import TicketTimeout
from hal_core.memory.views import ByteRange
from hal_core.output.records import SlotStatus
from hal_core.slots.fields import FinishReason

from .fixtures import hook_calls
from .fixtures.stream_cases import copied
from .fixtures.world import Outputs, World, assert_rows
from .harness import backdoor
from .harness.asserts import assert_no_error, assert_raises
from .harness.backdoor import PATIENCE, arrive, drain
from .harness.bits import noise
from .harness.guarantees import guarantee
from .harness.sinks import KeepingSink
from .harness.waiters import A_WHILE
from .kit import Kit
from .oracle.output import expected_rows


def sampled(kit: Kit) -> World:
    """A state of three requests whose next step has sampled, and stopped the request of slot 1."""
    fixture = hook_calls.working(kit)
    arrive(hook_calls.submit(fixture))
    fixture.poke_cell("stop_flags", 1, True)
    return fixture


@guarantee(19, also=(21, 24))
def test_g19_late_errors_are_read_when_the_output_is_on_the_host(kit: Kit) -> None:
    fixture, calls = sampled(kit), list[int]()
    message = "logits that are no numbers"

    def late() -> Mapping[int, str]:
        calls.append(1)
        return {1: message}

    step = fixture.advance(range(hook_calls.ENTERED), late_errors=late)
    should, sink = expected_rows(fixture.model, [0, 1, 2], errors={1: message}), KeepingSink()
    with ExitStack() as held:
        if kit.can_hold and kit.capabilities.async_d2h:
            held.enter_context(kit.held(fixture.stream, "save_output of a step with late errors"))
        ticket = fixture.save(step, sink)
        early = len(calls) if kit.can_hold and kit.capabilities.async_d2h else 0
        assert not early, "late_errors was called while the step's output was not on the host"
    (record,) = sink.resolve_all()
    arrive(ticket)
    assert_rows(record, should)
    assert 1 <= len(calls) <= 2, f"late_errors was called {len(calls)} times for one record, at most twice is due"


@guarantee(19, also=(24,))
def test_g19_a_recovered_request_is_reported_once_with_its_message(kit: Kit) -> None:
    fixture = sampled(kit)
    message = "the worker was restarted"
    step = fixture.advance(range(hook_calls.ENTERED), recovered={1: message})
    should = fixture.rows_of(step)
    row = (should[1].status, should[1].finish, should[1].message)
    assert row == (SlotStatus.RECOVERED, FinishReason.ERROR, message), f"the kit's own row is {should[1]}"
    outputs = Outputs()
    outputs.save(fixture, step)
    outputs.deliver()


@guarantee(23, requires=("async_d2h", "can_hold_stream"), also=(1, 22))
def test_g23_a_workers_own_writes_wait_for_copies_of_that_memory(kit: Kit) -> None:
    """``order_after_reads`` delays the stream that is given, for copies of the memory that is given, and no other."""
    device, bound = kit.device, kit.bound
    held, writer, bystander = device.stream(), device.stream(), device.stream()
    memory, other = device.allocate(4096), device.allocate(4096)
    with kit.held(held, "order_after_reads"):
        copy = copied(kit, memory, held)
        bound.order_after_reads(memory=memory, stream=writer)
        bound.order_after_reads(memory=other, stream=bystander)
        why = "synchronize of a stream that is ordered after a pending copy of the memory"
        assert_raises(TicketTimeout, lambda: writer.synchronize(A_WHILE), why)
        why = "synchronize of a stream that is ordered after copies of other memory"
        assert_no_error(lambda: bystander.synchronize(PATIENCE / 4), why)
        device.order_after_reads(bystander)
        why = "synchronize of a stream that is ordered after copies of any memory"
        assert_raises(TicketTimeout, lambda: bystander.synchronize(A_WHILE), why)
    arrive(copy)
    for stream in (writer, bystander):
        drain(stream)


@guarantee(23, requires=("async_d2h", "can_hold_stream"), also=(1, 22))
def test_g23_a_workers_own_writes_wait_for_each_of_several_copies(kit: Kit) -> None:
    """Copies of other parts on other streams: none is the first, the last or the whole of the part that is read."""
    device = kit.device
    memory, should = device.allocate(4096), noise(5, 4096)
    parts = [ByteRange(64, 100), ByteRange(2000, 1), ByteRange(4000, 96)]
    backdoor.write(device, memory, 0, should, device.default_stream)
    for left in range(len(parts)):
        readers, writer = [device.stream() for _ in parts], device.stream()
        latches = [kit.held(reader, "order_after_reads") for reader in readers]
        with latches[0], latches[1], latches[2]:
            copies = [device.copy_out(memory, [part], reader) for part, reader in zip(parts, readers, strict=True)]
            kit.bound.order_after_reads(memory=memory, stream=writer)
            for at, latch in enumerate(latches):
                if at != left:
                    latch.release()
                    arrive(copies[at])
            why = f"synchronize of a stream that is ordered after three copies, of which copy {left} is pending"
            assert_raises(TicketTimeout, lambda: writer.synchronize(A_WHILE), why)  # noqa: B023
        arrive(copies[left])
        drain(writer)
        for part, copy in zip(parts, copies, strict=True):
            assert (copy.data[0] == should[part.offset : part.end]).all(), f"the copy of {part} has other bytes"
