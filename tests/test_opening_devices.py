"""Opening the selected device: options, requirements, and clean-up when it fails."""

import sys

import pytest
from hal_core.errors import (
    CapabilityMissing,
    HalError,
    InvalidValue,
    PluginError,
    Unavailable,
)

import hal
from hal.selection import select

from .test_selection import passed_over


@pytest.fixture
def site(site_with_cpu):
    return site_with_cpu


def devices_of(site, distribution):
    return sys.modules[site.modules[distribution]].OPENED


def test_open_device_opens_the_index_with_the_options_and_binds_it(site):
    site.device("alpha")
    bound = hal.open_device("alpha:2", options={"key": 1})
    (device,) = devices_of(site, "paddle-hal-alpha")
    assert (device.index, device.options, device.closed) == (2, {"key": 1}, 0)
    assert bound.capabilities is device.capabilities
    bound.close()
    assert device.closed == 1


def test_every_opening_binds_anew(site):
    site.device("alpha")
    with hal.open_device() as one, hal.open_device() as two:
        assert one is not two
    assert [device.closed for device in devices_of(site, "paddle-hal-alpha")] == [1, 1]


def test_an_unmet_requirement_is_refused_and_closes_the_device(site):
    site.device("alpha")
    with pytest.raises(CapabilityMissing, match="a toy has no stream"):
        hal.open_device(require={"async_set_value": "async"})
    with pytest.raises(InvalidValue, match="unknown requirement 'speed'"):
        hal.open_device(require={"speed": True})
    assert [device.closed for device in devices_of(site, "paddle-hal-alpha")] == [1, 1]
    hal.open_device(require={"async_set_value": "sync", "fused_scatter": True}).close()


@pytest.mark.parametrize(
    "state", ["wrong_signature", "missing_hook", "no_capabilities", "no_name", "another_devices_name"]
)
def test_a_device_that_breaks_the_contract_is_refused_and_closed(site, state):
    site.device("alpha", state=state)
    with pytest.raises(PluginError) as caught:
        hal.open_device()
    assert "paddle-hal-alpha 1.0: " in str(caught.value)
    assert caught.value.cure
    (device,) = devices_of(site, "paddle-hal-alpha")
    assert device.closed == 1


def test_an_open_that_crashes_names_the_distribution(site):
    site.device("alpha", state="open_crashes")
    with pytest.raises(
        PluginError, match=r"alpha: paddle-hal-alpha 1\.0: opening index 0 failed: OSError: driver said no"
    ):
        hal.open_device()


def test_a_device_unavailable_only_at_open_is_passed_over_too(site, caplog):
    site.device("alpha", state="unavailable_at_open")
    site.device("beta", priority=5)
    with hal.open_device() as device:
        assert device.name == "beta:0"
    assert passed_over(caplog) == ["alpha: chip is busy (free it); trying the next device"]
    with pytest.raises(Unavailable, match="alpha: chip is busy"):
        hal.open_device("alpha")


def test_the_first_error_is_reported_when_closing_fails_as_well(site):
    site.device("alpha", state="close_crashes")
    with pytest.raises(CapabilityMissing) as caught:
        hal.open_device(require={"can_hold_stream": True})
    assert caught.value.__notes__ == ["closing the device failed too: OSError: close fell over"]


@pytest.mark.parametrize("argument", ["require", "options"])
def test_arguments_that_are_no_mappings_are_refused(argument):
    with pytest.raises(InvalidValue, match=f"^{argument}: "):
        hal.open_device(**{argument: ["async_set_value"]})


def test_the_package_exports_what_it_says():
    assert {"open_device", "devices", "Worker", "OutputReader", "__version__"} <= set(dir(hal))
    for name in hal.__all__:
        assert getattr(hal, name) is not None
    assert hal.__version__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hal.nothing


def test_every_error_has_a_cure(site):
    site.device("alpha", state="exits")
    for name in ("alpha", "alpah", "a:", "cpu:x"):
        with pytest.raises(HalError) as caught:
            select(name)
        assert caught.value.cure, name
