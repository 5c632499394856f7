"""Devices for the tests of the kit, opened by ``--device-factory kit_devices:NAME``."""

from hal_core.conformance.seams import HostSupport, Support
from hal_core.cpu.device import CpuDevice
from hal_core.markers import hookimpl
from hal_core.tickets import DONE

NAME = "test_g15_a_group_of_one_communicates_nothing"


def cpu():
    return CpuDevice(0, {})


class Deaf(CpuDevice):
    """Writes nothing that async_set_value is given."""

    @hookimpl
    def async_set_value(self, device, target, value, stream):
        return DONE


def deaf():
    return Deaf(0, {})


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
true_list = expecting({"test_g01_later_work_on_the_stream_sees_the_value": "it writes nothing: chip errata 7"}, deaf)


class NoPair(Support):
    """Ranks would be offered elsewhere."""

    def why_not(self, need):
        return "two chips are needed" if need == "several_ranks" else ""


def no_pair():
    return cpu()


no_pair.support = NoPair


def with_tensors():
    return CpuDevice(0, {})


with_tensors.support = HostSupport
