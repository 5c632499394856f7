"""Work of ranks for the tests of the whole broadcast slice and its header; see :mod:`hal_conformance.ranks.work`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.group import ALONE, Group
from hal_core.memory.views import ByteRange
from hal_core.output.sinks import MemorySink
from hal_core.runtime.bound import BoundDevice, bind
from hal_core.runtime.policy import Policy
from hal_core.slots.admission import Request, SamplingParams, admit
from hal_core.slots.fields import StateConfig
from hal_core.slots.state import SlotState
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind

from ..harness import backdoor
from ..opening import subject_of
from .losses import Lost, after_loss, until_lost
from .processes import Rank
from .work import Groups, Met, content, contract_error, group_of, opened

if TYPE_CHECKING:
    from ..harness.subject import Recipe

FILLS = ("a", "b", "b", 0x00, "c", 0xFF, "a")
"""The source's bytes, broadcast by broadcast: a letter means random bytes, a number equal bytes. The third equals the
second, as a device that sends only changes would leave the receivers with their own."""


@dataclass
class Slices:
    """A rank's view of one state: its bytes before and after each broadcast, and whether all other bytes were
    unchanged."""

    before: list[bytes] = field(default_factory=list)
    after: list[bytes] = field(default_factory=list)
    elsewhere: list[bool] = field(default_factory=list)
    error: Met | None = None


def scribble(bound: BoundDevice, state: SlotState, rank: int, call: int, source: bool) -> bytes:
    """Write bytes over the whole state; the source's are those of :data:`FILLS`, each other rank has different ones."""
    how = FILLS[call]
    if source and isinstance(how, int):
        data = np.full(state.layout.nbytes, how, np.uint8)
    else:
        seed = [ord(str(how)[0]), rank] if source else [1000 + call, rank]
        data = np.random.default_rng(seed).integers(0, 256, state.layout.nbytes, np.uint8)
    backdoor.write(bound.device, state.memory, 0, data, bound.default_stream)
    return data.tobytes()


def enter(bound: BoundDevice, state: SlotState, slots: Sequence[int]) -> None:
    """Put a request into each of these slots."""
    tasks = []
    for slot in slots:
        request = admit(Request(f"{state.name}{slot}", [1, 2], SamplingParams(max_tokens=9)), state.layout)
        tasks.append(Task(TaskKind.PREFILL, slot, request, 0, 2, [slot]))
    bound.insert_tasks(state=state, tasks=tasks, stream=bound.default_stream).wait(backdoor.PATIENCE)


def slices(rank: Rank, recipe: Recipe, groups: Groups, idle: Groups, many: Sequence[StateConfig]) -> list[Slices]:
    """For each of ``many`` sizes, broadcast two states in turn, every other slot idle; the groups ``idle`` do not."""
    group, seen_by_size = group_of(rank, groups), []
    with opened(recipe) as bound:
        block = bound.device.allocate(4096)
        backdoor.write(bound.device, block, 0, backdoor.poisoned(4096), bound.default_stream)
        for at, size in enumerate(many):
            seen = Slices()
            state, other = (bound.state(size, name=f"{name}{at}") for name in ("target", "other"))
            enter(bound, state, range(1, size.num_slots, 2))

            def broadcast(of: SlotState) -> None:
                ticket = bound.broadcast_tokens(state=of, group=group, stream=bound.default_stream)
                ticket.wait(backdoor.PATIENCE)

            for call in range(len(FILLS)):
                elsewhere = scribble(bound, other, 7 + rank.rank, 0, True)
                seen.before.append(scribble(bound, state, rank.rank, call, group.is_first))
                if group.ranks not in [tuple(ranks) for ranks in idle]:
                    seen.error = contract_error(lambda state=state: broadcast(state))  # type: ignore[misc]
                seen.after.append(content(bound, state))
                around = backdoor.read(bound.device, block, bound.default_stream)
                untouched = bool((around == backdoor.POISON).all()) and content(bound, other) == elsewhere
                seen.elsewhere.append(untouched)
                if seen.error is not None:
                    break
                if call % 3 == 2 and group.ranks not in [tuple(ranks) for ranks in idle]:
                    broadcast(other)  # its own broadcasts are counted separately
            seen_by_size.append(seen)
    return seen_by_size


Change = Callable[[BoundDevice, SlotState, Group], None]


