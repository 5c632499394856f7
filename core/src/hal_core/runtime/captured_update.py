"""``update_inputs`` inside a graph of the worker: captured once, replayed with each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import InvalidValue
from .policy import advanced, check_state, check_update

if TYPE_CHECKING:
    from ..slots.state import SlotState
    from ..slots.step import Step
    from ..streams import Stream
    from ..tickets import Ticket
    from .bound import BoundDevice


class CapturedUpdate:
    """The work of :meth:`BoundDevice.update_inputs` in a graph that the worker captures on ``stream``.

    It is created between the beginning and the end of a capture, in place of a call of ``update_inputs``; no work is
    executed or booked. The graph reads and writes the state's memory wherever it is launched, so each launch must use
    :meth:`replay`. The state is kept alive; the device must stay open.

    :param speculative: whether the steps that replay it verify drafts.
    :raises CapabilityMissing: if the device has no graphs.
    :raises InvalidValue: for a stream that is not being captured, and for drafts on a state without room for them.
    """

    def __init__(self, bound: BoundDevice, *, state: SlotState, stream: Stream, speculative: bool = False) -> None:
        self.state, self.speculative, self._bound = state, speculative, bound
        bound._call("capture_update", stream, self._capture, (stream,))

    def replay(self, *, step: Step, stream: Stream, launch: Callable[[], object]) -> Ticket:
        """Launch the graph once, as the update of ``step``, with the same checks, order and booking as an update.

        :param step: the step that the graph computes; its ``speculative`` must equal the capture's.
        :param stream: where ``launch`` puts the graph; it waits for copies out that still read the state.
        :param launch: puts the graph on ``stream``. If it returns an event of hal (``stream.record()``), that marks the
            end of the graph; for any other value an event is recorded here.
        :return: done when the event has passed.
        :raises InvalidValue: as ``update_inputs``, for a step of the other kind, and for a stream that is being
            captured; no graph was launched.
        """
        return self._bound._call("update_inputs", stream, self._replay, (self.state, step, launch, stream))

    def _capture(self, stream: Stream) -> None:
        device = self._bound.device
        check_state(device, self.state)
        if self.speculative and not self.state.speculative:
            cure = "give StateConfig(max_draft_tokens=…)"
            raise InvalidValue("a speculative update of a state without drafts", cure=cure, argument="speculative")
        device.capture_update(self.state, stream, speculative=self.speculative)

    def _replay(self, state: SlotState, step: Step, launch: Callable[[], object], stream: Stream) -> Ticket:
        device = self._bound.device
        order = check_update(device, state, step)
        if step.speculative != self.speculative:
            kind = "a speculative" if step.speculative else "a plain"
            raise InvalidValue(
                f"{kind} step for a graph with the update of the other kind", cure="capture both", argument="step"
            )
        device.check_stream(stream)
        device.order_after_reads(stream, state.memory)
        given, recorded = launch(), device.event(stream)
        event = given if isinstance(given, type(recorded)) else recorded
        advanced(state, step, order, event)
        return device.replayed(event)
