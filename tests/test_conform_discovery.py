"""``hal conform`` refuses plugins in the words of hal, and tests exactly the plugin that hal would open."""

from importlib import import_module

import pytest
from hal_conformance.opening import subject
from hal_core import ContractMismatch, DeviceNotFound, HalError, PluginError, Unavailable

from hal.cli import conform
from hal.selection import select

from .fixtures_plugins.builder import Site


@pytest.fixture
def site(tmp_path, monkeypatch):
    import_module("hal_conformance.report.command")  # with pytest and its plugins, before site-packages goes
    return Site(tmp_path / "site").activate(monkeypatch)


def refusal(call, name):
    with pytest.raises(HalError) as caught:
        call(name)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("device", "environment", "kind"),
    [
        ({"requires": ["paddle-hal-core>=9.0,<10"]}, {}, ContractMismatch),
        ({"requires": []}, {}, ContractMismatch),
        ({}, {"HAL_PLUGINS": ""}, DeviceNotFound),
        ({"priority": "high"}, {}, PluginError),
        ({"state": "broken_import"}, {}, PluginError),
        ({"state": "unavailable"}, {}, Unavailable),
    ],
)
def test_what_hal_refuses_is_not_tested(site, monkeypatch, device, environment, kind):
    site.core()
    site.device("alpha", **device)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refused = refusal(select, "alpha")
    assert refused[0] is kind
    assert refusal(lambda name: conform.run([name]), "alpha") == refused


def test_a_plugin_that_failed_by_itself_is_shown_with_its_traceback(site, command):
    site.core()
    site.device("alpha", state="probe_crashes")
    done = command("conform", "alpha")
    *trace, line = done.err.splitlines()
    assert done.status == 2
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[-1] == "OSError: probe fell over"
    assert line.startswith("hal: error: alpha: paddle-hal-alpha 1.0: probe() failed: OSError: probe fell over (")


def test_a_plugin_that_is_refused_is_not_imported(site, monkeypatch):
    site.core()
    site.device("alpha", requires=["paddle-hal-core>=9.0,<10"])
    site.device("beta")
    monkeypatch.setenv("HAL_PLUGINS", "paddle-hal-alpha")
    for name in ("alpha", "beta"):
        refusal(lambda name: conform.run([name]), name)
    assert site.imported() == set()


def test_a_name_that_two_claim_is_an_error_until_the_allow_list_decides(site, monkeypatch):
    site.core()
    for distribution in ("paddle-hal-one", "paddle-hal-two"):
        site.device("twin", distribution=distribution)
    assert refusal(lambda name: conform.run([name]), "twin") == refusal(select, "twin")
    monkeypatch.setenv("HAL_PLUGINS", "paddle-hal-two")
    found = subject("twin", target=conform._find("twin"))
    assert found.origin == "paddle-hal-two 1.0"
    assert found.recipe.target == select("twin").entry.target, "ranks and liars open the same"
    assert site.imported() == {"paddle-hal-two"}
