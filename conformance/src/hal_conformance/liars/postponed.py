"""Liars whose values are written later than they may, from other memory, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from hal_core.devices.cpu.device import host_view
from hal_core.memory.views import View
from hal_core.tickets import DONE, Mode, Ticket

from .proxies import BELOW, HELD
from .rows import Call, How, first, register, row

PAGE = 4096
DEVICE_CALLS = ("submit_all", "copy_out", "update_inputs", "close")
"""Calls of a device by which it may catch up."""


def nbytes_of(view: View) -> int:
    """Return the bytes of a view's elements."""
    return view.size * view.dtype.itemsize


class Postponed(Ticket):
    """A ticket of a write that is made once it is looked at."""

    __slots__ = ("_catch_up",)
    mode: Mode = "sync"

    def __init__(self, catch_up: Callable[[], None]) -> None:
        super().__init__()
        self._catch_up = catch_up

    def done(self) -> bool:
        """Write, and return True."""
        self._catch_up()
        return True

    def _block(self, timeout: float | None) -> bool:
        return self.done()

    def failure(self) -> BaseException | None:
        """Return no error."""
        return None


def catch_up(call: Call) -> None:
    left: list[Callable[[], object]] = call.kept("_left", [])
    while left:
        left.pop(0)()


def own(call: Call) -> object:
    """Return the value as it is at the call: only the time of its write is wrong."""
    value = call.value
    if not isinstance(value, View):
        return value.copy()
    kept = View.contiguous(call.device.allocate(nbytes_of(value)), 0, value.shape, value.dtype)
    call(target=kept)
    return kept


def later(kind: type) -> How:
    """Return a lie: a value of a kind, of 4 KiB or more, is written when its ticket is looked at, or at a next call."""

    def lie(call: Call) -> object:
        catch_up(call)
        if not isinstance(call.value, kind) or nbytes_of(call.target) < PAGE:
            return call()
        call.kept("_left", []).append(partial(call, value=own(call)))
        return Postponed(partial(catch_up, call))

    return lie


def strided_later(call: Call) -> object:
    catch_up(call)
    target, value = call.target, call.value
    if type(value) is not np.ndarray or not target.collapsed()[0]:
        return call()
    call.device._counts["fallbacks"] += 1
    copy = value.copy()
    call.kept("_left", []).append(lambda: host_view(target).__setitem__(..., copy))
    return DONE


def skip_equal(call: Call) -> object:
    """Leave out a scalar that equals the last one written to its place; a write forgets what it overlaps."""
    known: dict[tuple[int, int, int], bytes] = call.kept("_known", {})
    target, value = call.target, call.value
    key, scalar = (id(target.memory), *target.bounds()), isinstance(value, np.generic) and value.tobytes()
    if scalar and known.get(key) == scalar:
        return DONE
    overlapping = [one for one in known if one[0] == key[0] and one[1] < key[2] and key[1] < one[2]]
    ticket = call()
    for one in overlapping:
        known.pop(one, None)
    if scalar:
        known[key] = scalar
        call.kept("_memories", []).append(target.memory)  # its number stays its own
    return ticket


def forget(call: Call) -> None:
    call.kept("_known", {}).clear()


def wait_behind_many(call: Call) -> object:
    pending: list[Any] = call.kept("_pending", [])
    pending[:] = [ticket for ticket in pending if not ticket.done()]
    if len(pending) >= 128:
        pending[0].wait(20)
    pending.append(call())
    return pending[-1]


def borrow(call: Call) -> object:
    device, target, value = call.me, call.target, call.value
    written = not isinstance(value, np.ndarray) or value.flags.writeable or target.collapsed()[0]
    if written or not value.nbytes:
        return call()
    own = device.own_stream(call.stream)
    device.order_after_reads(own, target.memory)
    device.primitives.copy_in(
        device.address_of(target.memory) + target.offset, value.ctypes.data, value.nbytes, own.raw
    )
    device.primitives.count("uploads")
    ticket = device.ticket(own)
    ticket.keep = value
    return ticket


EVERY_CALL = dict.fromkeys((*DEVICE_CALLS, "submit"), first(catch_up))
TABLE = {
    "an array of 4 KiB or more is written when its ticket is looked at, or by the next call": row(
        "PagesComeLater", 7, "async_set_value", later(np.ndarray), "not async_h2d", also=EVERY_CALL
    ),  # a queue on the host, which the device's own calls empty
    "4 KiB or more that lie on the device are copied when the ticket is looked at, or by the next call": row(
        "CopiesComeLater", 7, "async_set_value", later(View), "not async_h2d", also=EVERY_CALL
    ),  # the same of values on the device
    "a synchronous device postpones arrays for strided targets to its next call": row(
        "PostponesStridedArrays",
        7,
        "async_set_value",
        strided_later,
        "not async_h2d",
        also=dict.fromkeys(DEVICE_CALLS, first(catch_up)),
    ),  # every call of the device catches up; what reads the memory itself does not see the value
    "a scalar equal to the last one written there is left out, although a step has changed the place": row(
        "EqualToBeforeTheStep", 4, "async_set_value", skip_equal, also={"submit": first(forget)}
    ),  # plans make it forget, kernels do not
    "a scalar equal to the last one written there is left out, although a plan has changed the place": row(
        "EqualToBeforeThePlan", 4, "async_set_value", skip_equal, also={"update_inputs": first(forget)}
    ),  # kernels make it forget, plans do not
    "the host waits for the oldest once 128 values are pending": row(
        "WaitsBehindMany", 3, "submit_value", wait_behind_many, HELD
    ),  # the runtime's queue has so many places
    "read-only arrays are uploaded from the caller's memory": row(
        "ReadOnlyIsBorrowed", 2, "submit_value", borrow, BELOW
    ),  # they look unchangeable, but the memory under a read-only view is the caller's
}
register(__name__, TABLE)
