"""Observers from entry points: the user names them, and every message about one names its distribution."""

import json
import logging
from importlib import import_module

import pytest
from hal_core import ContractMismatch, InvalidValue, PluginError, StateConfig

import hal
from hal.cli.devices import show

CODE = """
from hal_core import hookimpl

CALLS = []

class Trace:
    @hookimpl(wrapper=True)
    def async_set_value(self, value):
        ticket = yield
        CALLS.append(value)
        return ticket

class Raises:
    @hookimpl(wrapper=True)
    def async_set_value(self):
        raise OSError("the disk is full")
        yield

class Blind:
    pass

class Asks:
    def __init__(self, where):
        pass
"""


@pytest.fixture
def observers(parts, monkeypatch):
    """Installs a distribution with observers beside the real ones: ``observers(name=class, …)``."""
    monkeypatch.delenv("HAL_OBSERVERS", raising=False)
    return lambda distribution="acme-trace", requires=None, **points: parts(
        CODE, distribution, {"hal.observers": points}, requires
    )


def set_value(bound):
    cell = bound.state(StateConfig(num_slots=1, max_model_len=8)).view("temperature")
    bound.async_set_value(target=cell, value=0.5, stream=bound.default_stream).wait()


def test_no_observer_is_used_unless_it_is_named(observers, monkeypatch):
    module = observers(trace="Trace")
    with hal.open_device("cpu") as bound:
        assert bound.observers == ()
    monkeypatch.setenv("HAL_OBSERVERS", " trace ,")
    with hal.open_device("cpu") as bound:
        assert bound.observers == ("trace (acme-trace 1.0)",)
        set_value(bound)
    assert import_module(module).CALLS == [0.5]


def test_a_name_that_nobody_has_is_an_error_before_a_device_is_opened(observers, monkeypatch):
    observers(trace="Trace")
    monkeypatch.setenv("HAL_OBSERVERS", "trace,trade")
    with pytest.raises(InvalidValue, match=r"'trade'; installed: trace \(acme-trace 1\.0\)") as caught:
        hal.open_device("cpu")
    assert caught.value.argument == "HAL_OBSERVERS"
    assert "separated by commas" in caught.value.cure


def test_a_name_that_two_have_is_an_error_that_names_both(observers, monkeypatch):
    for distribution in ("acme-trace", "other-trace"):
        observers(distribution, trace="Trace")
    monkeypatch.setenv("HAL_OBSERVERS", "trace")
    with pytest.raises(InvalidValue, match=r"acme-trace 1\.0 and other-trace 1\.0"):
        hal.open_device("cpu")


@pytest.mark.parametrize(
    ("target", "requires", "kind", "says"),
    [
        ("Blind", None, PluginError, "has no wrapper of a hook"),
        ("Nobody", None, PluginError, "importing .*Nobody failed"),
        ("Asks", None, PluginError, "was not made"),
        ("Trace", ["paddle-hal-core>=9.0,<10"], ContractMismatch, "made for contract"),
    ],
)
def test_an_observer_that_cannot_be_used_is_named_with_its_distribution(
    observers, monkeypatch, target, requires, kind, says
):
    observers(requires=requires, trace=target)
    monkeypatch.setenv("HAL_OBSERVERS", "trace")
    with pytest.raises(kind, match=says) as caught:
        hal.open_device("cpu")
    assert "acme-trace 1.0" in str(caught.value)
    assert caught.value.cure


def test_an_observer_that_raises_is_reported_with_its_distribution(observers, monkeypatch, caplog):
    observers(trace="Raises")
    monkeypatch.setenv("HAL_OBSERVERS", "trace")
    caplog.set_level(logging.WARNING, "hal")
    with hal.open_device("cpu") as bound:
        set_value(bound)
    assert "observer trace (acme-trace 1.0) raised in async_set_value" in caplog.text


def test_calls_that_are_observed_go_the_observers_road_and_others_do_not(observers, monkeypatch):
    observers(trace="Trace")

    def broken(**_):
        raise RuntimeError("the observers' road is closed")

    monkeypatch.setattr("hal_core.runtime.observers._watched", lambda *_: broken)
    with hal.open_device("cpu") as plain:
        monkeypatch.setenv("HAL_OBSERVERS", "trace")
        with hal.open_device("cpu") as watched:
            set_value(plain)
            with pytest.raises(RuntimeError, match="road is closed"):
                set_value(watched)


def test_the_listing_says_whose_each_observer_is_and_whether_it_is_used(observers, monkeypatch, capsys):
    observers(trace="Trace", watch="Trace")
    monkeypatch.setenv("HAL_OBSERVERS", "watch")
    show(as_json=True, opened=False, timeout=1.0)
    assert json.loads(capsys.readouterr().out)["observers"] == [
        {"name": "trace", "distribution": "acme-trace", "version": "1.0", "used": False},
        {"name": "watch", "distribution": "acme-trace", "version": "1.0", "used": True},
    ]
    show(as_json=False, opened=False, timeout=1.0)
    listing = capsys.readouterr().out
    assert "observer trace: acme-trace 1.0, not used: HAL_OBSERVERS does not name it" in listing
    assert "observer watch: acme-trace 1.0, used: HAL_OBSERVERS names it" in listing
