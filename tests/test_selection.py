"""Selection of a device, without silent failures."""

import logging
import re

import pytest
from hal_core.errors import ContractMismatch, DeviceNotFound, InvalidValue, PluginError, Unavailable

from hal.selection import requested, select

from .fixtures_plugins.builder import Site

CORE, ALPHA, BETA = "paddle-hal-core", "paddle-hal-alpha", "paddle-hal-beta"
TWINS = ({"name": "twin"}, {"name": "twin", "priority": None, "distribution": "acme-hal", "version": "3.1"})
LEFT_OUT = "alpha: paddle-hal-alpha 1.0: the entry-point group hal.priorities gives priority.*; it is left out"


def passed_over(caplog):
    lines = [record.getMessage() for record in caplog.records if record.name == "hal"]
    return [line for line in lines if "trying the next device" in line or "it is left out" in line]


def installed(tmp_path, monkeypatch, plugins, core, environment):
    """A folder of plugins; each is a name, or the arguments of ``Site.device``."""
    site = Site(tmp_path / "site").activate(monkeypatch)
    if core:
        site.core(device=True, state=core)
    for plugin in plugins:
        site.device(**({"name": plugin} if isinstance(plugin, str) else plugin))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return site


def alpha(state="available", **more):
    return {"name": "alpha", "state": state, **more}


def row(*plugins, name=None, core="available", **environment):
    """What is installed with the core's cpu device, the name that is given, and variables."""
    return plugins, name, core, environment


BEST = {"name": "beta", "priority": 20}
SIM = {"name": "sim", "priority": None}
SELECTED = {
    "the best priority, and nothing else is imported": (
        row("alpha", BEST, {"name": "gamma", "priority": 5, "state": "exits"}),
        BETA,
    ),
    "of equal priorities the first name": (row("beta", "alpha"), ALPHA),
    "the argument before the environment": (row("alpha", BEST, name="cpu", HAL_DEVICE="beta"), CORE),
    "the environment before the priority": (row("alpha", BEST, HAL_DEVICE="alpha"), ALPHA),
    "an empty variable is none": (row("alpha", BEST, HAL_DEVICE=" "), BETA),
    "none without a declared priority": (row(SIM), CORE),
    "one without a declared priority by its name": (row(SIM, name="sim"), "paddle-hal-sim"),
    "the next one where one is unavailable": (row(alpha("unavailable")), CORE, "alpha: no .*; trying the next device"),
    "the next one where one raises that": (
        row(alpha("unavailable_raised")),
        CORE,
        "alpha: no .*; trying the next device",
    ),
    "one above a broken one": (row("alpha", {"name": "beta", "priority": 5, "state": "exits"}), ALPHA),
    "of one name that of the allow-list": (row(*TWINS, HAL_PLUGINS="acme-hal", name="twin"), "acme-hal"),
    "none that the allow-list leaves out": (row("alpha", HAL_PLUGINS=""), CORE),
    "one with wrong metadata takes no name": (
        row({"name": "cpu", "priority": "high", "distribution": "acme-hal"}),
        CORE,
        "cpu: acme-hal.*; it is left out",
    ),
    **{
        f"none of priority {text}": (row(alpha(priority=text), {"name": "beta", "priority": 5}), BETA, LEFT_OUT)
        for text in ("high", "priority_-1", "priority_12345678901")
    },
    "another one by name with wrong metadata": (row(alpha(priority="high"), name="cpu"), CORE),
}


@pytest.mark.parametrize("case", SELECTED)
def test_what_is_selected_is_imported_alone(tmp_path, monkeypatch, caplog, case):
    (plugins, name, core, environment), distribution, *lines = SELECTED[case]
    site = installed(tmp_path, monkeypatch, plugins, core, environment)
    assert select(name).entry.distribution == distribution
    passed = passed_over(caplog)
    assert len(passed) == len(lines)
    assert all(map(re.fullmatch, lines, passed)), passed
    assert all("\n" not in line for line in passed)
    assert site.imported() == {distribution} | ({ALPHA} if "next one" in case else set())
    assert not lines or caplog.records[-1].levelno == logging.WARNING


