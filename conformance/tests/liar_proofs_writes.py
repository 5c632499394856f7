"""Proofs that liars about sizes, values and the order of writes lie."""

import numpy as np
from hal_conformance.liars import faults
from hal_core.devices.base import plan_value
from hal_core.devices.primitives import poll
from hal_core.errors import TicketTimeout
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from liar_proofs import (
    A_WHILE,
    PATIENCE,
    POISON,
    admission_ids,
    column,
    copied,
    cpu,
    ends,
    flat,
    insert,
    lies,
    poisoned,
    prefill,
    proof,
    queued,
    raises,
    raw,
    state_of,
    write,
)

# -- sizes ----------------------------------------------------------------------------------------------------------


@proof("SlotsInEightBits", cpu)
def _(bound):
    state = state_of(bound, 300)
    tasks = [prefill(state, 299)]
    insert(bound, state, tasks)
    return admission_ids(state, tasks)


@proof("SlotsInSixteenBits", cpu)
def _(bound):
    state = state_of(bound, 33000, 4)
    tasks = [prefill(state, 5), prefill(state, 32800)]
    insert(bound, state, tasks)
    return admission_ids(state, tasks)


@proof("SixtyFourAtOnce", cpu)
def _(bound):
    state = state_of(bound, 65)
    tasks = [prefill(state, slot) for slot in range(65)]
    insert(bound, state, tasks)
    return admission_ids(state, tasks)


@proof("RowsInSixteenBits", cpu)
def _(bound):
    state, prompt = state_of(bound, 1, 9000), np.arange(8500)
    insert(bound, state, [prefill(state, 0, prompt)])
    return (column(state, "token_ids")[0, :8500] == prompt).all()


@proof("LateAdmissionsMixedUp", cpu)
def _(bound):
    state = state_of(bound, 2)
    tasks = [prefill(state, 0, temperature=number / 4) for number in range(257)]
    insert(bound, state, tasks[:1])
    return column(state, "temperature")[0, 0] == 0.0


@proof("TailOfTheLastBlock", cpu)
def _(bound):
    memory = poisoned(bound, 80000)
    write(bound, flat(memory, 0, 70000), np.ones(70000, np.uint8))
    return (raw(memory)[70000:] == POISON).all()


@proof("FourAxesAtMost", cpu, (200, 60, 20, 6, 2), 400)
@proof("StridesInSixteenBits", cpu, (70000,), 70001)
def strided_right(bound, strides, nbytes):
    """Write 1, 2, 3, … to two elements an axis, and compare every byte."""
    memory, shape = poisoned(bound, nbytes), (2,) * len(strides)
    should = raw(memory).copy()
    data = np.arange(1, 1 + 2 ** len(strides), dtype=np.uint8).reshape(shape)
    np.lib.stride_tricks.as_strided(should, shape, strides)[...] = data
    write(bound, View(memory, 0, shape, strides, dtype_of("uint8")), data)
    return (raw(memory) == should).all()


FAR = 2**32 + 64


@proof("OffsetsInThirtyTwoBits", cpu)
def _(bound):
    memory = bound.device.allocate(FAR + 64)  # untouched pages take no memory
    raw(memory)[64] = raw(memory)[FAR] = POISON
    write(bound, flat(memory, FAR, 1), 7)
    return raw(memory)[64] == POISON and raw(memory)[FAR] == 7


@proof("CopyOffsetsInThirtyTwoBits", cpu)
def _(bound):
    memory = bound.device.allocate(FAR + 64)
    raw(memory)[64], raw(memory)[FAR] = POISON, 7
    return copied(bound, memory, [(FAR, 1)]).data[0][0] == 7


@proof("SubmitsBySixtyFour", queued)
def _(bound):
    state = state_of(bound, 65)
    tasks, before = [prefill(state, slot) for slot in range(65)], bound.counters()
    insert(bound, state, tasks)
    return admission_ids(state, tasks) and (bound.counters() - before).submissions <= 2


@proof("CountsNothing", queued)
def _(bound):
    state = state_of(bound, 1)
    insert(bound, state, [prefill(state, 0)])
    return bound.counters().submissions > 0


@proof("LargeByReference", cpu)
def _(bound):
    memory, value = poisoned(bound, 1 << 20), np.ones(1 << 20, np.uint8)
    write(bound, flat(memory, 0, 1 << 20), value)
    value[...] = 2
    return (copied(bound, memory, [(0, 1 << 20)]).data[0] == 1).all()


@proof("LargeValuesWait", queued)
def _(bound):
    memory, value = poisoned(bound, 1 << 20), np.ones(1 << 20, np.uint8)
    with bound.device.hold_stream(bound.default_stream):
        return ends(lambda: write(bound, flat(memory, 0, 1 << 20), value), A_WHILE if lies(bound) else PATIENCE)


# -- values ---------------------------------------------------------------------------------------------------------


