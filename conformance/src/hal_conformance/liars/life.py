"""Liars about a device's life: memory and what is left of it, faults, threads, forks, closing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from hal_core.devices.framework_tensors import tensor_over
from hal_core.devices.retired_memory import DeviceMemory, Free, Retired
from hal_core.errors import DeviceClosed, HalError, OutOfMemory
from hal_core.memory.views import View

from .proxies import BELOW, HELD, HELD_COPIES, RING
from .rows import SET, Call, How, first, instead, noted, register, row, then
from .tickets import settled

# -- memory that is lost at a call -------------------------------------------------------------------------------------


def lose(nbytes: Callable[[Call], int]) -> How:
    """Return a lie that allocates so many bytes before the call, and keeps them."""
    return first(lambda call: call.kept("lost", []).append(call.me.allocate(nbytes(call))))


def lose_raw(call: Call) -> None:
    call.me.primitives.allocate(64)


def leak_an_event(call: Call) -> None:
    device = call.me
    event = device.primitives.event_create()
    device.primitives.event_record(event, device.own_stream(call.stream).raw)


def lose_every_second(call: Call) -> None:
    kept = call.kept("tables", [])
    kept.append(call.device.allocate(256) if len(kept) % 2 else None)


def lose_if_refused(call: Call) -> object:
    temporary = call.me.allocate(64)
    try:
        return call()
    except Exception:
        call.kept("refused", []).append(temporary)
        raise


def lose_if_overlapping(call: Call) -> None:
    value, target = call.value, call.target
    if isinstance(value, View) and value.memory is target.memory:
        low, high = value.bounds()
        begin, end = target.bounds()
        if low < end and begin < high:
            call.kept("temporaries", []).append(call.device.allocate(high - low))


def keep_half(call: Call) -> object:
    kept = call.kept("half", [])
    try:
        memory = call()
    except MemoryError:
        call.kept("lost", []).extend(kept)
        raise
    kept[:] = [memory]
    return memory


def aligned_to_sixteen(call: Call) -> object:
    memory = call(nbytes=call.nbytes + 64)
    memory.address += 16
    memory.nbytes = call.nbytes
    if hasattr(memory, "buffer"):
        memory.buffer = memory.buffer[16 : 16 + call.nbytes]
    return memory


LEAKS = {
    "each write takes device memory for its value, and keeps it": row(
        "LeaksDeviceMemory", 26, SET, lose(lambda call: max(64, call.target.size * call.target.dtype.itemsize))
    ),
    "each step leaves 64 bytes of device memory": row(
        "StepsLeakScratch", 26, "update_inputs", first(lose_raw), "primitives"
    ),  # scratch of a kernel that is allocated at each launch
    "each copy within the device leaves its temporary": row(
        "LeaksTemporaries", 26, "copy_within", first(lose_raw), "native_objects"
    ),  # leaked memory between source and target
    "every second insertion leaves a table of slots in device memory": row(
        "InsertionsLeakTables", 26, "insert_tasks", first(lose_every_second)
    ),  # memory that is held by a table which is never looked at again
    "each plan leaves an event of the runtime": row(
        "PlansLeakEvents", 26, "submit", first(lambda call: call.me.primitives.event_create()), "primitives"
    ),  # an event that a former version recorded
    "each plan leaves an event of the driver": row(
        "LeaksEvents", 26, "submit", then(leak_an_event), "native_objects"
    ),  # recorded for a purpose that is gone
    "a write that fails leaves its temporary": row("RefusedWritesLeak", 26, "async_set_value", lose_if_refused),
    "a copy out that fails leaves its temporary": row("FailedCopiesLeak", 26, "copy_out", lose_if_refused),
    "a copy onto an overlapping place keeps its temporary": row(
        "OverlapsLeak", 26, "async_set_value", first(lose_if_overlapping)
    ),  # a list of temporaries that nobody empties
    "memory of a state whose next allocation fails is never given back": row(
        "HalfStatesAreKept", 26, "allocate", keep_half, "primitives"
    ),  # a list of allocations that only a whole state clears
    "device memory lies on boundaries of 16 bytes": row(
        "AlignedToSixteen", 26, "allocate", aligned_to_sixteen
    ),  # memory on which vector stores of 64 bytes trap, or are split
}
register(__name__, LEAKS)

# -- memory that is freed, devices that are dropped --------------------------------------------------------------------


def reusing(free: Callable[[Any], None]) -> How:
    """Return a lie whose dropped memory goes to the next allocation of its size, as a framework's does.

    ``free(device)`` looks for dropped memory. None goes back to the system: where device memory is host memory, the
    process would end.
    """

    def lie(call: Call) -> object:
        dropped = call.kept("dropped", {}).setdefault(call.nbytes, [])
        free(call.me)
        memory = DeviceMemory(call.me, dropped.pop(), call.nbytes) if dropped else call()
        memory._free = partial(dropped.append, memory.address)
        return memory

    return lie


def reap(device: Any) -> None:  # noqa: ANN401 (an opened device)
    device.retired.reap()


def reap_all_but_eight(device: Any) -> None:  # noqa: ANN401 (an opened device)
    device.retired.reap()
    waiting = device.retired._waiting
    while len([entry for entry in waiting if entry[0]]) > 8:
        waiting.popleft()[1]()


def forget_the_copy(call: Call) -> None:
    call.me.last.pop(call.me.own_stream(call.stream).copy_stream.stream_key, None)


class NoEvents(dict[int, Any]):
    """The last events of streams, none of which protects dropped memory."""

    def values(self) -> Any:  # noqa: ANN401 (no event at all)
        return ()


def forget_the_events(call: Call) -> None:
    call.me.last = NoEvents(call.me.last)


class RetiredByOneStream(Retired):
    """Dropped memory that waits for the work of one stream."""

    main = 0

    def add(self, events: Iterable[Any], free: Free) -> None:
        """Leave out the events of other streams."""
        super().add([event for event in events if event.stream_key == self.main], free)


def retire_by_the_default_stream(call: Call) -> None:
    device = call.me
    device.retired.__class__ = RetiredByOneStream
    device.retired.main = device.own_stream(device.default_stream).stream_key


def settled_by_one_stream(call: Call) -> object:
    device = call.me
    event = device.last.get(device.default_stream.stream_key)
    return event is None or bool(event.wait(device.staging.deadline))


OPENED: list[Any] = []
COPIED = (*HELD_COPIES, "primitives")
FREED = {
    "memory is freed when it is unreferenced, whatever work still uses it": row(
        "FreedUnderWork", 2, "allocate", reusing(reap), RING, also={"laid": forget_the_events}
    ),  # an allocator that reuses dropped memory of the same size at once, as a framework's does for its own stream
    "the memory of a pending copy is freed when it is dropped": row(
        "CopiesDoNotKeep", 22, "allocate", reusing(reap), COPIED, also={"copy_out": then(forget_the_copy)}
    ),  # only the streams of writes are asked whether they still use dropped memory
    "of dropped memory eight blocks are kept until their work is done": row(
        "EightAreKept", 22, "allocate", reusing(reap_all_but_eight), COPIED
    ),  # a list of fixed length, whose oldest entry makes room
    "memory of a dropped value is freed once the default stream's work is done": row(
        "FreesByTheDefaultStream", 2, "allocate", reusing(reap), BELOW, also={"laid": retire_by_the_default_stream}
    ),  # another stream may still read it
    "close waits for the default stream alone": row(
        "CloseWaitsForOneStream", 26, "_settled", settled_by_one_stream, HELD
    ),  # work of other streams then finds its memory freed
    "a list of opened devices keeps each, with its memory": row(
        "EveryDeviceIsListed", 26, "laid", lambda call: OPENED.append(call.me)
    ),  # for a report, or for the end of the process
    "a device that is dropped without a close keeps its memory": row(
        "DroppedIsKept", 26, "laid", lambda call: None, "primitives", has={"__del__": lambda device: None}
    ),  # nothing but a close releases it
}
register(__name__, FREED)


# -- faults, threads, forks --------------------------------------------------------------------------------------------


def swallow(call: Call) -> object:
    try:
        return call()
    except DeviceClosed:
        raise
    except HalError:
        logging.getLogger("hal").debug("a call failed", exc_info=True)
        return settled()


def forget_the_fault(call: Call, _: object) -> None:
    call.me.health.fault, call.me.health.unusable = None, False


def librarys_own(error: OutOfMemory) -> BaseException:
    cause = error.__cause__
    return cause if isinstance(cause, MemoryError) and not isinstance(cause, OutOfMemory) else error


def begin(call: Call) -> object:
    if "fork" in call.self._refusal:
        call.self._refusal = ""
    return call()


def repeat_the_last(call: Call) -> object:
    last = call.kept("last", [])
    try:
        last[:] = [call()]
    except RuntimeError:
        if not last:
            raise
    return last[0]


def raise_at_the_next(call: Call) -> object:
    met = call.kept("met", [])
    if met:
        raise met.pop()
    try:
        return call()
    except RuntimeError as error:
        met.append(error)
        return None


def note_the_thread(call: Call) -> None:
    call.me.__dict__["opener"] = threading.get_ident()


def of_the_opener(call: Call) -> None:
    if threading.get_ident() != call.me.__dict__["opener"]:
        raise RuntimeError("error 201: invalid device context")


FAULTS = {
    "a fault of the device in a write is logged, and the call goes well": row(
        "SwallowsFaults", 26, "async_set_value insert_tasks", swallow, seen="vLLM 48277"
    ),  # ``except Exception``
    "a broken device still gives tensors over its state": row(
        "TensorsOfABrokenDevice", 26, "tensor", lambda call: tensor_over(call.view, call.framework), "primitives"
    ),  # the one call that does not use the driver
    "a fault of the device is forgotten once a call has raised it": row(
        "FaultForgottenOnceRaised", 26, "check_open", noted(DeviceClosed, forget_the_fault), "primitives"
    ),  # a runtime's last error, which is cleared by reading it
    "a step whose output was lost gives the record of the step before it": row(
        "LostStepsRepeat", 26, "host mirror", repeat_the_last
    ),  # the last good record is at hand
    "the error of a lost step is raised by the take of the next one": row(
        "LostStepsAreLate", 26, "host mirror", raise_at_the_next
    ),  # an error state that is looked at before the wait
    "a library's MemoryError leaves the device's state() as it is": row(
        "RawMemoryError", 26, "policy.state", instead(OutOfMemory, librarys_own)
    ),  # ``except OutOfMemory`` alone
    "after a fork the child continues with the parent's device": row(
        "ForkGoesOn", 26, "begin of a call", begin
    ),  # a missing check for a fork, which streams and threads do not survive
    "writes work on the opener's thread alone": row(
        "WritesOfTheOpener",
        26,
        "submit async_set_value",
        first(of_the_opener),
        seen="CUDA_ERROR_INVALID_CONTEXT on a worker's thread",
        also={"laid": note_the_thread},
    ),  # the context is made current when the device is opened, and nowhere else
    "copies to the host work on the opener's thread alone": row(
        "CopiesOfTheOpener", 26, "copy_out", first(of_the_opener), also={"laid": note_the_thread}
    ),  # one call of many lacks the context
    "memory is allocated on the opener's thread alone": row(
        "MemoryOfTheOpener", 26, "allocate", first(of_the_opener), also={"laid": note_the_thread}
    ),  # the call that is made least
}
register(__name__, FAULTS)
