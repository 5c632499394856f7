"""The device of :class:`hal_torch_device.TorchPlugin`: hal's asynchronous base, whose memory is torch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from hal_core import DONE, Capabilities, Counters, InvalidValue, Ticket, Unavailable, View
from hal_core.devices import (
    DLPACK_CPU,
    DLPACK_CUDA,
    STEP_FIELDS,
    AsyncCopy,
    AsyncDevice,
    AsyncStream,
    AsyncTicket,
    DeviceMemory,
    Mode,
    RingOptions,
    ScatterColumns,
    SpanMemory,
    WritePlan,
    across,
    check_index,
    check_resolved,
    dtype_of,
    extent,
    tensor_over,
)

from .moves import StagedMoves
from .primitives import INTEGERS, Move, TorchPrimitives
from .stepping import SteppedSlots, slots_of

if TYPE_CHECKING:
    from hal_core import SlotState, Step, Stream

    from . import TorchPlugin


class DoneTicket(AsyncTicket):
    """The ticket of a backend without events: its work was done when the call returned."""

    __slots__ = ()
    mode: Mode = "sync"


class DoneCopy(AsyncCopy):
    """The same for a copy out."""

    __slots__ = ()
    mode: Mode = "sync"


def module_of(plugin: type[TorchPlugin]) -> Any:  # noqa: ANN401 (torch.cuda, or another backend's module)
    """Return torch's module of the plugin's device type. Raises :class:`Unavailable` where torch finds no such chip."""
    try:
        if plugin.backend:
            import_module(plugin.backend)
        module = torch.get_device_module(plugin.kind)
    except (ImportError, RuntimeError) as error:
        raise Unavailable(str(error).splitlines()[0], cure=plugin.cure, device=plugin.name) from error
    if not module.is_available():
        raise Unavailable(f"torch {torch.__version__} finds no {plugin.kind}", cure=plugin.cure, device=plugin.name)
    return module


class TorchDevice(AsyncDevice):
    """One device of torch, or torch's CPU in its place; what the backend can do is tried when it is opened."""

    primitives_type: ClassVar[type[TorchPrimitives]] = TorchPrimitives

    def __init__(self, plugin: type[TorchPlugin], index: int, options: Mapping[str, object]) -> None:
        substitute = plugin.substituted()
        self.name, self.kind = plugin.shown(), plugin.kind
        chosen = RingOptions.of(self.name, options)
        if substitute or plugin.kind == "cpu":
            count, self.device = 1, torch.device("cpu")
        else:
            count, self.device = int(module_of(plugin).device_count()), torch.device(plugin.kind, index)
        check_index(self.name, index, count)
        kinds = {"cpu": DLPACK_CPU, "cuda": DLPACK_CUDA}
        self.dlpack_type = kinds.get(self.device.type, 0)  # type: ignore[misc]  # of the class where all are of one type
        self.runtime = self.primitives_type(self.device, plugin.new_stream)
        if 1 not in self.runtime.scatters:
            what = f"torch {torch.__version__} writes no bytes by index on {plugin.kind}: {self.runtime.why}"
            raise Unavailable(what, cure=plugin.cure, device=self.name)
        self.capabilities = self.found_capabilities(substitute)
        super().__init__(index, self.runtime, chosen)
        if not self.runtime.events:
            self.ticket_type, self.copy_type = DoneTicket, DoneCopy
        self._columns: WeakKeyDictionary[DeviceMemory, dict[tuple[int, int], ScatterColumns]] = WeakKeyDictionary()
        self._stepped: WeakKeyDictionary[SlotState, SteppedSlots] = WeakKeyDictionary()

    def found_capabilities(self, substitute: str) -> Capabilities:
        """Return what the backend was seen to do, with a reason for all that it was not."""
        runtime = self.runtime
        reasons = {"broadcast_tokens": "no group of torch.distributed is opened: one rank only"}
        if not runtime.events:
            why = f"each call waits on torch's {runtime.device.type}: {runtime.why['events']}"
            reasons |= dict.fromkeys(("async_set_value", "insert_tasks", "save_output"), why)
        elif missing := [width for width in INTEGERS if width not in runtime.scatters]:
            reasons["insert_tasks"] = f"no indexed write of {missing} bytes: they are written in narrower ones"
        return Capabilities(
            async_h2d=runtime.events,
            async_d2h=runtime.events,
            fused_scatter=False,  # an upload, and a write for each width
            pinned_host=runtime.pinned,
            can_hold_stream=False,
            several_memories=True,  # one upload, and a write for each storage and width
            async_update=runtime.events,
            collective="",
            fallbacks=reasons,
            substituted=substitute,
        )

    # -- streams ------------------------------------------------------------------------------------------------------

    @property
    def default_stream(self) -> Stream:
        """The stream on which torch computes now."""
        if not self.runtime.events:
            return super().default_stream
        return self.foreign_stream(self.runtime.module.current_stream(self.device))

    def foreign_stream(self, stream: object) -> AsyncStream:
        """Return a stream of torch as one of this device.

        :raises InvalidValue: for an object that is no stream of torch's on this device.
        """
        raw = getattr(stream, "raw", stream)
        if not self.runtime.events or not isinstance(raw, torch.Stream) or raw.device != self.device:
            return super().foreign_stream(stream)
        return self.wrap(raw.stream_id, lambda: self._of_backend(raw))

    def _of_backend(self, stream: torch.Stream) -> Any:  # noqa: ANN401 (a stream of torch.cuda, or another backend's)
        """Return the stream as its backend's own class, whose events take no other."""
        kind = getattr(self.runtime.module, "Stream", torch.Stream)
        if isinstance(stream, kind):
            return stream
        names = ("stream_id", "device_index", "device_type")
        return kind(**{name: getattr(stream, name) for name in names})

    def check_stream(self, stream: Stream) -> None:
        """Raise :class:`InvalidValue` for a stream that is being captured into a graph."""
        captures = getattr(self.runtime.module, "is_current_stream_capturing", None)
        if not self.runtime.events or captures is None:
            return
        with self.runtime.current(self.own_stream(stream).raw):
            if captures():
                what, cure = "the stream is being captured into a graph", "call hal's hooks outside the capture"
                raise InvalidValue(what, cure=cure, device=self.located, argument="stream")

    def before_consumer(self, stream: int | None) -> None:
        """Make torch's default stream, or the one with the handle ``stream``, wait for the current one (DLPack)."""
        if not self.runtime.events or stream == -1:
            return
        default = self.runtime.module.default_stream(self.device)
        other = torch.cuda.ExternalStream(stream, device=self.device) if (stream or 0) > 2 else default
        if other.stream_id != self.runtime.module.current_stream(self.device).stream_id:
            self.foreign_stream(other).wait(self.default_stream.record())

    # -- tensors ------------------------------------------------------------------------------------------------------

    def resolve(self, target: object) -> View:
        """Return a view over a tensor's own memory, whose storage is kept until the work on it is done.

        :raises InvalidValue: for an object that is no tensor on this device.
        """
        if isinstance(target, View):
            return target
        if not isinstance(target, torch.Tensor) or target.device != self.device:
            where = f"the tensor is on {target.device}" if isinstance(target, torch.Tensor) else type(target).__name__
            raise InvalidValue(
                f"{where}, but the target must be a torch tensor on {self.device}",
                cure="give a view of a state, or a tensor there",
                argument="target",
            )
        check_resolved(target, "target")
        dtype = dtype_of(str(target.dtype))
        shape, strides = tuple(target.shape), tuple(step * dtype.itemsize for step in target.stride())
        low, end = extent(shape, strides, dtype.itemsize)
        storage = self.runtime.memory.storage_of(target.detach())
        memory = DeviceMemory(self, target.data_ptr() + low, end - low, keep=storage)
        return View(memory, -low, shape, strides, dtype)

    def is_device_value(self, value: object) -> bool:
        """Return True for a tensor on this device; on the CPU a tensor is an ordinary host value."""
        return self.device.type != "cpu" and isinstance(value, torch.Tensor) and value.device.type == self.device.type

    def tensor(self, view: View, framework: str = "") -> Any:  # noqa: ANN401
        """Return a torch tensor over a view's memory; another framework's by DLPack. Raises for reversed axes."""
        self.check_open()
        if framework not in ("", "torch") or min(view.strides, default=0) < 0:
            return tensor_over(view, framework or "torch")
        return self._bits(view)[0].view(getattr(torch, view.dtype.name))

    def _bits(self, view: View, *, elements: bool = True) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Return a view's bits as integers of torch, and its reversed axes, which torch lacks: they are read forwards.

        ``elements`` false: as bytes, with one more axis, for what lies on no whole elements.
        """
        size, (low, high) = view.dtype.itemsize, view.bounds()
        flat = self.runtime.bytes(self.address_of(view.memory) + low, high - low)
        shape, steps = [*view.shape], [abs(step) for step in view.strides]
        if elements:
            flat, steps = flat.view(INTEGERS[size]), [step // size for step in steps]
        else:
            shape, steps = [*shape, size], [*steps, 1]
        reversed_axes = tuple([axis for axis, step in enumerate(view.strides) if step < 0])
        return flat.as_strided(shape, steps, flat.storage_offset()), reversed_axes

    def _on_elements(self, view: View) -> bool:
        """Return whether a view's elements lie on whole elements of its storage."""
        found = self.runtime.memory.at(self.address_of(view.memory) + view.bounds()[0], 0)
        assert found is not None
        steps = [step for count, step in zip(view.shape, view.strides, strict=True) if count > 1]
        return not any(step % view.dtype.itemsize for step in [*steps, found[0].storage_offset() + found[1]])

    # -- work ---------------------------------------------------------------------------------------------------------

    def register_state(self, state: SlotState) -> None:
        """Make what outputs and steps of the state need. The map of its records is applied on the host, as indices."""
        super().register_state(state)
        self._stepped[state] = slots_of(state, self.tensor, STEP_FIELDS)
        self._stepped[state].load_kernels()

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Upload once, and write at most once for each element width; long runs are operations of their own."""
        return self.submit_all([plan], stream)

    def submit_all(self, plans: Sequence[WritePlan], stream: Stream) -> Ticket:
        """The same for several memories: one upload, and one write for each storage and width."""
        self.check_open()
        plans = [plan for plan in plans if not plan.empty]
        if not plans:
            return DONE
        stores: dict[int, tuple[torch.Tensor, list[WritePlan]]] = {}
        for plan in plans:
            found = self.runtime.memory.at(self.address_of(plan.memory), plan.memory.nbytes)
            assert found is not None
            stores.setdefault(id(found[0]), (found[0], []))[1].append(plan)
        staged = StagedMoves(sorted(self.runtime.scatters))
        for storage, some in stores.values():
            plan = some[0] if len(some) == 1 else across(some, self._span(some))
            shift = plan.memory.address - storage.data_ptr()
            staged.add(plan, storage, shift, self._columns_of(plan, shift, max(staged.widths)))
        staged.close()
        memory = plans[0].memory if len(plans) == 1 else self._span(plans)
        return self.launch_staged(staged.nbytes, staged.fill, staged.moves, memory, self.own_stream(stream))

    def _span(self, plans: Sequence[WritePlan]) -> SpanMemory:
        parts = [(plan.memory.address, plan.memory.address + plan.memory.nbytes) for plan in plans]
        return SpanMemory(self, parts, keep=[plan.memory for plan in plans])

    def _columns_of(self, plan: WritePlan, shift: int, widest: int) -> ScatterColumns | None:
        if plan.records is None:
            return None
        assert isinstance(plan.memory, DeviceMemory)
        columns = self._columns.setdefault(plan.memory, {})
        key = id(plan.records.scatter_map), shift
        if key not in columns:
            columns[key] = ScatterColumns(plan.records.scatter_map, shift, widest)
        return columns[key]

    def submit_value(self, target: View, value: np.ndarray[Any, Any] | np.generic, stream: Stream) -> Ticket:
        """Upload, straight to a contiguous target; else one strided copy, or one fill. No indices are needed."""
        self.check_open()
        if 0 in target.shape:
            return DONE
        if isinstance(value, np.ndarray) and not target.collapsed()[0] and 0 < value.nbytes <= self.staging.limit:
            return super().submit_value(target, value, stream)
        elements = self._on_elements(target)
        if not elements and not isinstance(value, np.ndarray):
            value = np.full(target.shape, value)
        to, reversed_axes = self._bits(target, elements=elements)
        staged = StagedMoves(())
        if isinstance(value, np.ndarray):
            staged.copy(to, np.ascontiguousarray(np.flip(value, reversed_axes)).reshape(-1).view(np.uint8))
        else:
            staged.moves.append(Move(to, int.from_bytes(value.tobytes(), "little", signed=value.itemsize > 1)))
        return self.launch_staged(staged.nbytes, staged.fill, staged.moves, target.memory, self.own_stream(stream))

    def copy_within(self, target: View, value: View, stream: Stream) -> Ticket:
        """Copy between two views by torch, in stream order."""
        self.check_open()
        own = self.own_stream(stream)
        self.order_after_reads(own, target.memory)
        elements = self._on_elements(target) and self._on_elements(value)
        source, turned = self._bits(value, elements=elements)
        to, reversed_axes = self._bits(target, elements=elements)

        def move() -> None:
            taken = source.flip(turned) if turned else source.clone(memory_format=torch.contiguous_format)
            taken = taken.reshape(to.shape)
            to.copy_(taken.flip(reversed_axes) if reversed_axes else taken)

        self.runtime.run(own.raw, move, "launches")
        self.runtime.count("launches")
        return self.ticket(own)

    def probe_counts(self) -> Counters:
        """What was given to torch, for the conformance kit; an update is no write, so it does not count."""
        ran = self.runtime.ran
        return Counters(ran["uploads"] + ran["launches"], ran["uploads"], ran["launches"], ran["copies_out"])

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Operations over all slots, in stream order; the host takes no part."""
        self.check_open()
        own = self.own_stream(stream)
        self.order_after_reads(own, state.memory)
        stepped = self._stepped[state]
        self.runtime.run(own.raw, lambda: stepped.update(speculative=step.speculative), "updates")
        return self.ticket(own)
