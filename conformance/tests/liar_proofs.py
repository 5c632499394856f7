"""Proofs that liars lie: their registry, the devices that they run on, and common helpers."""

import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from hal_conformance import liars
from hal_conformance.liars import by_name
from hal_conformance.opening import Subject
from hal_core.contract.support import Support
from hal_core.devices.cpu.device import CpuDevice
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, View
from hal_core.runtime.bound import bind
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind

sys.path.insert(0, str(Path(__file__).parent))
from queued_device import at, queued

POISON = 0xA5
PATIENCE = 20.0
A_WHILE = 0.3  # the time for a liar that waits; an honest device has PATIENCE
RING = 1 << 20  # bytes that the ring of a pressed device may hold; it begins with as many
PROOFS = {}


def cpu():
    return CpuDevice(0, {})


def pressed(deadline=0.2):
    """The asynchronous example with a ring that is soon full, and a wait of so many seconds for it."""

    def make():
        device = queued()
        device.staging.limit, device.staging.deadline = RING, deadline
        return device

    return make


def proof(name, make, *given, **named):
    """Register ``kept(bound, …)``: True when the promise that the liar breaks was kept. The rest are its arguments."""

    def register(kept):
        PROOFS[name] = (make, lambda bound: kept(bound, *given, **named))
        return kept

    return register


@contextmanager
def opened(make, name=""):
    subject = Subject("device", make, Support())
    if name:
        subject = by_name(name).corrupt(subject)
    bound = bind(subject.open(), subject.policy)
    try:
        yield bound
    finally:
        subject.undo()
        bound.device.close()


def poisoned(bound, nbytes):
    memory = bound.device.allocate(nbytes)
    raw(memory)[...] = POISON
    return memory


def raw(memory):
    """The bytes of a block, read directly: the memory of both devices is the host's own."""
    return at(memory.address, memory.nbytes)


def flat(memory, offset, count, dtype="uint8"):
    return View.contiguous(memory, offset, (count,), dtype_of(dtype))


def write(bound, target, value, stream=None):
    return bound.async_set_value(target=target, value=value, stream=stream or bound.default_stream)


def copied(bound, memory, parts, stream=None):
    return bound.device.copy_out(memory, [ByteRange(*part) for part in parts], stream or bound.default_stream)


def lies(bound):
    """Whether this is the liar: only the timeout of a proof depends on that."""
    return any(base.__module__.startswith(liars.__name__) for base in type(bound.device).__mro__)


def ends(call, patience):
    """Return True when a call ends in time; it continues in a thread if not."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(patience)
    return not thread.is_alive()


def raises(kind, call):
    try:
        call()
    except kind:
        return True
    return False


def state_of(bound, slots, tokens=16, **more):
    small = {"max_logprobs": 0, "max_eos": 1, "max_stop_sequences": 1, "max_stop_length": 1, "max_bad_words": 1} | more
    return bound.state(StateConfig(num_slots=slots, max_model_len=tokens, **small))


def prefill(state, slot, prompt=(1, 2), **params):
    request = state.admit(Request(f"request {slot}", list(prompt), SamplingParams(**params)))
    blocks = range(-(-len(prompt) // state.sizes.block_size))
    return Task(TaskKind.PREFILL, slot, request, 0, len(prompt), list(blocks))


def insert(bound, state, tasks, stream=None):
    bound.insert_tasks(state=state, tasks=tasks, stream=stream or bound.default_stream).wait(PATIENCE)


def column(state, name):
    """A field of every slot, read directly: it is the state's memory, so the caller holds the state."""
    place = state.layout.fields[name]
    data = raw(state.memory)[place.offset : place.offset + place.stride * state.sizes.num_slots]
    return data.view(place.field.dtype.storage).reshape(state.sizes.num_slots, -1)


def admission_ids(state, tasks):
    return all(column(state, "request_serial")[task.slot, 0] == task.request.admission_id for task in tasks)


def step_of(state, number, slots):
    return Step(number, {state.name: np.array(slots, np.int32)})


def update(bound, state, step, stream=None):
    return bound.update_inputs(state=state, step=step, stream=stream or bound.default_stream)


def fill(bound, stream, nbytes=RING // 4, count=4):
    """Writes that stay in the ring until the stream is released; by default they fill it."""
    memory = poisoned(bound, nbytes * count)
    for number in range(count):
        write(bound, flat(memory, number * nbytes, nbytes), np.ones(nbytes, np.uint8), stream)
    return memory
