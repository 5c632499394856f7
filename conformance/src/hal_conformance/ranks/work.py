"""Work of the ranks in the kit's tests: plain functions that return their observations without judging them.

Errors of the contract are part of the answer (:class:`Met`); any other error ends the test unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.errors import HalError
from hal_core.group import Group
from hal_core.memory.dtypes import dtype_of
from hal_core.output.sinks import MemorySink
from hal_core.runtime.bound import BoundDevice, bind
from hal_core.slots.admission import Request, SamplingParams, admit
from hal_core.slots.declared import StateField, table_with
from hal_core.slots.fields import SplitRole, StateConfig
from hal_core.slots.state import SlotState
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind

from ..harness import backdoor
from ..opening import subject_of
from .processes import Rank

if TYPE_CHECKING:
    from ..harness.subject import Recipe

Groups = Sequence[Sequence[int]]
ODD = 1 << 40
"""The seed of :func:`agree` that selects :data:`ODD_WORDS` instead of random bytes."""
ODD_WORDS = (1, 0x7FF0000000000001, 0x7FA000017FA00002, 0x8000000000000000, 0xFFF8123400000005, 5, 0x8000000180000001,
             0x7FF0000000000000, 0x000FFFFFFFFFFFFF, 0x7F80FF807FC17F81, 2**63 - 1)  # fmt: skip
"""Words that are NaNs with payloads, denormals, infinities or signed zeros if read as floats of any width."""


@dataclass
class Met:
    """An error: its class, its text, whether it names device, hook, argument and cure, and its delay in seconds."""

    kind: str
    text: str
    named: tuple[str, str, str, str]
    seconds: float = 0.0


@dataclass
class Seen:
    """A rank's view of its broadcasts: the state before and after each, collectives and their bytes, an error."""

    before: list[bytes] = field(default_factory=list)
    after: list[bytes] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    error: Met | None = None


def join(rank: Rank, recipe: Recipe, groups: Groups, timeout: float, epoch: str) -> None:
    """Open the groups; every rank calls it before each test."""
    honest = type(recipe)(recipe.name, recipe.factory)
    subject_of(honest).support.join(groups, timeout, epoch)


@contextmanager
def opened(recipe: Recipe) -> Iterator[BoundDevice]:
    """Open the device under test for one call."""
    subject = subject_of(recipe)
    try:
        bound = bind(subject.open(), subject.policy)
        try:
            yield bound
        finally:
            with suppress(HalError):  # errors that were never waited for belong to the answer already
                bound.close()
    finally:
        subject.undo()


def contract_error(call: Callable[[], object]) -> Met | None:
    """Return the error of the contract that a call raises, or None."""
    began = monotonic()
    try:
        call()
    except HalError as error:
        named = (error.device, error.hook, error.argument, error.cure)
        return Met(type(error).__name__, str(error), named, monotonic() - began)
    return None


def group_of(rank: Rank, groups: Groups) -> Group:
    """Return the one of ``groups`` that contains the rank."""
    return Group(next(tuple(ranks) for ranks in groups if rank.rank in ranks), rank.rank)


class Spy:
    """A communicator that records its broadcasts: it counts below the plugin's hook."""

    def __init__(self, inner: Any, seen: list[int]) -> None:  # noqa: ANN401 (a Communicator, perhaps with more)
        self._inner, self._seen = inner, seen

    def broadcast(self, memory: Any, part: Any, stream: Any) -> Any:  # noqa: ANN401 (passed on)
        """Record the bytes, and pass the call on."""
        self._seen.append(part.nbytes)
        return self._inner.broadcast(memory, part, stream)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (whatever it is)
        return getattr(self._inner, name)


def spy_on(bound: BoundDevice) -> list[int]:
    """Return a list that receives the bytes of each later broadcast."""
    seen: list[int] = []
    true = bound.device.communicator
    bound.device.communicator = lambda group: Spy(true(group), seen)  # type: ignore[method-assign]
    return seen


def content(bound: BoundDevice, state: SlotState) -> bytes:
    """Return all bytes of a state, in stream order."""
    return backdoor.read(bound.device, state.memory, bound.default_stream)[: state.layout.nbytes].tobytes()


