"""The simulated accelerator as primitives of :class:`hal_core.devices.asynchronous.AsyncDevice`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

from hal_core import GroupLost, HalError, TicketTimeout
from hal_core.devices import Launch, PlanLaunch, Primitives

from hal_sim.accelerator import Accelerator, Spread
from hal_sim.streams import Event, Stream

Ints = tuple[int, ...]


class StridedLaunch(NamedTuple):
    """The strided kernel: items of ``item`` bytes from the staged block, by ``source_strides``, to ``address``."""

    address: int
    strides: Ints
    source_strides: Ints
    shape: Ints
    item: int


class SimPrimitives(Primitives):
    """One accelerator. ``groups``: the device's open groups, whose loss is not a fault of the device."""

    rerecords = True

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._native = accelerator, accelerator._native
        self.losses: list[Callable[[], GroupLost | None]] = []
        """Of each group that the device has opened: why it was lost, or None."""

    # -- streams and events -------------------------------------------------------------------------------------------

    def stream_create(self) -> Stream:
        return self._accelerator.stream()

    def stream_destroy(self, stream: Stream) -> None:
        stream.close()

    def stream_wait(self, stream: Stream, event: Event) -> None:
        stream.wait(event)

    def event_create(self) -> Event:
        return Event()

    def event_create_timed(self) -> Event:
        return Event(timed=True)

    def event_seconds(self, earlier: Event, event: Event) -> float:
        return event.seconds_since(earlier)

    def event_destroy(self, event: Event) -> None:
        event.close()

    def event_record(self, event: Event, stream: Stream) -> None:
        event.record(stream)

    def event_query(self, event: Event) -> bool:
        return event.query()

    def event_synchronize(self, event: Event, timeout: float | None) -> bool:
        """Wait for the event. Without a timeout it raises :class:`TicketTimeout` after the option ``wait_limit_ms``: it
        never hangs."""
        try:
            event.synchronize(timeout)
        except TicketTimeout:
            if timeout is None:
                raise
            return False
        except HalError as error:  # the device's error: the work is done nevertheless
            self.health.report(error, self.spoils)
        return True

    def event_error(self, event: Event) -> Exception | None:
        """Return the first fault, reported at one wait, whichever operation's ticket is checked."""
        try:
            event.synchronize(0)
        except HalError as error:
            self.health.report(error, self.spoils)
        return self.health.fault

    def spoils(self, error: Exception) -> bool:
        """Return False for a lost group of this device: the tickets of its broadcasts report it, and the device
        continues."""
        return not (isinstance(error, GroupLost) and any(loss() for loss in self.losses))

    # -- memory -------------------------------------------------------------------------------------------------------

    def allocate_host(self, nbytes: int) -> int:
        address = ctypes.c_void_p()
        self._native.check(self._native.pin(nbytes, ctypes.byref(address)))
        return address.value or 0

    def free_host(self, address: int) -> None:
        self._native.check(self._native.unpin(address))

    def host_write(self, address: int, nbytes: int) -> None:
        self._accelerator.host_write(address, nbytes)

    def host_read(self, address: int, nbytes: int) -> None:
        self._accelerator.host_read(address, nbytes)

    def allocate(self, nbytes: int) -> int:
        return self._accelerator.allocate(nbytes)

    def free(self, address: int) -> None:
        self._accelerator.free(address)

    # -- work ---------------------------------------------------------------------------------------------------------

    def copy_in(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        self._accelerator.h2d(target, source, nbytes, stream)

    def copy_out(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        self._accelerator.d2h(target, source, nbytes, stream)

    def launch(self, launch: Launch, block: int, stream: Stream) -> None:
        if isinstance(launch, StridedLaunch):
            address, strides, source_strides, shape, item = launch
            self._accelerator.strided(
                dst=address, src=block, shape=shape, dst_strides=strides, src_strides=source_strides,
                item_nbytes=item, stream=stream,
            )  # fmt: skip
        else:
            assert isinstance(launch, PlanLaunch)
            self._launch_plan(launch, block, stream)

    def _launch_plan(self, plan: PlanLaunch, block: int, stream: Stream) -> None:
        packed, spread = plan.packed, None
        if packed.records:
            spread = Spread(
                records=block + packed.records_at,
                record_nbytes=packed.record_bytes,
                count=packed.records,
                slots=block + packed.slots_at,
                fields=plan.scatter_map,
                field_count=plan.fields,
                slot_limit=plan.slots,
                base=plan.address,
            )
        self._accelerator.plan(
            spread, block, packed.nbytes, packed.writes, stream, base=plan.address, payload=packed.payload_at
        )
