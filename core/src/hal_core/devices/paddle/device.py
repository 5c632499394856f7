"""Devices that are reached through Paddle: what all of them share, and the synchronous one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...contract.capabilities import Capabilities
from ...errors import Unavailable
from ...memory.copies import CopyTicket, HostCopy
from ...memory.plan import WritePlan
from ...memory.views import View
from ...tickets import DONE, Ticket
from ..base import DeviceBase, plan_value
from ..ring_options import RingOptions
from ..staging import StagingRing
from ..sync import PASSED, SyncDevice
from ..update_by_copy import update_by_copy
from .memory import WORD, Bytes, PaddleMemory, Tensor, host_tensor, is_on, paddle_piece, resolve
from .ranks.collectives import open_collectives
from .scatters import COMMON, Candidates, find
from .staging import PaddleBlock
from .writing import Writer

if TYPE_CHECKING:
    from ...group import Group
    from ...memory.views import ByteRange, Memory
    from ...ranks.communicator import Communicator
    from ...slots.state import SlotState
    from ...slots.step import Step
    from ...streams import Event, Stream


class PaddlePlace(DeviceBase):
    """What the devices of a Paddle place share: memory, targets, plans by scatters, and the ring that they upload from.

    A subclass sets ``name``, calls :meth:`open_place` when its base is ready, and says what is different.
    ``candidates``: scatters to try at opening (:mod:`hal_core.devices.paddle.scatters`); ``blocking``: how copies are
    asked for.
    """

    candidates: ClassVar[Candidates] = COMMON
    blocking: ClassVar[bool] = False

    def open_place(self, place: Any, options: Mapping[str, object], capabilities: Capabilities) -> None:  # noqa: ANN401
        """Try out what the place can do, and make the staging ring. Raises :class:`Unavailable` with the cure."""
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
        """Views must share memory, or writing into one would write a copy (a Paddle flag can make them copies)."""
        memory = PaddleMemory.allocate(self, self.place, 64)
        if int(memory.bytes(8, 8).data_ptr()) != memory.address + 8:
            raise Unavailable(
                f"slices of a tensor on {self.place} are copies, not views",
                cure="set FLAGS_use_stride_kernel=1",
                device=self.name,
            )

    def _with_merges(self, capabilities: Capabilities) -> Capabilities:
        """Say which element widths this place cannot scatter: they cost a read of the words around them."""
        missing = [width for width in self.candidates if width not in self.scatters] + [
            width for width in COMMON if width not in self.candidates
        ]
        if not missing:
            return capabilities
        widths = " and ".join(str(width) for width in sorted(missing))
        why = f"no in-place scatter of {widths}-byte elements: the words around them are read back and written whole"
        reasons = dict(capabilities.fallbacks)
        for hook in ("insert_tasks", "async_set_value"):
            reasons[hook] = f"{reasons[hook]}; {why}" if hook in reasons else why
        return replace(capabilities, fallbacks=reasons)

    # -- what a kind of device says differently -----------------------------------------------------------------------

    @abstractmethod
    def current(self, stream: Stream) -> AbstractContextManager[None]:
        """Let Paddle put work on ``stream`` within the context."""

    @abstractmethod
    def before_write(self, memory: PaddleMemory, stream: Stream) -> None:
        """Order a write after what still reads the memory."""

    @abstractmethod
    def after_work(self, stream: Stream, keep: object) -> tuple[Event, Ticket]:
        """The event and the ticket of the work that was just put on ``stream`` and uses the memory of ``keep``."""

    @abstractmethod
    def read_now(self, source: Tensor, target: Bytes, stream: Stream) -> None:
        """Copy a contiguous tensor to the host, after the work on ``stream``, and wait."""

    def synchronize(self) -> None:
        """Wait for the place. Kernels of an accelerator are asynchronous even where its copies are not."""
        import paddle

        if not self.place.is_cpu_place():
            paddle.device.synchronize(self.place)

    # -- primitives ---------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> PaddleMemory:
        """A block of device memory, from Paddle's own allocator."""
        self.check_open()
        self.count("allocations")
        return PaddleMemory.allocate(self, self.place, nbytes)

    def resolve(self, target: object) -> View:
        """A view of a Paddle tensor on this place, sharing its memory."""
        return target if isinstance(target, View) else resolve(self, self.place, target)

    def tensor(self, view: View, framework: str = "") -> Tensor:
        """A Paddle tensor over a state's field; there are no others on this place."""
        self.check_open()
        assert isinstance(view.memory, PaddleMemory)
        if framework not in ("", "paddle"):
            raise Unavailable(
                f"its memory is Paddle's, and no tensor of {framework}", cure="ask for paddle", device=self.name
            )
        return paddle_piece(view.memory.base, view.memory.begin, view)

    def is_device_value(self, value: object) -> bool:
        """True for a Paddle tensor on this place; on the host's place a tensor is a host value like any other."""
        return not self.place.is_cpu_place() and is_on(self.place, value)

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """One upload, and at most one in-place scatter an element width."""
        self.check_open()
        return DONE if plan.empty else self.writer.submit(plan, stream)

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """The reference on a copy of the state, written back as one plan."""
        self.count("host_waits")
        return update_by_copy(self, state, step, stream)

    def open_communicator(self, group: Group) -> Communicator:
        """The group over the library that the capabilities name; where they name none, there are no collectives."""
        library = self.capabilities.collective
        return open_collectives(self, group, library) if library else super().open_communicator(group)

    def submit_value(self, target: View, value: np.ndarray[Any, Any] | np.generic, stream: Stream) -> Ticket:
        """One upload, straight to a contiguous target; else one scatter after it, of elements of the target's width."""
        return self.writer.submit(plan_value(target, value), stream, target.dtype.itemsize)


class PaddleDevice(PaddlePlace, SyncDevice):
    """One synchronous place: what it is asked for is done when the call returns. A subclass sets ``name``."""

    blocking: ClassVar[bool] = True

    def __init__(self, index: int, place: Any, options: Mapping[str, object], capabilities: Capabilities) -> None:  # noqa: ANN401
        super().__init__(index)
        self.open_place(place, options, capabilities)

    def current(self, stream: Stream) -> AbstractContextManager[None]:
        """There is one order only."""
        return nullcontext()

    def before_write(self, memory: PaddleMemory, stream: Stream) -> None:
        """Nothing reads the memory any more."""

    def after_work(self, stream: Stream, keep: object) -> tuple[Event, Ticket]:
        """Wait for the place."""
        self.synchronize()
        return PASSED, DONE

    def read_now(self, source: Tensor, target: Bytes, stream: Stream) -> None:
        """A blocking copy."""
        self.count("copies_out")
        self.count("host_waits")
        host_tensor(target).copy_(source, True)

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy byte ranges; they are there on return."""
        self.check_open()
        assert isinstance(memory, PaddleMemory)
        found = [np.empty(part.nbytes, np.uint8) for part in parts]
        for part, data in zip(parts, found, strict=True):
            if part.nbytes:
                host_tensor(data).copy_(memory.bytes(part.offset, part.nbytes), True)
        self.count("copies_out", len(parts))
        return HostCopy(found)

    def close(self) -> None:
        """Wait for the staging ring, then forget what was handed out; whoever holds memory keeps it alive."""
        if not self._closed:
            super().close()
            self.staging.close()
