"""The hooks around a runner's step, called in order without waiting, and the taking of its output later."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from hal_core import (
    ALONE,
    ENTERING,
    LEAVING,
    ByteRange,
    DeviceClosed,
    FinishReason,
    Group,
    GroupLost,
    HalError,
    InvalidValue,
    OutputTicket,
    PluginError,
    SinkClosed,
    SinkFull,
    Step,
    Task,
    TaskBatch,
    Unavailable,
    Undelivered,
)
from hal_core.frames import entries_of

from hal.unwritten import unwritten
from hal_engine.timeouts import TIMEOUTS

from .acceptance import Acceptance
from .runner import HostRunner, RunnerFailed, Supported, raised_at, sendable
from .step_plan import Int32s, PlannedStep, StepPlanner

if TYPE_CHECKING:
    from hal_core import AdmittedRequest, BoundDevice, OutputRecord, Request, Sink, SlotState, StateLayout, TimedEvent

    from .runner import Runner


log = logging.getLogger("hal.runner")
_NOT_OF_THE_RUNNER = (DeviceClosed, GroupLost, Unavailable, SinkClosed, Undelivered)
"""Errors that end the stepper: of the device, and of an earlier step's output, which a runner's hook call raises."""


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A step on the device: its plan, the step as it runs, and the ticket of its output.

    ``trouble``: the sink's error for its output: :class:`SinkFull` (the record is kept, and sent when there is room) or
    :class:`SinkClosed` (it will not be sent). The step is done all the same. ``failed``: the runner raised in
    ``launch``, and the step's requests end with that error. ``span``: around the step's work, if its time is measured.
    """

    planned: PlannedStep
    step: Step
    ticket: OutputTicket
    trouble: SinkFull | SinkClosed | None = None
    failed: bool = False
    span: tuple[TimedEvent, TimedEvent] | None = None


