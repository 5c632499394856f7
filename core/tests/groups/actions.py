"""Functions that the pool's ranks run for the tests; a task names this file and the function."""

from __future__ import annotations

import threading
from time import monotonic

import numpy as np
from hal_core import Request, Task, TaskKind, admit
from hal_core.devices import close_groups, open_groups
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import GroupLost, HalError
from hal_core.group import Group
from hal_core.memory.plan import PlanBuilder
from hal_core.output.sinks import MemorySink
from hal_core.ranks import channel as collective
from hal_core.runtime.bound import bind
from hal_core.slots import fields
from hal_core.slots.fields import STATE_TABLE
from hal_core.slots.state import SlotState
from hal_core.slots.step import Step


def open_all(rank, groups, timeout):
    """Open groups; every rank calls it."""
    open_groups(groups, timeout=timeout)


def open_own(rank, by_rank):
    """Open the state that is given for each rank; return the error."""
    return failing(lambda: open_groups(by_rank[rank.rank], timeout=3.0))


def failing(call):
    """Return the error's class and text, or None."""
    try:
        call()
    except HalError as error:
        return type(error).__name__, str(error)
    return None


def group_of(rank, groups):
    """Return the one of ``groups`` that contains the rank."""
    return Group(next(ranks for ranks in groups if rank.rank in ranks), rank.rank)


def scribble(state, seed):
    """Write random bytes over the whole state, headers included."""
    data = np.random.default_rng(seed).integers(0, 256, state.layout.nbytes, np.uint8)
    state.memory.buffer[: state.layout.nbytes] = data


def content(state):
    """Return all bytes of a state."""
    return state.memory.buffer[: state.layout.nbytes].tobytes()


def agree(rank, groups, idle, sizes, seed, calls):
    """Broadcast a scribbled state, except on the groups in ``idle``; return the bytes before each call, and at the
    end.
    """
    group = group_of(rank, groups)
    with bind(CpuPlugin.open(0, {})) as device:
        state = device.state(sizes)
        bytes_seen = []
        for call in range(calls):
            scribble(state, [seed, rank.rank, call])
            bytes_seen.append(content(state))
            if group.ranks not in idle:
                device.broadcast_tokens(state=state, group=group, stream=device.default_stream).wait(10)
            bytes_seen.append(content(state))
        return bytes_seen


def disagree(rank, sizes, changes):
    """Open a state on a group with ``changes[rank]``; return ``(error, bytes unchanged, then refused)``."""
    change = changes.get(rank.rank, {})
    table = list(STATE_TABLE)
    if "swap" in change:
        a, b = ([f.name for f in table].index(name) for name in change["swap"])
        table[a], table[b] = table[b], table[a]
    if "reset" in change:
        at = [f.name for f in table].index(change["reset"])
        f = table[at]
        table[at] = fields.Field(f.name, f.dtype, f.width, 77, f.groups, f.record)
    group = Group(change.get("ranks", (0, 1)), rank.rank)
    original = collective.contract_version
    if "version" in change:
        collective.contract_version = lambda: change["version"]
    try:
        with bind(CpuPlugin.open(0, {})) as device:
            state = SlotState(device.device, change.get("sizes", sizes), name=change.get("name", "target"), table=table)
            scribble(state, rank.rank)
            before = content(state)
            stream = device.default_stream
            error = failing(lambda: device.broadcast_tokens(state=state, group=group, stream=stream).wait())
            return error, content(state) == before, failing(lambda: device.open_group(state=state, group=group))
    finally:
        collective.contract_version = original


def hang_on(rank, ranks, most=30.0):
    """Broadcast until the group is lost; return the error, the duration of its call, and the error of a later call."""
    group = Group(ranks, rank.rank)
    with bind(CpuPlugin.open(0, {})) as device:
        state = device.state(fields.StateConfig(num_slots=4, max_model_len=16))
        end = monotonic() + most
        while monotonic() < end:
            begin = monotonic()
            try:
                device.broadcast_tokens(state=state, group=group, stream=device.default_stream).wait()
            except GroupLost as error:
                took, begin = monotonic() - begin, monotonic()
                again = failing(lambda: device.open_group(state=device.state(state.sizes, name="b"), group=group))
                return str(error), took, again, monotonic() - begin
        return None