@contextmanager
def interfered(recipe: Recipe, before: Change, after: Change) -> Iterator[BoundDevice]:
    """Open the device, with an action just before and after the plugin's own ``broadcast_tokens``."""
    subject = subject_of(recipe)
    policy: Any = subject.policy or Policy()
    bounds: list[BoundDevice] = []

    class Interfering(type(policy)):  # type: ignore[misc]  # whatever policy is tested
        def broadcast_tokens(self, device: Any, hooks: Any, state: Any, group: Group, stream: Any) -> Any:  # noqa: ANN401
            def around(**given: Any) -> Any:  # noqa: ANN401 (as the hook)
                before(bounds[0], state, group)
                ticket = hooks.broadcast_tokens(**given)
                after(bounds[0], state, group)
                return ticket

            around_it = SimpleNamespace(broadcast_tokens=around)
            return super().broadcast_tokens(device, around_it, state, group, stream)

    made: Any = Interfering.__new__(Interfering)
    made.__dict__.update(vars(policy))
    try:
        bounds.append(bind(subject.open(), made))
        try:
            yield bounds[0]
        finally:
            contract_error(bounds[0].close)  # errors that were never waited for belong to the answer already
    finally:
        subject.undo()


def flip(bound: BoundDevice, state: SlotState, group: Group, at: int, *, sent: bool) -> None:
    """Flip one bit of a byte of the header, after the work on the stream: before it is sent, or after it has arrived.

    If the collective itself writes the header and copies it out, the announced or the expected header is changed.
    """
    begin = state.broadcast_range().offset
    announce, channel = getattr(bound.device.communicator(group), "announce", None), state.channels[group.ranks]
    if announce is not None:
        wrong = bytearray(channel.expected)
        wrong[at] ^= 1
        if sent:
            channel.expected = bytes(wrong)
        else:
            announce(state.memory, ByteRange(begin, len(wrong)), bytes(wrong))
        return
    there = backdoor.read(bound.device, state.memory, bound.default_stream)[begin + at]
    backdoor.write(bound.device, state.memory, begin + at, np.full(1, there ^ 1, np.uint8), bound.default_stream)


@dataclass
class Corrupted:
    """The results of a broadcast with a wrong header: the first error, records sent, later calls' errors, and whether
    the broadcast's own ticket was waited for without an error."""

    error: Met | None
    sent: int
    later: dict[str, str]
    before: Met | None = None
    another: Met | None = None
    passed: bool = False


MOST = 2
"""Alternatives that the states of :func:`corrupt` hold."""


def form_of(turn: int, drafts: int) -> dict[str, Any]:
    """Return the arguments of a step: its log-probabilities by turns, and whether it verifies drafts."""
    return {"logprobs": (None, 0, MOST)[turn % 3], "speculative": drafts > 0 and turn % 2 == 0}


def corrupt(
    rank: Rank, recipe: Recipe, groups: Groups, places: Sequence[int], by: str, where: str, drafts: int = 0
) -> list[Corrupted]:
    """For each place, create a state, run a valid step, and one whose header has a wrong byte there.

    ``drafts``: those that the state is sized for. The steps have the forms of :func:`form_of`.
    ``where``: at the "source", so that all ranks get it, or only at the last "receiver". The ranks check the ticket, or
    (``by``) only the output.
    """
    group, seen_by_size = group_of(rank, groups), []
    wrong, size = {"at": -1}, StateConfig(num_slots=2, max_model_len=16, max_draft_tokens=drafts, max_logprobs=MOST)

    def before(bound: BoundDevice, state: SlotState, among: Group) -> None:
        if wrong["at"] >= 0 and where == "source" and among.is_first:
            flip(bound, state, among, wrong["at"], sent=False)

    def after(bound: BoundDevice, state: SlotState, among: Group) -> None:
        if wrong["at"] >= 0 and where == "receiver" and among.rank == among.ranks[-1]:
            flip(bound, state, among, wrong["at"], sent=True)

    with interfered(recipe, before, after) as bound:
        for turn, at in enumerate(places):
            state, sink = bound.state(size, name=f"byte{at}"), MemorySink()
            enter(bound, state, [0, 1])
            form = form_of(turn, drafts)
            wrong["at"] = -1
            well = contract_error(lambda: one_step(bound, state, group, sink, 0, "ticket", form=form))  # noqa: B023 (called at once)
            sent = len(sink.records)
            wrong["at"] = at
            passed: list[int] = []
            error = contract_error(lambda: one_step(bound, state, group, sink, 1, by, passed, form))  # noqa: B023 (as above)
            after_it = later(bound, state, group, sink, error)
            seen_by_size.append(Corrupted(error, len(sink.records) - sent, after_it, well, passed=bool(passed)))
        wrong["at"] = -1
        state = bound.state(size, name="another")
        enter(bound, state, [0, 1])
        seen_by_size[-1].another = contract_error(lambda: one_step(bound, state, group, MemorySink(), 0, "ticket"))
    return seen_by_size


