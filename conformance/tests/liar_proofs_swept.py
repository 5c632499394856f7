"""Proofs that the liars on paths by form lie."""

from threading import Thread

import numpy as np
from hal_core.errors import ConversionRefused, TicketTimeout
from hal_core.memory.views import ByteRange
from liar_proofs import A_WHILE, PATIENCE, cpu, flat, lies, poisoned, proof, queued, raises, state_of, write


@proof("WaitsBehindMany", queued)
def returns_behind_many(bound):
    """Whether the 200th call returns while its stream is held."""
    memory = poisoned(bound, 8)
    calls = Thread(target=lambda: [write(bound, flat(memory, 0, 1), 1) for _ in range(200)])
    with bound.device.hold_stream(bound.default_stream):
        calls.start()
        calls.join(PATIENCE if not lies(bound) else A_WHILE)
        returned = not calls.is_alive()
    calls.join(PATIENCE)
    return returned


@proof("LateElementsWrap", cpu)
def late_element_refused(bound):
    """Whether the last of 5,000 elements is refused."""
    memory, value = poisoned(bound, 5000), np.zeros(5000, np.int64)
    value[-1] = 256
    return raises(ConversionRefused, lambda: write(bound, flat(memory, 0, 5000), value))


@proof("CopiesOverReads", queued)
def copied_after_the_read(bound):
    """Whether a copy between views waits for a copy out of its target."""
    stream, memory = bound.device.stream(), poisoned(bound, 16)
    with bound.device.hold_stream(stream):
        bound.device.copy_out(memory, [ByteRange(0, 16)], stream)
        ticket = write(bound, flat(memory, 0, 8), flat(memory, 8, 8))
        return raises(TicketTimeout, lambda: ticket.wait(A_WHILE))


@proof("LastRangeEndsThem", queued)
def written_after_an_empty_range(bound):
    """Whether a write waits for a copy whose last range is empty, and before the others."""
    stream, memory = bound.device.stream(), poisoned(bound, 256)
    with bound.device.hold_stream(stream):
        bound.device.copy_out(memory, [ByteRange(128, 8), ByteRange(0, 0)], stream)
        ticket = write(bound, flat(memory, 128, 8), 1)
        return raises(TicketTimeout, lambda: ticket.wait(A_WHILE))


@proof("CloseLeavesCopies", queued)
def closed_after_a_copy(bound):
    """Whether close() waits for a copy out of another stream's work."""
    stream, memory, closing = bound.device.stream(), poisoned(bound, 16), Thread(target=bound.close)
    with bound.device.hold_stream(stream):
        copy = bound.device.copy_out(memory, [ByteRange(0, 16)], stream)
        closing.start()
        closing.join(A_WHILE)
        waits = closing.is_alive()
    closing.join(PATIENCE)
    copy.wait(PATIENCE)  # of a liar: until here its work uses this memory
    return waits and copy.failure() is None


@proof("OldReadersAreForgotten", queued)
def first_reader_waited_for(bound):
    """Whether a value waits for the first of a hundred readers."""
    state, held = state_of(bound, 1), [bound.device.stream() for _ in range(2)]
    with bound.device.hold_stream(held[0]):
        with bound.device.hold_stream(held[1]):
            state.add_reader(None, held[0].record())
            for _ in range(100):
                state.add_reader(None, held[1].record())
            ticket = write(bound, state.view("seed"), 1, bound.device.stream())
        return raises(TicketTimeout, lambda: ticket.wait(A_WHILE))
