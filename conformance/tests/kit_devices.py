"""Devices for the tests of the kit, opened by ``--device-factory kit_devices:NAME``."""

import ctypes
import os
from dataclasses import replace
from typing import ClassVar

from hal_conformance.fixtures.memory_wire import MemoryNet
from hal_conformance.ranks.support import HostSupport
from hal_core.contract.markers import hookimpl
from hal_core.contract.support import Support
from hal_core.devices.cpu.device import CpuDevice
from hal_core.handover import BlockTransfer, Patience
from hal_core.tickets import DONE

NAME = "test_g15_a_group_of_one_communicates_nothing"


def cpu():
    return CpuDevice(0, {})


class Deaf(CpuDevice):
    """Ignores the values of async_set_value."""

    @hookimpl
    def async_set_value(self, device, target, value, stream):
        return DONE


def deaf():
    return Deaf(0, {})


class Unwritten(CpuDevice):
    """A device whose vendor has not written its first primitive yet."""

    def submit(self, plan, stream):
        raise NotImplementedError("submit " + "x" * 12_000)


def unwritten():
    return Unwritten(0, {})


class Stumbles(CpuDevice):
    """Has no way to write three axes."""

    @hookimpl
    def async_set_value(self, device, target, value, stream):
        if len(target.shape) == 3:
            self.stumble()
        return super().async_set_value(device, target, value, stream)

    def stumble(self):
        raise KeyError("no entry for three axes")


def stumbles():
    return Stumbles(0, {})


def unopened():
    """A device of which the vendor has written nothing yet."""
    raise NotImplementedError("stream_create")


def expecting(failures, make=cpu):
    """A factory whose plugin lists these failures."""

    class Listed(Support):
        expected_failures = failures

    def factory():
        return make()

    factory.support = Listed
    return factory


passes = expecting({NAME: "would fail, they said"})
unknown = expecting({"test_g15_no_such_test": "a typing error"})
no_reason = expecting({NAME: " "})
DEAF = (
    "test_g01_later_work_on_the_stream_sees_the_value",
    "test_g01_a_copy_within_the_device_keeps_order_and_never_waits",
)
true_list = expecting(dict.fromkeys(DEAF, "it writes nothing: chip errata 7"), deaf)


class NoPair(Support):
    """Ranks would be offered elsewhere."""

    def versions(self, device):
        return {"driver": "7.1"}

    def why_not(self, need):
        return "two chips are needed" if need == "several_ranks" else ""


def no_pair():
    return cpu()


no_pair.support = NoPair


def wrong_support():
    return cpu()


wrong_support.support = "NoPair"


def with_tensors():
    return CpuDevice(0, {})


with_tensors.support = HostSupport


class OwnTransfers(Support):
    """A vendor's own KV transfer: here hal's, with the vendor's network between."""

    transfers = True
    net = MemoryNet()

    def transfer(self, device, cache, silence):
        assert cache.memory.nbytes == cache.blocks * cache.block_bytes
        return BlockTransfer(cache, self.net.wire("vendor://"), Patience(silence=silence))


def own_transfers():
    return CpuDevice(0, {})


own_transfers.support = OwnTransfers


class AnyBlocks(OwnTransfers):
    """A vendor's transfer that compares no fingerprint."""

    def transfer(self, device, cache, silence):
        cache.facts = dict
        return super().transfer(device, cache, silence)


def any_blocks():
    return CpuDevice(0, {})


any_blocks.support = AnyBlocks


class ByChance(CpuDevice):
    """Every fifth value has a wrong bit, whatever is called."""

    written = 0

    @hookimpl
    def async_set_value(self, device, target, value, stream):
        ticket = super().async_set_value(device, target, value, stream)
        ByChance.written += 1
        if ByChance.written % 5 == 0 and target.size:
            target.memory.buffer[target.bounds()[0]] ^= 1
        return ticket


def by_chance():
    return ByChance(0, {})


class Broken(CpuDevice):
    """Every copy out fails."""

    def copy_out(self, memory, parts, stream):
        raise RuntimeError(f"driver error at {id(parts):#x}")


def broken():
    return Broken(0, {})


def waits():
    """Its ``update_inputs`` waits for the device, as that of DeviceBase does."""
    from queued_device import QueueDevice

    class Waits(QueueDevice):
        capabilities = replace(QueueDevice.capabilities, async_update=False)

        def update_inputs(self, state, step, stream):
            ticket = super().update_inputs(state, step, stream)
            ticket.wait(None)
            return ticket

    return Waits(0, {})


class SaysThatItWaits(Support):
    update_waits = True


def by_default():
    """The asynchronous example with the core's copy_within, which waits for the device."""
    from hal_core.devices.base import DeviceBase
    from queued_device import QueueDevice

    class ByDefault(QueueDevice):
        copy_within = DeviceBase.copy_within

    return ByDefault(0, {})


def by_host():
    """The asynchronous example with a copy_within that waits for the device."""
    from hal_core.devices.base import DeviceBase
    from queued_device import QueueDevice

    class ByHost(QueueDevice):
        def copy_within(self, target, value, stream):
            return DeviceBase.copy_within(self, target, value, stream)

    return ByHost(0, {})


def misplaced():
    """The asynchronous example whose copy_within writes the elements in another order."""
    from queued_device import QueueDevice

    class Misplaced(QueueDevice):
        def copy_within(self, target, value, stream):
            turned = value[tuple(slice(None, None, -1) for _ in value.shape)]
            return super().copy_within(target, turned, stream)

    return Misplaced(0, {})


class Wrecked(CpuDevice):
    """Does something else in some tests, by their names."""

    troubles: ClassVar = {
        "test_g26_closing_one_device": lambda: ctypes.string_at(0),
        "test_g26_a_context_closes": lambda: ctypes.PyDLL(None).pause(),  # in C, with the interpreter's lock
        "test_g26_hundreds_of_calls_keep_nothing[hooks]": lambda: Wrecked.kept.append([object()]),
    }
    kept: ClassVar = []

    def copy_out(self, memory, parts, stream):
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        for name, trouble in self.troubles.items():
            if name in test:
                trouble()
        return super().copy_out(memory, parts, stream)


def wrecked():
    return Wrecked(0, {})


held_wrecks = expecting(
    {
        "test_g26_closing_one_device_leaves_another_as_it_was": "it crashes: errata 8",
        "test_g26_a_context_closes_the_device_and_keeps_the_error_under_way": "it hangs: errata 9",
        "test_g26_a_state_and_memory_of_another_opened_device_are_refused": "stale",
    },
    wrecked,
)


class NeverOpens(CpuDevice):
    def __init__(self, index, options):
        ctypes.string_at(0)


def never_opens():
    return NeverOpens(0, {})
