"""The asynchronous example without one of its optional capabilities, each an honest device, opened by a factory.

``tensors`` is no capability of the device, but of the plugin's support.
"""

from dataclasses import replace

from hal_core import Support
from hal_core.devices import AsyncDevice, HostCopy
from hal_core.devices.primitives import StreamPrimitives
from queued_device import QueueDevice, QueuePrimitives, QueueSupport


def without(**off):
    return replace(QueueDevice.capabilities, **off)


class Unheld(QueueDevice):
    capabilities = without(can_hold_stream=False)


class UpdatedByHost(QueueDevice):
    """A copy for each write, and the update on the host: neither leaves a test out."""

    capabilities = without(async_update=False, fused_scatter=False)
    update_inputs = AsyncDevice.update_inputs


class CopiesWait(QueueDevice):
    capabilities = without(async_d2h=False)

    def copy_out(self, memory, parts, stream):
        copy = super().copy_out(memory, parts, stream)
        copy.wait()
        return HostCopy(copy.data)


def factory(kind, support):
    def make():
        return kind(0, {})

    make.support = support
    return make


class Waits(QueueSupport):
    update_waits = True


can_hold_stream = factory(Unheld, QueueSupport)
async_update = factory(UpdatedByHost, Waits)
async_d2h = factory(CopiesWait, QueueSupport)
tensors = factory(QueueDevice, Support)


class Unprobed(QueueDevice):
    """Only its primitives show what reaches the driver."""

    @property
    def probe_counts(self):
        raise AttributeError("probe_counts")


class Unreporting(QueuePrimitives):
    event_error = StreamPrimitives.event_error


class Raises(QueueDevice):
    """Its runtime raises the faults of earlier work itself, and its events report none."""

    raises_faults = True

    def __init__(self, index, options):
        AsyncDevice.__init__(self, index, Unreporting())


class Unspoilt(Raises):
    """And by its own word none of them ends the device."""

    def __init__(self, index, options):
        super().__init__(index, options)
        self.primitives.spoils = lambda error: False


class Forgiven(QueueSupport):
    keeps = 10**6


unprobed, raises, unspoilt, forgiven = (
    factory(*each)
    for each in ((Unprobed, QueueSupport), (Raises, QueueSupport), (Unspoilt, QueueSupport), (QueueDevice, Forgiven))
)


class Hushed(Raises):
    """Whose tickets take an error that their wait meets for the end of the work."""

    def __init__(self, index, options):
        super().__init__(index, options)
        hush = {"__slots__": (), "failure": lambda ticket: None}
        self.ticket_type = type("HushedTicket", (self.ticket_type,), hush)


hushed = factory(Hushed, QueueSupport)