def one_step(
    bound: BoundDevice,
    state: SlotState,
    group: Group,
    sink: MemorySink,
    number: int,
    by: str,
    passed: list[int] | None = None,
    form: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Broadcast, update, save, take. ``passed`` gets the number once the broadcast's ticket has ended without an error.

    ``form``: arguments of the step.
    """
    stream = bound.default_stream
    ticket = bound.broadcast_tokens(state=state, group=group, stream=stream)
    if by == "ticket":
        ticket.wait(backdoor.PATIENCE)
        if passed is not None:
            passed.append(number)
    step = Step(number, {state.name: np.arange(state.sizes.num_slots, dtype=np.int32)}, group=group, **form)
    bound.update_inputs(state=state, step=step, stream=stream).wait(backdoor.PATIENCE)
    saved: Any = bound.save_output(state=state, step=step, sink=sink, stream=stream)
    state.take(saved)


def later(bound: BoundDevice, state: SlotState, group: Group, sink: MemorySink, error: Met | None) -> dict[str, str]:
    """Return the errors of each hook on a state that met ``error``; a rank without it would wait for the other
    ranks."""
    if error is None:
        return {}
    stream = bound.default_stream
    step = Step(9, {state.name: np.arange(state.sizes.num_slots, dtype=np.int32)}, group=ALONE)
    calls: dict[str, Callable[[], object]] = {
        "async_set_value": lambda: bound.async_set_value(target=state.view("seed"), value=1, stream=stream),
        "insert_tasks": lambda: bound.insert_tasks(state=state, tasks=[], stream=stream),
        "update_inputs": lambda: bound.update_inputs(state=state, step=step, stream=stream),
        "save_output": lambda: bound.save_output(state=state, step=step, sink=sink, stream=stream),
        "broadcast_tokens": lambda: bound.broadcast_tokens(state=state, group=group, stream=stream),
    }
    met = {hook: contract_error(call) for hook, call in calls.items()}
    return {hook: one.kind if one else "" for hook, one in met.items()}


REALLY_RUN = 256
"""Steps that :func:`stray` runs at most."""


def stray(rank: Rank, recipe: Recipe, who: int, by: str, times: int = 1) -> Corrupted:
    """Let rank ``who`` advance ``times`` more than the other ranks between two broadcasts; most of many such steps are
    only counted."""
    group, sink = Group((0, 1), rank.rank), MemorySink()
    with opened(recipe) as bound:
        state = bound.state(StateConfig(num_slots=2, max_model_len=16))
        enter(bound, state, [0, 1])
        well = contract_error(lambda: one_step(bound, state, group, sink, 0, "ticket"))
        sent = len(sink.records)
        counted = max(0, times - REALLY_RUN) if rank.rank == who else 0
        state.updates += counted
        for number in range(1 + counted, 1 + times if rank.rank == who else 1):
            step = Step(number, {state.name: np.arange(2, dtype=np.int32)}, group=group)
            bound.update_inputs(state=state, step=step, stream=bound.default_stream).wait(backdoor.PATIENCE)
        passed: list[int] = []
        error = contract_error(lambda: one_step(bound, state, group, sink, 1 + times, by, passed))
        after = later(bound, state, group, sink, error)
        return Corrupted(error, len(sink.records) - sent, after, well, passed=bool(passed))


LONG = 3.0
"""Seconds that an absent rank stays alive: longer than any other rank waits for it."""


def absent(rank: Rank, recipe: Recipe, groups: Groups, victim: int, how: str) -> Lost:
    """Keep ``victim`` alive but absent: from the "opening", or from the "first" or "third" broadcast on."""
    group = group_of(rank, groups)
    well = {"opening": -1, "first": 0, "third": 2}[how]
    with opened(recipe) as bound:
        state, other = (
            bound.state(StateConfig(num_slots=4, max_model_len=16), name=name) for name in ("target", "other")
        )
        stream = bound.default_stream

        def broadcast(of: SlotState) -> None:
            bound.broadcast_tokens(state=of, group=group, stream=stream).wait()

        calls, error = 0, None
        if rank.rank != victim or well >= 0:
            error = contract_error(lambda: bound.open_group(state=state, group=group))
        if error is None:
            most, missed = (well, False) if rank.rank == victim else (20, victim in group.ranks)
            calls, error = until_lost(lambda _: broadcast(state), most, missed=missed)
        if rank.rank == victim:
            threading.Event().wait(LONG)
        if error is None or rank.rank == victim:
            return Lost(calls, error)
        return after_loss(bound, calls, error, broadcast, state, other)
