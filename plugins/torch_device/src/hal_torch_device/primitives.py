"""hal's primitives over ``torch.Stream``, ``torch.Event`` and tensors of bytes. Addresses are looked up in the tensors.

Facts of torch 2.11 to 2.13: its caching allocators know the stream on which memory was allocated, and no other. A copy
from pageable memory waits for its stream. torch's CPU records no events, and pins no memory without an accelerator.
"""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from hal_core import OutOfMemory
from hal_core.devices import Primitives

ALIGNMENT = 256
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By element width, the type as which bits are moved."""
OPERATORS = ("index_copy_", "index_put_", "scatter_")
"""In-place writes of elements, best first. ``index_put_`` is slower where it sorts, ``scatter_`` where it is atomic."""
numbers = count(1)
"""Numbers of streams without a handle."""


class Blocks:
    """The tensors of bytes in which addresses lie, one for each storage. They are held weakly."""

    def __init__(self) -> None:
        self._found: dict[int, weakref.ref[torch.Tensor]] = {}
        self._begins: list[int] = []

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take a tensor of bytes in, and return it."""
        self._found = {at: ref for at, ref in list(self._found.items()) if ref() is not None}
        self._found[tensor.data_ptr()] = weakref.ref(tensor)
        self._begins = sorted(self._found)
        return tensor

    def storage_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a foreign tensor's storage."""
        storage = tensor.untyped_storage()
        ref = self._found.get(storage.data_ptr())
        known = ref() if ref is not None else None
        if known is not None and known.numel() == storage.nbytes():
            return known
        made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return self.add(made.set_(storage, 0, (storage.nbytes(),), (1,)))

    def at(self, address: int, nbytes: int) -> tuple[torch.Tensor, int] | None:
        """Return the tensor that has these bytes, and where they begin in it."""
        number = bisect_right(self._begins, address) - 1
        if number >= 0:
            begin = self._begins[number]
            tensor = self._found[begin]()
            if tensor is not None and address + nbytes <= begin + tensor.numel():
                return tensor, address - begin
        return None


