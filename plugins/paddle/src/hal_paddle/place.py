"""The common base of devices on a place of Paddle: memory, targets, plans by scatters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from hal_core import DONE, Ticket, Unavailable, View
from hal_core.devices import HOST, RingOptions, StagingRing, paddle_piece, plan_value

from .collectives import open_collectives
from .paddle_memory import WORD, PaddleMemory, Tensor, is_on, resolve
from .process_groups import maker_on
from .scatter_probe import COMMON, Candidates, find
from .staging_block import PaddleBlock
from .work import WorkingPlace
from .writer import Writer

if TYPE_CHECKING:
    from hal_core import Capabilities, Group, SlotState, Step, Stream
    from hal_core.devices import Communicator, Maker, WritePlan


class PaddlePlace(WorkingPlace):
    """Base of the devices of a Paddle place: memory, targets, plans by scatters, and the ring that they upload from.

    A subclass sets ``name``, calls :meth:`open_place` when its base is ready, and implements the abstract methods.
    ``candidates``: scatters to try at opening (:mod:`hal_paddle.scatter_probe`).
    """

    candidates: ClassVar[Candidates] = COMMON

    def open_place(self, place: Any, options: Mapping[str, object], capabilities: Capabilities) -> None:  # noqa: ANN401
        """Test the place's abilities, and create the staging ring. Raises :class:`Unavailable` with the cure."""
        chosen = RingOptions.of(self.name, options)
        self.place = place
        self._check_views()
        self.scatters = find(place, self.candidates, self.synchronize)
        if WORD not in self.scatters:
            tried = ", ".join(f"{operator} of {dtype}" for operator, dtype in self.candidates[WORD])
            raise Unavailable(
                f"Paddle has no working in-place scatter of int64 on {place} (tried {tried})",
                cure="use a Paddle build that registers one",
                device=self.name,
            )
        self.capabilities = self._with_merges(capabilities)
        self.staging = StagingRing(partial(PaddleBlock, place), chosen)
        self.writer = Writer(self)

    def _check_views(self) -> None:
        """Check that views share memory (a Paddle flag can make them copies, and writes would then be lost)."""
        memory = PaddleMemory.allocate(self, self.place, 64)
        if int(memory.bytes(8, 8).data_ptr()) != memory.address + 8:
            raise Unavailable(
                f"slices of a tensor on {self.place} are copies, not views",
                cure="set FLAGS_use_stride_kernel=1",
                device=self.name,
            )

    def _with_merges(self, capabilities: Capabilities) -> Capabilities:
        """Add the element widths that this place cannot scatter to the fallbacks: they cost a read of the surrounding
        words."""
        missing = [width for width in self.candidates if width not in self.scatters] + [
            width for width in COMMON if width not in self.candidates
        ]
        if not missing:
            return capabilities
        widths = " and ".join(str(width) for width in sorted(missing))
        why = f"no in-place scatter of {widths}-byte elements: the surrounding words are read back and written whole"
        reasons = dict(capabilities.fallbacks)
        for hook in ("insert_tasks", "async_set_value"):
            reasons[hook] = f"{reasons[hook]}; {why}" if hook in reasons else why
        return replace(capabilities, fallbacks=reasons)

    def synchronize(self) -> None:
        """Wait for the place. Kernels of an accelerator are asynchronous even if its copies are not."""
        import paddle

        if not self.place.is_cpu_place():
            paddle.device.synchronize(self.place)

    # -- primitives ---------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> PaddleMemory:
        """Allocate device memory with Paddle's own allocator."""
        self.check_open()
        self.count("allocations")
        return PaddleMemory.allocate(self, self.place, nbytes)

    def resolve(self, target: object) -> View:
        """Return a view of a Paddle tensor on this place, sharing its memory."""
        return target if isinstance(target, View) else resolve(self, self.place, target)

    def tensor(self, view: View, framework: str = "") -> Tensor:
        """Return a Paddle tensor over a state's field; other frameworks are not supported on this place."""
        self.check_open()
        assert isinstance(view.memory, PaddleMemory)
        if framework not in ("", "paddle"):
            raise Unavailable(
                f"its memory is Paddle's, so {framework} can have no tensor of it",
                cure="ask for paddle",
                device=self.name,
            )
        return paddle_piece(view.memory.base, view.memory.begin, view)

    def is_device_value(self, value: object) -> bool:
        """Return True for a Paddle tensor on this place; on the host's place a tensor is an ordinary host value."""
        return not self.place.is_cpu_place() and is_on(self.place, value)

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Upload once, and scatter in place at most once for each element width."""
        self.check_open()
        return DONE if plan.empty else self.writer.submit(plan, stream)

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Run the reference on a copy of the state and write it back as one plan."""
        self.count("host_waits")
        return super().update_inputs(state, step, stream)

    @property
    def groups_by(self) -> str:
        """The library of :attr:`make_group`'s groups: the one that the capabilities name."""
        return self.capabilities.collective

    @property
    def make_group(self) -> Maker | None:
        """Create a group over the device's library; ``make`` of :func:`hal_core.devices.open_groups`. None over hal's
        own, or without a library."""
        library = self.capabilities.collective
        return maker_on(self.place, library) if library not in ("", HOST) else None

    def open_communicator(self, group: Group) -> Communicator:
        """Open the group over the library named by the capabilities; without one there are no collectives."""
        if library := self.capabilities.collective:
            return open_collectives(self, group, library, self.make_group)
        return super().open_communicator(group)

    def submit_value(self, target: View, value: np.ndarray[Any, Any] | np.generic, stream: Stream) -> Ticket:
        """Upload once, straight to a contiguous target, or followed by one scatter of elements of the target's
        width."""
        return self.writer.submit(plan_value(target, value), stream, target.dtype.itemsize)