@proof("CanonicalNaNs", cpu, np.uint32(0xFF812345).view(np.float32), "float32")
@proof("FlushesDenormals", cpu, np.float64(5e-324), "float64")
@proof("InfinitiesClamped", cpu, np.float16(-np.inf), "float16")
@proof("ZeroIsMemset", cpu, np.float32(-0.0), "float32")
# 1 + 3/256 lies half-way between two neighbours, of which 1 + 2/128 is the even one:
@proof("Bfloat16Truncates", cpu, np.float32(1 + 3 / 256), "bfloat16", np.uint16(0x3F82))
def goes_through(bound, value, dtype, should=None):
    """Whether a value of the target's own storage arrives bit by bit (or as ``should``), as an array and as a fill."""
    should = value if should is None else should
    memory = poisoned(bound, 4 * should.dtype.itemsize)
    write(bound, flat(memory, 0, 2, dtype), np.full(2, value))
    write(bound, flat(memory, 2 * should.dtype.itemsize, 2, dtype), value)
    return raw(memory).tobytes() == should.tobytes() * 4


@proof("LongsThroughDoubles", cpu)
def _(bound):
    return goes_through(bound, np.int64(2**53 + 1), "int64") and goes_through(bound, np.uint64(2**64 - 1), "uint64")


@proof("HalfWordsAsWords", cpu)
def _(bound):
    memory = poisoned(bound, 8)
    write(bound, flat(memory, 4, 1, "uint16"), 1)
    return raw(memory).tolist() == [POISON] * 4 + [1, 0] + [POISON] * 2


@proof("StopFlagsByTheWord", cpu)
def _(bound):
    state = state_of(bound, 4)
    insert(bound, state, [prefill(state, 0), prefill(state, 1)])
    column(state, "stop_flags")[0] = True  # the step has ended the request
    insert(bound, state, [prefill(state, 2)])
    return column(state, "stop_flags")[:, 0].tolist() == [True, False, False, True]


@proof("RecordsFlushDenormals", cpu)
def _(bound):
    state = state_of(bound, 1)
    insert(bound, state, [prefill(state, 0, temperature=1e-40)])
    return column(state, "temperature")[0, 0] == np.float32(1e-40)


@proof("TensorsAreCopies", cpu)
def _(bound):
    state = state_of(bound, 4)
    tensor = state.tensor("accept_num", "numpy")
    write(bound, state.view("accept_num")[2], 5)
    return tensor[2, 0] == 5


@proof("TensorsLoseTheirMemory", cpu)
def _(bound):
    state = state_of(bound, 4)
    tensor = state.tensor("accept_num", "numpy")
    write(bound, state.view("accept_num")[2], 5)
    bound.close()
    return tensor[2, 0] == 5


# -- large ones, and order ---------------------------------------------------------------------------------------------


@proof("FillsEndAt65535", cpu)
def _(bound):
    memory = poisoned(bound, 65_536)
    write(bound, flat(memory, 0, 65_536), 1)
    return raw(memory)[65_535] == 1


@proof("HalfOfALargeBatch", lambda: faults.lay(cpu(), faults.FailingWrites))
def _(bound):
    """Whether 33 requests enter no slot, whichever of the writes is refused."""
    entered = []
    for at in (1, 2, 3):
        state = state_of(bound, 33)
        tasks = [prefill(state, slot) for slot in range(33)]
        bound.device.fault.at = at
        if raises(faults.CopyFailed, lambda state=state, tasks=tasks: insert(bound, state, tasks)):
            entered.append(admission_ids(state, tasks[:1]))
    return not any(entered)


@proof("LargeUploadsOvertake", queued)
def _(bound):
    """Whether a large value, behind a small one on a held stream, writes nothing yet."""
    stream, memory = bound.device.stream(), poisoned(bound, 1 << 16)
    with bound.device.hold_stream(stream):
        write(bound, flat(memory, 0, 8), 1, stream)
        ticket = write(bound, flat(memory, 0, 1 << 16), np.full(1 << 16, 2, np.uint8), stream)
        early = poll(lambda: raw(memory)[-1] == 2, A_WHILE)
    ticket.wait(PATIENCE)
    return not early


@proof("OverlapsLeak", cpu)
def _(bound):
    memory = poisoned(bound, 64)
    before = bound.counters().allocations
    write(bound, flat(memory, 8, 56), flat(memory, 0, 56))
    return bound.counters().allocations == before


@proof("WaitsOnceForAnEvent", queued)
def _(bound):
    held, *others = [bound.device.stream() for _ in range(3)]
    with bound.device.hold_stream(held):
        event = held.record()
        for other in others:
            other.wait(event)
        return all(raises(TicketTimeout, lambda other=other: other.synchronize(A_WHILE)) for other in others)


@proof("WaitsForTheNewestCopy", queued)
def _(bound):
    memory, held, free, writer = poisoned(bound, 64), *[bound.device.stream() for _ in range(3)]
    with bound.device.hold_stream(held):
        copies = [copied(bound, memory, [(0, 64)], held), copied(bound, memory, [(0, 64)], free)]
        copies[1].wait(PATIENCE)
        ticket = write(bound, flat(memory, 0, 64), 1, writer)
        return raises(TicketTimeout, lambda: ticket.wait(A_WHILE))


@proof("OtherMemoriesUnordered", queued)
def _(bound):
    memories, held, writer = [poisoned(bound, 64), poisoned(bound, 64)], bound.device.stream(), bound.device.stream()
    plans = [plan_value(flat(memory, 0, 64), np.uint8(1)) for memory in memories]
    with bound.device.hold_stream(held):
        copy = copied(bound, memories[1], [(0, 64)], held)
        ticket = bound.device.submit_all(plans, writer)
        waits = raises(TicketTimeout, lambda: ticket.wait(A_WHILE))
    copy.wait(PATIENCE)
    return waits
