"""The sim device: the simulated accelerator under the contract, without host work that a device can do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import Capabilities, Counters, InvalidValue, Ticket, View
from hal_core.devices import AsyncStream

from hal_sim import writing
from hal_sim._native import MAX_RANK
from hal_sim.accelerator import Accelerator
from hal_sim.base import OnAccelerator
from hal_sim.communicator import SimCommunicator, job_name
from hal_sim.device_options import Options
from hal_sim.paddle_env import current_stream
from hal_sim.primitives import SimPrimitives
from hal_sim.records import Report
from hal_sim.stepping import StepKernel
from hal_sim.streams import Stream as RawStream
from hal_sim.targets import is_on_accelerator, loaded_paddle, resolve

if TYPE_CHECKING:
    from hal_core import Group, SlotState, Step, Stream


class SimDevice(OnAccelerator):
    """One simulated device. Targets are state views, :class:`SimTensor` and Paddle tensors on the accelerator."""

    name = "sim"
    capabilities = Capabilities(
        async_h2d=True,
        async_d2h=True,
        fused_scatter=True,
        pinned_host=True,
        can_hold_stream=True,
        collective="shared memory",
        async_update=True,
        several_memories=True,
        timed_events=True,
    )

    fault_cure = "fix the failed work (see Accelerator.races()), and open the device again"

    def __init__(self, index: int, options: Mapping[str, object]) -> None:
        chosen = Options.taken(options)
        self.accelerator = Accelerator(index)
        self._runtime = SimPrimitives(self.accelerator)
        super().__init__(index, self._runtime, chosen)
        self.steps = StepKernel(self.accelerator)
        self.job = chosen.job or job_name()
        self._own = self.stream()
        self._below = self._native_counts()

    # -- streams ------------------------------------------------------------------------------------------------

    @property
    def default_stream(self) -> AsyncStream:
        """Paddle's current stream if Paddle computes on this accelerator, else hal's own."""
        known = loaded_paddle()
        return self._own if known is None else self._adopted(current_stream(self.index, known[1]).handle)

    def foreign_stream(self, stream: object) -> AsyncStream:
        """Return a stream of this accelerator by its handle, or by an object with one (Paddle's)."""
        handle = stream if isinstance(stream, int) else getattr(stream, "handle", getattr(stream, "raw_stream", None))
        return self._adopted(handle) if isinstance(handle, int) else super().foreign_stream(stream)

    def _adopted(self, handle: int) -> AsyncStream:
        return self.wrap(handle, lambda: self._adopt(handle))

    def _adopt(self, handle: int) -> RawStream:
        raw = RawStream.adopt(handle)
        if raw.device != self.index:
            raise InvalidValue(
                f"stream {handle:#x} belongs to device {raw.device}",
                cure=f"give a stream of device {self.index}",
                device=self.located,
                argument="stream",
            )
        return raw

    @contextmanager
    def hold_stream(self, stream: Stream) -> Iterator[None]:
        """Let no work on ``stream`` begin until the context ends; an event recorded meanwhile has not passed."""
        own = self.own_stream(stream)
        with own.raw.held():
            # The accelerator's gate stops only work: this is some, placed before events.
            own.wait(self.upload_stream.record())
            yield

    # -- targets ------------------------------------------------------------------------------------------------

    def resolve(self, target: object) -> View:
        """Return a view over a tensor's own memory."""
        self.check_open()
        return target if isinstance(target, View) else resolve(self, target)

    def is_device_value(self, value: object) -> bool:
        """Return True for a tensor in the accelerator's memory."""
        return is_on_accelerator(value)

    # -- work ---------------------------------------------------------------------------------------------------

    def submit_value(self, target: View, value: np.ndarray[Any, Any] | np.generic, stream: Stream) -> Ticket:
        """Submit a fill, one upload, or an upload and a strided copy, depending on value and target."""
        shape = target.collapsed()[0]
        if target.size and not shape and not isinstance(value, np.ndarray):
            return writing.fill(self, target, value, self.own_stream(stream))
        if target.size and 0 < len(shape) < MAX_RANK:  # the elements of a run may take one axis more
            return writing.spread(self, target, value, self.own_stream(stream))
        return super().submit_value(target, value, stream)

    def copy_within(self, target: View, value: View, stream: Stream) -> Ticket:
        """Copy in one strided copy, or in two through intermediate memory."""
        return writing.copy(self, target, value, self.own_stream(stream))

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Launch one kernel over all slots, without the host."""
        self.check_open()
        own = self.own_stream(stream)
        self.order_after_reads(own, state.memory)
        self.steps.launch(state, own, speculative=step.speculative)
        return self.ticket(own)

    def open_communicator(self, group: Group) -> SimCommunicator:
        """Open the group over shared memory."""
        found = SimCommunicator(self, group)
        self._runtime.losses.append(found.failure)
        return found

    # -- counts and the checker ---------------------------------------------------------------------------------

    def probe_counts(self) -> Counters:
        """Return the same counts from the accelerator's own trace, for the conformance kit. They are the process's."""
        now = self._native_counts()
        return Counters(**{name: now[name] - self._below[name] for name in now})

    def _native_counts(self) -> dict[str, int]:
        counted = self.accelerator.counters()
        launches = counted["launches"] - counted["kernel_function"]  # advance, which does not write
        return {
            "submissions": counted["async_h2d"] + launches,
            "uploads": counted["async_h2d"],
            "launches": launches,
            "copies_out": counted["async_d2h"],
            "collectives": counted["broadcast"],
            "allocations": counted["allocate"],
        }

    def races(self) -> list[Report]:
        """Return the reports of the happens-before checker in this process."""
        return self.accelerator.races()