@dataclass(frozen=True)
class Scatter:
    """An in-place write of elements that works on this backend: ``values[i]`` to ``target[indices[i]]``."""

    operator: str

    def put(self, target: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Write. ``target``, ``values``: flat, of one type; ``indices``: int64."""
        if self.operator == "index_copy_":
            target.index_copy_(0, indices, values)
        elif self.operator == "index_put_":
            target.index_put_((indices,), values)
        else:
            target.scatter_(0, indices, values)


@dataclass(frozen=True)
class Move:
    """One operation of a launch on ``target``, a view of its storage: a fill with ``value``; a copy of the staged
    block's bytes from ``values`` on; or, with ``indices`` (a byte of the block), a scatter of ``count`` elements from
    there."""

    target: torch.Tensor
    value: int | None = None
    values: int = 0
    indices: int = -1
    count: int = 0


class TorchPrimitives(Primitives):
    """One device of torch. ``events``: streams and events work; ``pinned``: host memory can be locked; ``why``: the
    backend's own words for what does not work."""

    def __init__(self, device: torch.device, new_stream: Callable[[torch.device], Any]) -> None:
        self.device, self.memory, self.host = device, Blocks(), Blocks()
        self.module: Any = torch.get_device_module(device)
        self.owned: dict[int, torch.Tensor] = {}
        self.locked: dict[int, torch.Tensor] = {}
        self.why: dict[str, str] = {}
        self.ran: Counter[str] = Counter()
        """What was given to torch, by the names of :class:`hal_core.Counters` and "updates"."""
        self._new_stream = new_stream
        self._events = getattr(self.module, "Event", None)
        self.pinned = self._works("pinned", self._try_pinned)
        self.events = self._works("events", self._try_events)
        if self.events and not self.pinned:  # a copy from pageable memory waits for its stream
            self.events, self.why["events"] = False, f"copies wait: {self.why['pinned']}"
        self.rerecords = device.type == "cuda"  # type: ignore[misc]  # documented there alone; each class has one type
        # On a stream that only hal has: a caching allocator may hand out what its own stream's kernels still use.
        self._allocating: Any = new_stream(device) if self.events else None
        self.scatters = {width: found for width in INTEGERS if (found := self._scatter(width))}
        self._load_kernels()

    # -- what works here, tried ---------------------------------------------------------------------------------------

    def _works(self, name: str, check: Callable[[], object]) -> bool:
        try:
            check()
        except Exception as error:  # noqa: BLE001 (each backend has its own; the words are kept for the reasons)
            self.why[name] = str(error).splitlines()[0]
            return False
        return True

    def _try_events(self) -> None:
        stream = self._new_stream(self.device)
        event = stream.record_event()  # torch's own: on a CPU vLLM puts a class of Python's in the place of torch.Event
        stream.wait_event(event)
        event.synchronize()

    def _try_pinned(self) -> None:
        if not torch.empty(64, dtype=torch.uint8, pin_memory=True).is_pinned():
            raise RuntimeError("pin_memory gave pageable memory")

    def _scatter(self, width: int) -> Scatter | None:
        """Return the first operator that writes elements of this width as it must."""
        for operator in OPERATORS:
            if self._works(f"{operator} of {width} bytes", partial(self._try_scatter, Scatter(operator), width)):
                return Scatter(operator)
        return None

    def _try_scatter(self, scatter: Scatter, width: int) -> None:
        """Write elements 5 and 2 of some memory, and compare every byte."""
        target = torch.arange(64, dtype=torch.uint8, device=self.device)
        values = torch.arange(128, 128 + 2 * width, dtype=torch.uint8, device=self.device)
        indices = torch.tensor([5, 2], device=self.device)
        should, written = target.cpu().clone(), values.cpu()
        should[5 * width : 6 * width], should[2 * width : 3 * width] = written[:width], written[width:]
        scatter.put(target.view(INTEGERS[width]), indices, values.view(INTEGERS[width]))
        if not torch.equal(target.cpu(), should):
            raise RuntimeError("it wrote other bytes")

    def _load_kernels(self) -> None:
        """Make each move once: a backend may load a kernel when it is first launched, and then waits for streams that
        are held."""
        for dtype in INTEGERS.values():
            target, values = (torch.zeros(64, dtype=dtype, device=self.device) for _ in range(2))
            strided = target.as_strided((4, 3, 2), (16, 4, 2))
            for one in (target, strided):
                one.fill_(1)
                one.copy_(values[: one.numel()].view(one.shape))
                one.copy_(one.clone(memory_format=torch.contiguous_format).flip(0))
        self.module.synchronize()

    # -- streams and events -------------------------------------------------------------------------------------------

    def current(self, stream: Any) -> AbstractContextManager[Any]:  # noqa: ANN401 (a torch.Stream)
        """Make torch queue its work on ``stream``."""
        if not self.events:
            return nullcontext()
        entered: AbstractContextManager[Any] = self.module.stream(stream)
        return entered

    def stream_create(self) -> Any:  # noqa: ANN401 (a torch.Stream, or any object where calls are done at their return)
        return self._new_stream(self.device) if self.events else object()

    def stream_handle(self, stream: Any) -> int:  # noqa: ANN401 (as above)
        return int(stream.stream_id) if self.events else next(numbers)

    def stream_wait(self, stream: Any, event: Any) -> None:  # noqa: ANN401 (torch's)
        if self.events:
            stream.wait_event(event)

    def event_create(self) -> Any:  # noqa: ANN401 (a torch.Event, or None where calls are done at their return)
        if not self.events:
            return None
        return torch.Event(device=self.device) if self._events is None else self._events()

    def event_record(self, event: Any, stream: Any) -> None:  # noqa: ANN401 (torch's)
        if self.events:
            event.record(stream)
        else:
            self.module.synchronize()

    def event_query(self, event: Any) -> bool:  # noqa: ANN401 (torch's)
        return event is None or bool(event.query())

    # -- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        with self.current(self._allocating):
            return _kept(self.memory, self.owned, nbytes, device=self.device)

    def free(self, address: int) -> None:
        del self.owned[address]

    def allocate_host(self, nbytes: int) -> int | None:
        if not self.pinned:
            return None
        return _kept(self.host, self.locked, nbytes, pin_memory=True)

    def free_host(self, address: int) -> None:
        del self.locked[address]

    def bytes(self, address: int, nbytes: int) -> torch.Tensor:
        """Return device memory as uint8."""
        found = self.memory.at(address, nbytes)
        assert found is not None, f"{nbytes} bytes at {address:#x} lie in no tensor"
        return found[0][found[1] : found[1] + nbytes]

    def host_bytes(self, address: int, nbytes: int) -> torch.Tensor:
        """Return host memory as uint8: a part of a locked tensor, or pageable."""
        found = self.host.at(address, nbytes)
        if found is not None:
            return found[0][found[1] : found[1] + nbytes]
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    # -- work ---------------------------------------------------------------------------------------------------------

    def run(self, stream: Any, work: Callable[[], object], name: str) -> None:  # noqa: ANN401 (torch's)
        """Queue the operations of ``work`` on ``stream``, counted as ``name``."""
        self.ran[name] += 1
        with self.current(stream):
            work()

    def copy_in(self, target: int, source: int, nbytes: int, stream: Any) -> None:  # noqa: ANN401 (torch's)
        to, data = self.bytes(target, nbytes), self.host_bytes(source, nbytes)
        self.run(stream, partial(to.copy_, data, non_blocking=True), "uploads")

    def copy_out(self, target: int, source: int, nbytes: int, stream: Any) -> None:  # noqa: ANN401 (torch's)
        to, data = self.host_bytes(target, nbytes), self.bytes(source, nbytes)
        self.run(stream, partial(to.copy_, data, non_blocking=True), "copies_out")

    def launch(self, launch: Sequence[Move], block: int, stream: Any) -> None:  # noqa: ANN401 (torch's)
        """Make the moves. The caller counts the first."""
        for number, move in enumerate(launch):
            self.run(stream, self._work(move, block), "launches")
            if number:
                self.count("launches")

    def _work(self, move: Move, block: int) -> Callable[[], object]:
        target = move.target
        if move.value is not None:
            return partial(target.fill_, move.value)
        elements = target.numel() if move.indices < 0 else move.count
        values = self.bytes(block + move.values, elements * target.itemsize).view(target.dtype)
        if move.indices < 0:
            return partial(target.copy_, values.view(target.shape))
        indices = self.bytes(block + move.indices, elements * 8).view(torch.int64)
        return partial(self.scatters[target.itemsize].put, target, indices, values)


def _kept(blocks: Blocks, owners: dict[int, torch.Tensor], nbytes: int, **options: Any) -> int:  # noqa: ANN401 (torch's)
    """Return the aligned address of new memory, whose tensor ``owners`` keeps: all of its storage, as
    :meth:`Blocks.storage_of` would make of a tensor in it."""
    try:
        base = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, **options)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise OutOfMemory(str(error).splitlines()[0], cure="give less, or free memory") from error
    address = -(-int(base.data_ptr()) // ALIGNMENT) * ALIGNMENT
    owners[address] = blocks.add(base)
    return address