class Stepper:
    """One rank: a slot state on a device, a runner, and the four hooks called in order at each step. It is the executor
    of an engine in its process (:class:`hal_engine.engine.Executor`).

    The state is device memory that the host does not access: only the hooks, the runner and ``update_inputs`` change
    it. One thread calls the stepper, and takes each launched step once, in order.

    - ``blocks``: number of the runner's KV blocks.
    - ``sink``: receives each step's record; the caller closes it, and the device. A sink that resolves outputs at once,
      on the caller's thread, waits for the step. If its readers identify requests by batch id (``entries``), that id is
      the slot: the output of each step names all slots.
    - ``group``: its tensor-parallel group.
    - ``last``: the record of the last step that was taken; ``steps``: how many were launched.
    - ``acceptance``: draft counts so far, on a state with room for drafts.
    - ``in_flight``: steps of :meth:`order` that were not received, oldest first.
    - ``device_seconds``: the device's time in the steps that were taken, with the gaps in which it waited for the host
      between a step's first work and its last; None unless it is measured (:meth:`measure`).
    - ``on_raised``: called with the method and its exception when a runner raised and its work on the stream is done.
      It returns whether all ranks of the group raised, after the same collectives.

    If the runner raises in ``launch`` or ``propose``, on all ranks of its group, the requests of that step end. If only
    some ranks raise, they end with the error, because the others have run the step: the engine restarts the group, or
    ends.
    """

    sockets = ()

    def __init__(
        self, device: BoundDevice, state: SlotState, runner: Runner, sink: Sink, *, blocks: int, group: Group = ALONE
    ) -> None:
        self.device, self.state, self.runner, self.sink = device, state, runner, sink
        self._supported = Supported(type(runner).__name__, runner.supports)
        self.group, self.blocks = group, blocks
        self.stream = device.default_stream
        self.steps, self.in_flight = 0, deque[Launched]()
        self.last: OutputRecord | None = None
        self.acceptance = Acceptance()
        self.device_seconds: float | None = None
        self.on_raised: Callable[[str, Exception], bool] = lambda method, error: group.size == 1
        self._planner = StepPlanner(state, group)
        self._every_slot = _every_slot(state, sink)
        self._host_runner = runner if isinstance(runner, HostRunner) else None
        self._no_token = {"accept_num": 0} if state.speculative else {"sampled_token_ids": -1}  # outputs of such a slot
        self._refusals: dict[int, str] = {}  # admission id to why the request may not run, until its step is launched
        self._taken = 0  # of how many steps the output was
        self._ended: dict[int, int] = {}  # slot to the last step of its request, which the host has stopped

    @property
    def layout(self) -> StateLayout:
        """Layout of the state that requests are admitted to."""
        return self.state.layout

    @property
    def chunk(self) -> int | None:
        """Most prompt tokens of a step that the runner prefers; None without one."""
        chunk: int | None = getattr(self.runner, "chunk", None)
        return chunk

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to this number less one."""
        return self.runner.vocab_size

    @property
    def drafts(self) -> tuple[int, int, int]:
        """Drafts that were fed and accepted, and turns of a slot that decodes, so far."""
        return self.acceptance.drafted, self.acceptance.accepted, self.acceptance.turns

    def measure(self) -> None:
        """Measure the device's time of all later steps, if the device has ``timed_events``."""
        if self.device.capabilities.timed_events:
            self.device_seconds = 0.0

    def admit(self, request: Request, *, entering: bool = False) -> AdmittedRequest:
        """Check a request and pack it for the state. Raises :class:`hal_core.errors.InvalidValue`, and
        :class:`RunnerFailed` if the runner's ``check`` raises anything else. From any thread. ``entering``: a step that
        an engine elsewhere ordered has it already; if all ranks of the group refuse it, it ends there and does not run.
        """
        error = self._refused(request)
        if error is not None and not (entering and self.on_raised("check", error)):
            raise error
        admitted = self.state.admit(request, vocab_size=self.vocab_size)
        if error is not None:
            self._refusals[admitted.admission_id] = sendable(str(error))
        return admitted

    def admit_all(self, requests: Sequence[Request]) -> list[AdmittedRequest | HalError]:
        """Do so for several by one call; of each the result, or the error that refuses it. From any thread."""
        refused = {at: error for at, one in enumerate(requests) if (error := self._refused(one)) is not None}
        fit = [one for at, one in enumerate(requests) if at not in refused]
        admitted = iter(self.state.admit_all(fit, vocab_size=self.vocab_size))
        return [refused[at] if at in refused else next(admitted) for at in range(len(requests))]

    def _refused(self, request: Request) -> HalError | None:
        try:
            self._supported.check(request.params)
            self.runner.check(request)
        except InvalidValue as error:
            return error
        except Exception as error:  # noqa: BLE001 (a fault with this request alone)
            return RunnerFailed(self._what("check", error))
        return None

    def launch(self, tasks: TaskBatch | Sequence[Task]) -> Launched:
        """Put ``tasks`` into their slots and launch the next step, with its output going to the sink.

        It does not wait, unless its runner needs the host. Raises the hooks' errors:
        :class:`hal_core.errors.InvalidBatch` before anything changed, and :class:`hal_core.errors.InvalidValue` for
            drafts of a task that the step cannot feed; :class:`PluginError` if the runner returns another step;
        :class:`RunnerFailed` if it raises and the device is broken too.
        """
        device, state, stream = self.device, self.state, self.stream
        batch = state.batch(tasks)
        began, refused = self._timed(), dict[int, str]()
        if batch.requests:
            self._check_drafts(batch)
            self._make_way(batch)
            device.insert_tasks(state=state, tasks=batch, stream=stream)
            entering = zip(batch.plain["slots"], batch.requests, strict=True) if self._refusals else ()
            refused = {slot: why for slot, one in entering if (why := self._refusals.pop(one.admission_id, ""))}
            self._set(refused, stop_flags=True)  # before the runner's work, which runs no slot that has stopped
        else:
            state.check_usable()
        # the runner writes memory that may still be copied out; an earlier error is raised here, before the step counts
        device.order_after_reads(memory=state.memory, stream=stream)
        planned = self._planner.plan(self.steps, batch, set(self._ended))
        self.steps += 1
        step, failed = self._run(planned)
        if refused:
            self._set(refused, **self._no_token)
            step = replace(step, errors={**step.errors, **refused})
        agreed = device.broadcast_tokens(state=state, group=self.group, stream=stream)
        if self._host_runner is not None and not failed:
            self._host_runner.agreed(step, agreed, stream)
        device.update_inputs(state=state, step=step, stream=stream)
        if state.speculative and not failed:
            step = self._propose(planned, step)
        ended = self._timed()
        trouble: SinkFull | SinkClosed | None = None
        try:
            ticket: object = device.save_output(state=state, step=self._saved(step), sink=self.sink, stream=stream)
        except (SinkFull, SinkClosed) as error:
            trouble, ticket = error, error.ticket
        assert isinstance(ticket, OutputTicket)
        return Launched(planned, step, ticket, trouble, failed, (began, ended) if began and ended else None)

    def _timed(self) -> TimedEvent | None:
        """Return a timed event after all work that is now on the stream, if the step's time is measured."""
        return None if self.device_seconds is None else self.device.timed_event(stream=self.stream)

    def take(self, launched: Launched) -> OutputRecord:
        """Wait for a step's output and take it: the record, the mirror, and the slots whose requests ended.

        The device has stopped those requests, so their slots are free at once: a new request is written after the step
        that was launched since (G28). Requests that the host must stop free their slots when that step is taken. Raises
        the step's error, such as :class:`hal_core.errors.GroupLost`.
        """
        state, number = self.state, launched.step.number
        record = self.last = state.take(launched.ticket)
        self._taken = number + 1
        if launched.span is not None and self.device_seconds is not None:
            self.device_seconds += launched.span[1].seconds_since(launched.span[0])
        if state.speculative:
            self.acceptance.count(launched.planned, state)
        mirror, order, ended = state.mirror, launched.step.places[state.name], []
        flags = mirror["stop_flags"].reshape(-1)[order]
        if any(flags.tobytes()):
            stopped = order[flags]
            held, serials = (
                state.host_table.admission_ids[stopped].tolist(),
                mirror["request_serial"].reshape(-1)[stopped],
            )
            who = zip(stopped.tolist(), held, serials.tolist(), strict=True)
            ended = [slot for slot, now, then in who if now and now == then and slot not in self._ended]
        failed = FinishReason.ERROR in record.finish.tobytes()
        stopped_now = self._stop_failed(launched.ticket, ended) if failed else []
        free = [slot for slot, last in self._ended.items() if last <= number]
        if free or ended:
            state.release(free + ended)
            for slot in free:
                del self._ended[slot]
        ended += stopped_now
        if self._host_runner is not None:
            self._host_runner.took(launched.planned, mirror, ended)
        return record

    def order(self, group: int, tasks: Sequence[Task], taken: int) -> SinkFull | SinkClosed | None:
        """Launch the next step of the only group, to be received; return its ``trouble``. See :meth:`launch`."""
        self.in_flight.append(self.launch(tasks))
        return self.in_flight[-1].trouble

    def receive(self, timeout: float) -> tuple[int, OutputRecord] | None:
        """Wait for the oldest ordered step and take it, however long it runs; None without one. After an error no step
        is in flight, and the results of the later steps are unknown."""
        if not self.in_flight:
            return None
        launched = self.in_flight.popleft()
        try:
            return 0, self.take(launched)
        except BaseException:
            self.in_flight.clear()
            raise

    def _make_way(self, batch: TaskBatch) -> None:
        """Free slots of requests whose length ends them in the step in flight, which gives each at least one token.
        Other slots stay held, and the insertion is refused."""
        if self._taken == self.steps:
            return
        tasks = [*zip(batch.plain["kinds"], batch.plain["slots"], strict=True)]
        if entered := {slot for kind, slot in tasks if kind in ENTERING}:
            held = entered.intersection(self.state.host_table.live.values())
            held.difference_update([slot for kind, slot in tasks if kind in LEAVING])
            if over := [slot for slot in held if self._ends(slot)]:
                self.state.release(over)

    def _ends(self, slot: int) -> bool:
        """Return whether its length ends a slot's request with the step in flight."""
        held, mirror = self.state.host_table.requests[slot], self.state.mirror
        assert held is not None
        known = mirror["request_serial"][slot, 0] == held.admission_id
        generated = int(mirror["step_idx"][slot, 0]) if known else held.generated
        decodes = self.state.host_table.prefilled[slot] >= held.total
        return bool(decodes and generated + 1 >= held.params.max_tokens)

    def _stop_failed(self, ticket: OutputTicket, ended: Sequence[int]) -> list[int]:
        """Stop requests with an error row that the device has not stopped, such as an invalid token (G21). Return their
        slots."""
        held, flags = self.state.host_table.admission_ids, self.state.view("stop_flags")
        slots, known = [slot for slot, who in ticket.failed if who and held[slot] == who], self.state.failed
        for slot, who in ticket.failed:
            if held[slot] != who == known.get(slot):  # it was its last step, and another request has its slot
                del known[slot]
        slots = [slot for slot in slots if slot not in ended and slot not in self._ended]
        for slot in slots:
            self.device.async_set_value(target=flags[slot], value=True, stream=self.stream)
            self._ended[slot] = self.steps - 1
        return slots

    def step(self, tasks: TaskBatch | Sequence[Task]) -> OutputRecord:
        """Launch a step and take it. Raises as both, and ``trouble`` once it is taken: its record is in ``last``."""
        launched = self.launch(tasks)
        record = self.take(launched)
        if launched.trouble is not None:
            raise launched.trouble
        return record

    def _run(self, planned: PlannedStep) -> tuple[Step, bool]:
        """Return the step as the runner launched it, and whether the runner raised, on all ranks of the group."""
        try:
            step: object = self.runner.launch(self.state, planned, self.stream)
        except _NOT_OF_THE_RUNNER:
            raise
        except Exception as error:
            if not self._all_raised("launch", error):
                raise
            return self._failed(planned.step, self._fed(planned), self._no_token, "launch", error), True
        if not isinstance(step, Step) or step.number != planned.step.number:
            raise self._no_step(step, planned)
        return step, False

    def _propose(self, planned: PlannedStep, step: Step) -> Step:
        """Return the step after the next one's drafts were made. If that raises, on all ranks of the group, the step's
        requests that have not ended in it end with the error."""
        try:
            self.runner.propose(self.state, step, self.stream)
        except _NOT_OF_THE_RUNNER:
            raise
        except Exception as error:
            if not self._all_raised("propose", error):
                raise
            return self._failed(step, self._fed(planned), {"draft_num": 0}, "propose", error, ended=self._stopped)
        return step

    def _all_raised(self, method: str, error: Exception) -> bool:
        """Return whether all ranks of the group raised, once the device has done the runner's work. Its collectives end
        only if the other ranks make the same ones. Raises :class:`RunnerFailed` if that does not end, and
        :class:`hal_core.PluginError` for a primitive that the device's plugin has not written."""
        if (fault := unwritten(self.device, error)) is not None:
            raise fault from error
        with _working(self._what(method, error), error):
            self.stream.synchronize(TIMEOUTS.ring)
        return self.on_raised(method, error)

    def _what(self, method: str, error: Exception) -> str:
        runner, kind = type(self.runner).__name__, type(error).__name__
        return sendable(f"{runner}.{method} raised {kind}: {error} ({raised_at(error)})")

    def _fed(self, planned: PlannedStep) -> list[int]:
        """Return the slots that a step may have run."""
        slots: list[int] = planned.step.order(self.state.name)[planned.counts > 0].tolist()
        return slots

    def _stopped(self) -> set[int]:
        """Return the slots that have stopped when all work on the stream is done."""
        place = self.state.layout.fields["stop_flags"]
        part = ByteRange(place.offset, place.stride * self.state.sizes.num_slots)
        self.stream.synchronize(TIMEOUTS.ring)
        copied = self.device.copy_out(memory=self.state.memory, parts=(part,), stream=self.stream)
        copied.wait(TIMEOUTS.ring)
        return set(np.flatnonzero(self.state.copied_fields(copied.data[0], part)["stop_flags"]).tolist())

    def _failed(
        self,
        step: Step,
        slots: list[int],
        given: Mapping[str, int],
        method: str,
        error: Exception,
        ended: Callable[[], set[int]] = set,
    ) -> Step:
        """Return the step in which the requests of ``slots``, except those in ``ended``, end with the runner's
        exception, because it is unknown which of the runner's work the device has done. ``given``: values of fields
        for each slot. Raises :class:`RunnerFailed` if the device is broken too."""
        stream, what = self.stream, self._what(method, error)
        with _working(what, error):
            over = ended()
            slots = [slot for slot in slots if slot not in over]
            self._set(slots, stop_flags=True, **given)
            stream.synchronize(TIMEOUTS.ring)
        if not slots:  # else it is in the ends of their requests
            log.error("step %d: %s", step.number, what)
        log.debug("step %d: where the runner raised", step.number, exc_info=error)
        return replace(step, errors={**step.errors, **dict.fromkeys(slots, what)})

    def _set(self, slots: Iterable[int], **given: int) -> None:
        for slot in slots:
            for name, value in given.items():
                self.device.async_set_value(target=self.state.view(name)[slot], value=value, stream=self.stream)

    def _saved(self, step: Step) -> Step:
        """Return the step as its output is saved, in the order that the sink's readers expect."""
        if self._every_slot is None:
            return step
        return replace(step, orders={**step.orders, self.state.name: self._every_slot})

    def _no_step(self, given: object, planned: PlannedStep) -> PluginError:
        returned = f"step {given.number}" if isinstance(given, Step) else repr(given)
        what = f"{type(self.runner).__name__}.launch returned {returned} for step {planned.step.number}"
        return PluginError(what, cure="return step.step, or that with errors: dataclasses.replace(step.step, errors=…)")

    def _check_drafts(self, batch: TaskBatch) -> None:
        """Refuse another worker's drafts that a step could not feed; the hooks check everything else."""
        if not any(batch.plain["draft_counts"]):
            return
        size, why = self.state.sizes.block_size, ""
        for request, drafts, count in zip(batch.requests, batch.drafts, batch.plain["block_counts"], strict=True):
            if not self.state.speculative:
                why = "the worker's steps are plain and would not verify drafts"
            elif any(token >= self.vocab_size for token in drafts):
                why = f"drafts {list(drafts)} of {request.request_id!r} are not all below {self.vocab_size}"
            elif drafts and request.total + 1 + len(drafts) > count * size:
                why = f"{len(drafts)} drafts of {request.request_id!r} do not fit into its {count} blocks"
        if why:
            cure = "hand the request over without its drafts; the tokens are the same"
            raise InvalidValue(why, cure=cure, device=self.device.name, hook="insert_tasks", argument="tasks")


@contextlib.contextmanager
def _working(what: str, error: Exception) -> Iterator[None]:
    """Raise :class:`RunnerFailed`, because of a runner's ``error``, if the device is broken too."""
    try:
        yield
    except HalError as broken:
        cure = "mend the runner, then start again: a process cannot use a broken device any more"
        raise RunnerFailed(f"{what}, and the device is broken: {broken.what}", cure=cure) from error


def _every_slot(state: SlotState, sink: Sink) -> Int32s | None:
    """Return all slots of the state for a sink whose readers use batch ids, else None. Raises :class:`InvalidValue` if
    the sink has fewer entries than the state has slots."""
    if not (entries := entries_of(sink)):
        return None
    if (slots := state.sizes.num_slots) > entries:
        cure = f"have at most {entries} slots, or choose another layout or transport"
        raise InvalidValue(
            f"{slots} slots, and a message of the sink has {entries} entries", cure=cure, argument="--sink"
        )
    return np.arange(slots, dtype=np.int32)