UNKNOWN = "installed: alpha, cpu (name one of those, or install the plugin that provides it)"
NOT_HERE = "no driver (install the driver); cpu: no chip (plug one in) (hal devices shows each)"
REFUSED = {
    "an absent one by name": (row(alpha("absent"), name="alpha"), Unavailable, "alpha: no such chip (use another mach"),
    "an unavailable one by name": (
        row(alpha("unavailable"), name="alpha"),
        Unavailable,
        "alpha: no chip (plug one in)",
    ),
    "nothing that can be used, absent ones too": (
        row(alpha("absent"), core="unavailable"),
        Unavailable,
        "alpha: no such chip (use another machine); cpu: no chip",
    ),
    "nothing that can be used": (
        row(alpha("unavailable_raised"), core="unavailable"),
        Unavailable,
        f"no device can be used here: alpha: {NOT_HERE}",
    ),
    **{
        f"a broken plugin, {state}": (row(alpha(state)), PluginError, ALPHA)
        for state in ("broken_import", "exits", "no_class", "probe_crashes")
    },
    "another contract": (
        row(alpha(requires=["paddle-hal-core>=7.0,<8"])),
        ContractMismatch,
        "alpha: paddle-hal-alpha",
    ),
    "two of one name": (row(*TWINS), PluginError, ("twin: ", "acme-hal 3.1", "paddle-hal-twin 1.0")),
    "two of one name, by name": (row(*TWINS, name="twin"), PluginError, ("acme-hal 3.1", "paddle-hal-twin 1.0")),
    "one with wrong metadata, by name": (row(alpha(priority="high"), name="alpha"), PluginError, ALPHA),
    "one that the allow-list leaves out": (
        row("alpha", HAL_PLUGINS="", name="alpha"),
        DeviceNotFound,
        "HAL_PLUGINS leaves paddle-hal-alpha out (add paddle-hal-alpha to",
    ),
    **{
        f"no such name, {name}": (row("alpha", name=name), DeviceNotFound, f"name: no device {name!r}; {UNKNOWN}")
        for name in ("alpa", "CPU", "zzz")
    },
    "no such name in the environment": (row(HAL_DEVICE="zzz"), DeviceNotFound, "HAL_DEVICE: no device 'zzz'"),
    "no device at all": (row(core=""), DeviceNotFound, "no device is installed"),
    "none that is selected by itself": (row(SIM, core=""), DeviceNotFound, "installed: sim (name one in HAL_DEVICE)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_selected_is_never_fallen_through(tmp_path, monkeypatch, case):
    (plugins, name, core, environment), kind, texts = REFUSED[case]
    site = installed(tmp_path, monkeypatch, plugins, core, environment)
    if case == "none that is selected by itself":
        site.core()
    with pytest.raises(kind) as caught:
        select(name)
    for text in [texts] if isinstance(texts, str) else texts:
        assert text in str(caught.value)
    assert caught.value.cure
    imported = {ALPHA, CORE} if core == "unavailable" else {ALPHA} if kind is Unavailable or "broken" in case else set()
    assert site.imported() == imported


def test_a_device_absent_from_this_machine_is_skipped_silently(site_with_cpu, caplog):
    site_with_cpu.device("alpha", priority=10, state="absent")
    with caplog.at_level(logging.INFO, "hal"):
        assert select().entry.name == "cpu"
    (record,) = [record for record in caplog.records if record.name == "hal"]
    assert record.levelno == logging.INFO
    assert record.getMessage() == "alpha: no such chip (use another machine); trying the next device"


def test_one_distribution_that_claims_a_name_twice_is_an_error(site_with_cpu):
    module = site_with_cpu.module("twin")
    points = f"[hal.devices]\ntwin = {module}:ToyPlugin\ntwin = {module}:Other\n"
    site_with_cpu.distribution("acme-hal", points=points)
    with pytest.raises(PluginError, match="mend the entry points of acme-hal"):
        select("twin")


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
