"""The asynchronous example without one of its optional capabilities, each an honest device, opened by a factory.

``tensors`` is no capability of the device, but of the plugin's support.
"""

from dataclasses import replace

from hal_core import Support
from hal_core.devices import AsyncDevice, HostCopy
from queued_device import QueueDevice, QueueSupport


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