def one_step(device, state, group, step, tokens, sink, *, skip=False):
    """Sample (only the first rank has the tokens), broadcast unless ``skip`` is set, advance, save."""
    stream = device.default_stream
    slots = sorted(state.host_table.requests.index(r) for r in state.host_table.requests if r is not None)
    order = np.array(sorted({*slots, *state.host_table.preempted}), np.int32)
    if group.is_first and state.speculative:
        rows = [[token, *[token + 1] * (state.sizes.max_accept - 1)] for token in tokens]
        device.async_set_value(target=state.view("accept_tokens"), value=rows, stream=stream)
        device.async_set_value(target=state.view("accept_num"), value=1 + step % 2, stream=stream)
    elif group.is_first:
        device.async_set_value(target=state.view("sampled_token_ids")[:, 0], value=tokens, stream=stream)
    if not skip:
        device.broadcast_tokens(state=state, group=group, stream=stream).wait()
    named = Step(step, {"target": order}, speculative=state.speculative, group=group)
    device.update_inputs(state=state, step=named, stream=stream)
    ticket = device.save_output(state=state, step=named, sink=sink, stream=stream)
    ticket.wait()
    return state.take(ticket)


def prefilled(device, sizes):
    """A state with a request in slots 0 and 2; the first step feeds its prompt of two tokens."""
    state = device.state(sizes)
    tasks = [
        Task(
            TaskKind.PREFILL,
            slot,
            admit(Request(f"r{slot}", [1, 2]), state.layout),
            num_scheduled_tokens=2,
            blocks=[slot],
        )
        for slot in (0, 2)
    ]
    device.insert_tasks(state=state, tasks=tasks, stream=device.default_stream)
    return state


def decode(rank, groups, sizes, steps):
    """Run some steps, then one in which slot 2 is preempted; return the tokens sent, the tokens known, and the
    cleaned slot.
    """
    group = group_of(rank, groups)
    with bind(CpuPlugin.open(0, {})) as device:
        state, sink = prefilled(device, sizes), MemorySink()
        for step in range(steps):
            one_step(device, state, group, step, [10 * step + group.source + s for s in range(sizes.num_slots)], sink)
        gone = Task(TaskKind.PREEMPTED, 2, state.host_table.requests[2])
        device.insert_tasks(state=state, tasks=[gone], stream=device.default_stream)
        marked = bool(content_of(state, "last_preempted").any())
        record = one_step(device, state, group, steps, [99] * sizes.num_slots, sink)
        sent = [(r.step, r.request_ids, r.status.tolist(), r.tokens.tolist()) for r in sink.records]
        left = bool(content_of(state, "last_preempted").any())
        return sent, record.tokens.tolist(), content_of(state, "token_ids")[0].tolist(), marked, left


def content_of(state, name):
    """Return a field as an array ``[slots, width]``."""
    place = state.layout.fields[name]
    data = state.memory.buffer[place.offset : place.offset + place.stride * state.sizes.num_slots]
    return data.view(place.field.dtype.storage).reshape(state.sizes.num_slots, place.width).copy()


def skipping(rank, sizes, who, at):
    """Rank ``who`` omits the broadcast of step ``at``; return the steps that it sent, its error, and a later one."""
    group = Group((0, 1), rank.rank)
    device = bind(CpuPlugin.open(0, {}))
    state, sink = prefilled(device, sizes), MemorySink()
    error = None
    for step in range(at + 3):
        try:
            skip = rank.rank == who and step == at
            one_step(device, state, group, step, list(range(sizes.num_slots)), sink, skip=skip)
        except HalError as met:
            error = type(met).__name__, str(met)
            break
    stream = device.default_stream
    later = failing(lambda: device.update_inputs(state=state, step=Step(9, {"target": [0]}), stream=stream))
    device.close()
    return [r.step for r in sink.records], error, later


def tampered(rank, sizes):
    """Overwrite the header between broadcast and save_output on the first rank; no record may be sent."""
    group = Group((0, 1), rank.rank)
    device = bind(CpuPlugin.open(0, {}))
    state, sink, stream = prefilled(device, sizes), MemorySink(), device.default_stream
    device.broadcast_tokens(state=state, group=group, stream=stream).wait()
    builder = PlanBuilder(state.memory)
    builder.fill(np.array([state.broadcast_range().offset + 20], np.int64), 1, np.uint8(255))
    device.device.submit(builder.build(), stream).wait()
    step = Step(0, {"target": [0, 2]}, group=group)
    ticket = device.save_output(state=state, step=step, sink=sink, stream=stream)
    said = failing(lambda: ticket.record(1))
    return said, len(sink.records), failing(state.check_usable)


def leave(rank):
    """Close every group; return the number of watchdogs that are left."""
    close_groups()
    close_groups()
    return [t.name for t in threading.enumerate() if t.name.startswith("hal-watchdog")]
