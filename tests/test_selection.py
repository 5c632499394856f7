"""Selection and opening of a device, without silent failures."""

import logging

import pytest
from hal_core.errors import (
    ContractMismatch,
    DeviceNotFound,
    InvalidValue,
    PluginError,
    Unavailable,
)

from hal.selection import requested, select

from .fixtures_plugins.builder import Site


@pytest.fixture
def site(site_with_cpu):
    return site_with_cpu


def passed_over(caplog):
    lines = [record.getMessage() for record in caplog.records if record.name == "hal"]
    return [line for line in lines if "trying the next device" in line or "it is left out" in line]


def test_the_best_priority_wins_and_nothing_else_is_imported(site, caplog):
    site.device("alpha", priority=10)
    site.device("beta", priority=20)
    site.device("gamma", priority=5, state="exits")
    assert select().entry.name == "beta"
    assert site.imported() == {"paddle-hal-beta"}
    assert passed_over(caplog) == []


def test_equal_priorities_go_by_name(site):
    site.device("beta", priority=10)
    site.device("alpha", priority=10)
    assert select().entry.name == "alpha"


def test_the_argument_goes_before_the_environment_before_the_priority(site, monkeypatch):
    site.device("alpha", priority=30)
    site.device("beta", priority=20)
    monkeypatch.setenv("HAL_DEVICE", "beta")
    assert select("cpu").entry.name == "cpu"
    assert site.imported() == {"paddle-hal-core"}
    assert select().entry.name == "beta"
    monkeypatch.setenv("HAL_DEVICE", " ")
    assert select().entry.name == "alpha"


def test_a_device_without_declared_priority_is_never_selected_by_itself(site):
    site.device("sim", priority=None)
    assert select().entry.name == "cpu"
    assert site.imported() == {"paddle-hal-core"}
    assert select("sim").entry.name == "sim"


@pytest.mark.parametrize("state", ["unavailable", "unavailable_raised"])
def test_an_unavailable_device_is_passed_over_with_one_line(site, caplog, state):
    site.device("alpha", priority=10, state=state)
    assert select().entry.name == "cpu"
    (line,) = passed_over(caplog)
    assert line.startswith("alpha: no ")
    assert line.endswith("; trying the next device")
    assert caplog.records[-1].levelno == logging.WARNING


def test_a_device_absent_from_this_machine_is_skipped_silently(site, caplog):
    site.device("alpha", priority=10, state="absent")
    with caplog.at_level(logging.INFO, "hal"):
        assert select().entry.name == "cpu"
    (record,) = [record for record in caplog.records if record.name == "hal"]
    assert record.levelno == logging.INFO
    assert record.getMessage() == "alpha: no such chip (use another machine); trying the next device"


def test_an_absent_device_that_is_named_is_an_error(site):
    site.device("alpha", state="absent")
    with pytest.raises(Unavailable, match=r"alpha: no such chip \(use another machine\)"):
        select("alpha")


def test_when_nothing_can_be_used_the_error_tells_of_absent_devices_too(tmp_path, monkeypatch):
    site = Site(tmp_path / "other").activate(monkeypatch)
    site.core(device=True, state="unavailable")
    site.device("alpha", state="absent")
    with pytest.raises(Unavailable, match=r"alpha: no such chip .*; cpu: no chip"):
        select()


def test_a_named_device_that_is_unavailable_is_an_error(site):
    site.device("alpha", state="unavailable")
    with pytest.raises(Unavailable, match=r"alpha: no chip \(plug one in\)"):
        select("alpha")


def test_when_all_are_unavailable_the_error_has_every_reason(tmp_path, monkeypatch):
    site = Site(tmp_path / "other").activate(monkeypatch)
    site.core(device=True, state="unavailable")
    site.device("alpha", state="unavailable_raised")
    with pytest.raises(Unavailable) as caught:
        select()
    expected = "alpha: no driver (install the driver); cpu: no chip (plug one in) (hal devices shows each)"
    assert str(caught.value) == f"no device can be used here: {expected}"


@pytest.mark.parametrize("state", ["broken_import", "exits", "no_class", "probe_crashes"])
def test_a_broken_plugin_is_never_fallen_through(site, state):
    site.device("alpha", priority=10, state=state)
    with pytest.raises(PluginError, match="paddle-hal-alpha") as caught:
        select()
    assert caught.value.cure
    assert site.imported() == {"paddle-hal-alpha"}


def test_a_contract_mismatch_is_never_fallen_through(site):
    site.device("alpha", requires=["paddle-hal-core>=7.0,<8"])
    with pytest.raises(ContractMismatch, match="alpha: paddle-hal-alpha"):
        select()
    assert site.imported() == set()


def test_a_broken_plugin_below_the_one_selected_does_not_matter(site):
    site.device("alpha", priority=10)
    site.device("beta", priority=5, state="exits")
    assert select().entry.name == "alpha"


@pytest.mark.parametrize("name", [None, "twin"])
def test_two_distributions_with_one_name_are_an_error_that_names_both(site, name):
    site.device("twin", priority=10, distribution="paddle-hal-twin")
    site.device("twin", priority=None, distribution="acme-hal", version="3.1")
    with pytest.raises(
        PluginError, match=r"twin: .*acme-hal 3\.1 .*paddle-hal-twin 1\.0|paddle-hal-twin 1\.0 .*acme-hal 3\.1"
    ):
        select(name)
    assert site.imported() == set()