def scribble(bound: BoundDevice, state: SlotState, seed: Sequence[int]) -> bytes:
    """Write random bytes over the whole state, including headers, or alternating odd words; return the bytes."""
    nbytes = state.layout.nbytes
    if seed[0] == ODD:
        turned = np.roll(np.array(ODD_WORDS, np.uint64), sum(seed[1:]))
        data = np.resize(turned, -(-nbytes // 8)).view(np.uint8)[:nbytes]
    else:
        data = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    backdoor.write(bound.device, state.memory, 0, data, bound.default_stream)
    return data.tobytes()


def agree(rank: Rank, recipe: Recipe, groups: Groups, idle: Groups, sizes: StateConfig, seed: int, calls: int) -> Seen:
    """Broadcast a scribbled state ``calls`` times, but not on the groups in ``idle``."""
    group, seen = group_of(rank, groups), Seen()
    with opened(recipe) as bound:
        state, below = bound.state(sizes), spy_on(bound)

        def broadcast() -> None:
            bound.open_group(state=state, group=group)
            counted, spied = bound.counters().collectives, len(below)
            bound.broadcast_tokens(state=state, group=group, stream=bound.default_stream).wait(backdoor.PATIENCE)
            counted = bound.counters().collectives - counted
            seen.collectives.append(max(counted, len(below) - spied))
            seen.nbytes.append(sum(below[spied:]))

        for call in range(calls):
            seen.before.append(scribble(bound, state, [seed, rank.rank, call]))
            if group.ranks not in [tuple(ranks) for ranks in idle]:
                seen.error = contract_error(broadcast)
            seen.after.append(content(bound, state))
            if seen.error is not None:
                break
    return seen


def alone(rank: Rank, recipe: Recipe, sizes: StateConfig) -> Seen:
    """Broadcast in a group of one, in a job of several."""
    return agree(rank, recipe, [(rank.rank,)], (), sizes, 1, 1)


DECLARED = [StateField("bias", "float32", groups="step_input")]
"""The declared fields of ranks whose change names no others."""


def disagree(
    rank: Rank, recipe: Recipe, sizes: StateConfig, changes: Mapping[int, Mapping[str, Any]]
) -> tuple[Any, ...]:
    """Open a state changed by ``changes[rank]``; return the error, whether the state is unchanged, and a later call's
    error."""
    change = changes.get(rank.rank, {})
    table = list(table_with(sizes, change.get("fields", DECLARED)))
    if "swap" in change:
        a, b = ([one.name for one in table].index(name) for name in change["swap"])
        table[a], table[b] = table[b], table[a]
    types = change.get("types", {})
    table = [replace(one, dtype=dtype_of(types[one.name])) if one.name in types else one for one in table]
    group = Group(change.get("ranks", (0, 1)), rank.rank)
    with opened(recipe) as bound:
        name = change.get("name", "target")
        state = SlotState(bound.device, change.get("sizes", sizes), name=name, table=table)
        stream, before = bound.default_stream, scribble(bound, state, [rank.rank])

        def broadcast() -> None:
            bound.broadcast_tokens(state=state, group=group, stream=stream).wait(backdoor.PATIENCE)

        error = contract_error(broadcast)
        return error, content(bound, state) == before, contract_error(broadcast) if error else None


def skip(rank: Rank, recipe: Recipe, who: int, by: str) -> tuple[Met | None, int, Met | None]:
    """Let rank ``who`` leave one of three broadcasts out; return the error of the next, records sent, and a later
    call's error.

    The other ranks check the ticket of each broadcast, or (``by``) only the output.
    """
    group, sink, error = Group((0, 1), rank.rank), MemorySink(), None
    with opened(recipe) as bound:
        stream = bound.default_stream
        state = filled(bound, StateConfig(num_slots=2, max_model_len=16))

        def step(number: int, broadcasts: bool) -> None:
            if broadcasts:
                ticket = bound.broadcast_tokens(state=state, group=group, stream=stream)
                if by == "ticket":
                    ticket.wait(backdoor.PATIENCE)
            named = Step(number, {"target": np.arange(2, dtype=np.int32)}, group=group)
            bound.update_inputs(state=state, step=named, stream=stream).wait(backdoor.PATIENCE)
            if by == "output":
                saved: Any = bound.save_output(state=state, step=named, sink=sink, stream=stream)
                state.take(saved)

        for number in range(3 if rank.rank == who else 2):
            error = contract_error(lambda number=number: step(number, rank.rank != who or number != 1))  # type: ignore[misc]
            if error is not None:
                break
        last = Step(9, {"target": np.zeros(1, np.int32)})
        return (
            error,
            len(sink.records),
            contract_error(lambda: bound.update_inputs(state=state, step=last, stream=stream)),
        )


def tamper(rank: Rank, recipe: Recipe) -> tuple[Met | None, int, Met | None]:
    """Overwrite a header between broadcast and output; return the output's error, records sent, and later errors."""
    group, sink = Group((0, 1), rank.rank), MemorySink()
    with opened(recipe) as bound:
        stream = bound.default_stream
        state = filled(bound, StateConfig(num_slots=2, max_model_len=16))
        bound.broadcast_tokens(state=state, group=group, stream=stream).wait(backdoor.PATIENCE)
        at = state.broadcast_range().offset + 20
        backdoor.write(bound.device, state.memory, at, np.full(1, 0xFF, np.uint8), stream)
        step = Step(0, {"target": np.arange(2, dtype=np.int32)}, group=group)

        def take() -> None:
            saved: Any = bound.save_output(state=state, step=step, sink=sink, stream=stream)
            state.take(saved)

        error = contract_error(take)
        return (
            error,
            len(sink.records),
            contract_error(lambda: bound.update_inputs(state=state, step=step, stream=stream)),
        )


def filled(bound: BoundDevice, sizes: StateConfig, role: SplitRole = SplitRole.MIXED) -> SlotState:
    """Return a state with a request in every slot, whose prompt of two tokens the first step feeds."""
    state = bound.state(sizes)
    requests = [Request(f"r{slot}", [1, 2], SamplingParams(max_tokens=9), role=role) for slot in range(sizes.num_slots)]
    tasks = [
        Task(TaskKind.PREFILL, slot, admit(request, state.layout), 0, 2, [slot])
        for slot, request in enumerate(requests)
    ]
    bound.insert_tasks(state=state, tasks=tasks, stream=bound.default_stream).wait(backdoor.PATIENCE)
    return state


@dataclass
class Decoded:
    """A rank's results after some steps: records as plain data, and fields as bytes."""

    sent: list[tuple[int, tuple[str, ...], list[int], list[int]]]
    known: list[list[int]]
    fields: dict[str, bytes]
    marked: bool
    cleaned: bool
    error: Met | None = None
    chosen: list[list[int] | None] = field(default_factory=list)
    """For each record, the tokens that its log-probabilities belong to; None without log-probabilities."""


def decode(rank: Rank, recipe: Recipe, groups: Groups, sizes: StateConfig, path: str, steps: int) -> Decoded:
    """Decode some steps, in the last of which slot 0 is preempted. Only the first rank has the tokens."""
    group, sink = group_of(rank, groups), MemorySink()
    speculative = path.startswith("speculative")
    logprobs = sizes.max_logprobs if path.endswith("top-k") and group.is_first else None  # these are not broadcast
    order = np.arange(sizes.num_slots, dtype=np.int32)[::-1].copy()
    decoded = Decoded([], [], {}, False, False)
    with opened(recipe) as bound:
        stream = bound.default_stream
        state = filled(bound, sizes, SplitRole.PREFILL if path == "first token" else SplitRole.MIXED)

        def one_step(number: int) -> None:
            if group.is_first:
                sample(bound, state, number, group.source, speculative=speculative)
            bound.broadcast_tokens(state=state, group=group, stream=stream).wait(backdoor.PATIENCE)
            named = Step(number, {"target": order}, speculative=speculative, group=group, logprobs=logprobs)
            bound.update_inputs(state=state, step=named, stream=stream).wait(backdoor.PATIENCE)
            ticket: Any = bound.save_output(state=state, step=named, sink=sink, stream=stream)
            ticket.wait(backdoor.PATIENCE)
            decoded.known.append(state.take(ticket).tokens.tolist())

        def every_step() -> None:
            for number in range(steps):
                if number == steps - 1:
                    request = state.host_table.requests[0]
                    assert request is not None
                    gone = [Task(TaskKind.PREEMPTED, 0, request)]
                    bound.insert_tasks(state=state, tasks=gone, stream=stream).wait(backdoor.PATIENCE)
                    decoded.marked = any(field_of(bound, state, "last_preempted"))
                one_step(number)

        decoded.error = contract_error(every_step)
        decoded.cleaned = not any(field_of(bound, state, "last_preempted"))
        decoded.fields = {name: field_of(bound, state, name) for name in ("step_idx", "stop_flags", "next_tokens")}
    decoded.sent = [(r.step, tuple(r.request_ids), r.status.tolist(), r.tokens.tolist()) for r in sink.records]
    decoded.chosen = [
        None if record.logprob_token_ids is None else record.logprob_token_ids[:, 0].tolist() for record in sink.records
    ]
    return decoded


def sample(bound: BoundDevice, state: SlotState, number: int, source: int, *, speculative: bool) -> None:
    """Write a first rank's sampled tokens: they identify step, group and slot."""
    stream, n = bound.default_stream, state.sizes.num_slots
    tokens = 1000 * number + 100 * source + np.arange(n)
    rows = tokens[:, None] + 10 * np.arange(state.sizes.max_accept)
    ids = np.repeat(rows, state.layout.fields["topk_token_ids"].width // state.sizes.max_accept, axis=1)
    bound.async_set_value(target=state.view("topk_token_ids"), value=ids, stream=stream)
    if not speculative:
        bound.async_set_value(target=state.view("sampled_token_ids"), value=tokens, stream=stream)
        return
    counts = 1 + (np.arange(n) + number) % state.sizes.max_accept
    bound.async_set_value(target=state.view("accept_tokens"), value=rows, stream=stream)
    bound.async_set_value(target=state.view("accept_num"), value=counts, stream=stream)


def field_of(bound: BoundDevice, state: SlotState, name: str) -> bytes:
    """Return the bytes of one field."""
    place = state.layout.fields[name]
    return content(bound, state)[place.offset : place.offset + place.stride * state.sizes.num_slots]
