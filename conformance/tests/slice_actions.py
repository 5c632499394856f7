"""Functions that two ranks run on the simulated accelerator to prove a liar about broadcasts; tasks name this file."""

import threading
from dataclasses import replace

import numpy as np
from hal_conformance.harness import backdoor
from hal_conformance.liars import by_name
from hal_conformance.opening import Subject
from hal_core.contract.support import Support
from hal_core.errors import GroupLost, HalError
from hal_core.group import Group
from hal_core.runtime.bound import bind
from hal_core.slots.admission import Request
from hal_core.slots.fields import StateConfig
from hal_core.slots.tasks import Task, TaskKind
from hal_sim import SimPlugin

SIZES = StateConfig(num_slots=3, max_model_len=16, max_draft_tokens=2)


def opened(name, job, timeout=1000):
    """The sim device, or a liar if it has a name."""
    options = {"collective_timeout_ms": timeout, "staged": 0, "job": f"{job}_{name}"}
    subject = Subject("sim", lambda: SimPlugin.open(0, options), Support())
    subject = by_name(name).corrupt(subject) if name else subject
    return bind(subject.open(), subject.policy)


def fields_of(state, data):
    """The broadcast fields, as bytes by name."""
    part = state.broadcast_range()
    inside = [p for p in state.layout.fields.values() if part.offset <= p.offset < part.end]
    return {p.field.name: data[p.offset : p.offset + p.stride * state.sizes.num_slots].tobytes() for p in inside}


def scribbled(rank, state):
    """The bytes that a rank writes over its state."""
    return np.random.default_rng([7, rank]).integers(0, 256, state.layout.nbytes, np.uint8)


def agree(rank, name, job, ranks=(0, 1)):
    """Return True when every field is the source's after a broadcast; one slot of three is held."""
    group = Group(ranks, rank.rank)
    with opened(name, job) as bound:
        state, stream = bound.state(SIZES), bound.default_stream
        task = Task(TaskKind.PREFILL, 0, state.admit(Request("r", [1, 2])), 0, 2, [0])
        bound.insert_tasks(state=state, tasks=[task], stream=stream).wait(10)
        backdoor.write(bound.device, state.memory, 0, scribbled(rank.rank, state), stream)
        try:
            bound.broadcast_tokens(state=state, group=group, stream=stream).wait(10)
        except HalError:
            return False
        got = fields_of(state, backdoor.read(bound.device, state.memory, stream))
        return got == fields_of(state, scribbled(group.source, state))


class Tampering:
    """A communicator that changes four bytes of the header before it is sent."""

    def __init__(self, inner, device, at):
        self.inner, self.device, self.at = inner, device, at

    def broadcast(self, memory, part, stream):
        backdoor.put(self.device, memory, [(part.offset + self.at, b"\x5a" * 4)], stream)
        return self.inner.broadcast(memory, part, stream)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def tamper(rank, name, job, at):
    """Return True when the receiver raises for a header in which four bytes are wrong; the source has no error."""
    with opened(name, job) as bound:
        state, true = bound.state(SIZES), bound.device.communicator
        if rank.rank == 0:
            bound.device.communicator = lambda group: Tampering(true(group), bound.device, at)
        try:
            group = Group((0, 1), rank.rank)
            bound.broadcast_tokens(state=state, group=group, stream=bound.default_stream).wait(10)
        except HalError:
            return True
        return rank.rank == 0


def tamper_digest(rank, name, job):
    return tamper(rank, name, job, 40)


def tamper_step(rank, name, job):
    return tamper(rank, name, job, 20)


def other_source(rank, name, job):
    return agree(rank, name, job, (1, 0))


def told_in_time(call, patience):
    """Return True when a call raises GroupLost within so many seconds; it continues in a thread if not."""
    met = []

    def act():
        try:
            call()
        except GroupLost as error:
            met.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(patience)
    return bool(met)


def join_alone(rank, name, job):
    """Return True when rank 0 gets an error because rank 1 does not join."""
    if rank.rank:
        return True
    bound = opened(name, job, 200)
    state = bound.state(SIZES)
    return told_in_time(lambda: bound.open_group(state=state, group=Group((0, 1), 0)), 1.0 if name else 20.0)


def join_alone_twice(rank, name, job):
    """Return True when rank 0, which no rank joined within a second, gets the error at once on its second call."""
    if rank.rank:
        return True
    bound = opened(name, job, 1000)
    state = bound.state(SIZES)

    def join():
        bound.open_group(state=state, group=Group((0, 1), 0))

    return told_in_time(join, 20.0) and told_in_time(join, 0.3 if name else 20.0)


class Counting:
    """A communicator that counts its broadcasts."""

    def __init__(self, inner, sent):
        self.inner, self.sent = inner, sent

    def broadcast(self, memory, part, stream):
        self.sent.append(part.nbytes)
        return self.inner.broadcast(memory, part, stream)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def count_collectives(rank, name, job):
    """Return True when the slice of a large state is one collective."""
    with opened(name, job) as bound:
        state, true, sent = bound.state(replace(SIZES, num_slots=512)), bound.device.communicator, []
        bound.device.communicator = lambda group: Counting(true(group), sent)
        group = Group((0, 1), rank.rank)
        bound.broadcast_tokens(state=state, group=group, stream=bound.default_stream).wait(10)
        return len(sent) == 1