def test_the_allow_list_settles_a_name_claimed_twice(site, monkeypatch):
    site.device("twin", distribution="paddle-hal-twin")
    site.device("twin", distribution="acme-hal")
    monkeypatch.setenv("HAL_PLUGINS", "acme-hal")
    assert select().entry.distribution == "acme-hal"
    assert site.imported() == {"acme-hal"}


def test_one_distribution_that_claims_a_name_twice_is_an_error(site):
    module = site.module("twin")
    site.distribution("acme-hal", points=f"[hal.devices]\ntwin = {module}:ToyPlugin\ntwin = {module}:Other\n")
    with pytest.raises(PluginError, match="mend the entry points of acme-hal"):
        select("twin")


@pytest.mark.parametrize("priority", ["high", "priority_-1", "priority_12345678901"])
def test_a_plugin_with_wrong_metadata_is_named_and_blocks_no_other(site, caplog, priority):
    site.device("alpha", priority=priority)
    site.device("beta", priority=5)
    assert select().entry.name == "beta"
    (line,) = passed_over(caplog)
    assert line.startswith("alpha: paddle-hal-alpha 1.0: the entry-point group hal.priorities gives priority")
    assert line.endswith("; it is left out")
    assert "\n" not in line
    assert site.imported() == {"paddle-hal-beta"}
    assert select("cpu").entry.name == "cpu"


def test_a_plugin_with_wrong_metadata_does_not_take_a_sound_ones_name(site, caplog):
    site.device("cpu", priority="high", distribution="acme-hal")
    assert select().entry.distribution == "paddle-hal-core"
    assert "acme-hal" in passed_over(caplog)[0]


def test_named_a_plugin_with_wrong_metadata_is_an_error(site):
    site.device("alpha", priority="high")
    with pytest.raises(PluginError, match="paddle-hal-alpha"):
        select("alpha")


def test_a_device_left_out_by_the_allow_list_is_not_found(site, monkeypatch):
    site.device("alpha")
    monkeypatch.setenv("HAL_PLUGINS", "")
    with pytest.raises(DeviceNotFound, match=r"HAL_PLUGINS leaves paddle-hal-alpha out \(add paddle-hal-alpha to"):
        select("alpha")
    assert select().entry.name == "cpu"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "alpa",
            "name: no device 'alpa'; installed: alpha, cpu (name one of those, or install the plugin that provides it)",
        ),
        (
            "CPU",
            "name: no device 'CPU'; installed: alpha, cpu (name one of those, or install the plugin that provides it)",
        ),
        (
            "zzz",
            "name: no device 'zzz'; installed: alpha, cpu (name one of those, or install the plugin that provides it)",
        ),
    ],
)
def test_an_unknown_name_says_what_is_installed(site, name, text):
    site.device("alpha")
    with pytest.raises(DeviceNotFound) as caught:
        select(name)
    assert str(caught.value) == text


def test_an_unknown_name_in_the_environment_is_blamed_on_it(site, monkeypatch):
    monkeypatch.setenv("HAL_DEVICE", "zzz")
    with pytest.raises(DeviceNotFound, match=r"^HAL_DEVICE: no device 'zzz'"):
        select()


def test_with_nothing_to_select_the_error_says_so(tmp_path, monkeypatch):
    site = Site(tmp_path / "bare").activate(monkeypatch)
    with pytest.raises(DeviceNotFound, match="no device is installed"):
        select()
    site.core()
    site.device("sim", priority=None)
    with pytest.raises(DeviceNotFound, match=r"installed: sim \(name one in HAL_DEVICE\)"):
        select()


# Names and indices.


@pytest.mark.parametrize(
    ("name", "index", "result"),
    [("a", None, ("a", 0)), ("a:3", None, ("a", 3)), ("a", 2, ("a", 2)), ("a:2", 2, ("a", 2)), (None, 1, (None, 1))],
)
def test_names_and_indices(monkeypatch, name, index, result):
    monkeypatch.delenv("HAL_DEVICE", raising=False)
    request = requested(name, index)
    assert (request.name, request.index) == result


@pytest.mark.parametrize(
    "name", ["", ":1", "a:", "a:x", "a:-1", "a:1:2", "a:1.0", "a b", "a:٣", "a\n", "é", 7, b"a", "a:9999999999"]
)
def test_a_bad_name_is_refused(name):
    with pytest.raises(InvalidValue, match=r"^name: "):
        requested(name)


@pytest.mark.parametrize("index", [-1, True, 1.0, "0"])
def test_a_bad_index_is_refused(index):
    with pytest.raises(InvalidValue, match=r"^index: "):
        requested("a", index)


def test_two_different_indices_contradict_each_other(monkeypatch):
    with pytest.raises(InvalidValue, match="'a:1' and index=0 contradict"):
        requested("a:1", 0)
    monkeypatch.setenv("HAL_DEVICE", "a:1")
    with pytest.raises(InvalidValue, match=r"^HAL_DEVICE: .*contradict"):
        requested(None, 2)
    assert requested("b", 2).name == "b"
