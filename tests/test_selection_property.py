"""Selection against an oracle: drawn sets of installed plugins, drawn wishes."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hal_core.errors import HalError, InvalidValue, Unavailable
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from hal import contract
from hal.discovery import Entry
from hal.selection import first, requested
from tests import share

from .fixtures_plugins.builder import RANGE, Site

NAMES = ("alpha", "beta", "gamma", "delta")
#: State of a plugin: its build, whether its code is imported, and the result of trying it.
OUTCOMES = {
    "available": ("available", {}, True, "chosen"),
    "unavailable": ("unavailable", {}, True, "Unavailable"),
    "raised": ("unavailable_raised", {}, True, "Unavailable"),
    "busy": ("available", {}, True, "Unavailable"),  # available to the probe, not to open
    "broken": ("broken_import", {}, True, "PluginError"),
    "exits": ("exits", {}, True, "PluginError"),
    "crashes": ("probe_crashes", {}, True, "PluginError"),
    "too_new": ("available", {"requires": ("paddle-hal-core>=4.2,<5",)}, False, "ContractMismatch"),
    "no_range": ("available", {"requires": ()}, False, "ContractMismatch"),
}


@dataclass(frozen=True)
class Drawn:
    name: str
    distribution: str
    state: str
    priority: int


@st.composite
def installations(draw):
    plugins = []
    for position in range(draw(st.integers(0, 4), label="plugins")):
        name = draw(st.sampled_from(NAMES), label="name")
        state = draw(st.sampled_from(["available", "unavailable", *OUTCOMES]), label="state")
        priority = draw(st.sampled_from([-1, 0, 5, 5, 10]), label="priority")
        plugins.append(Drawn(name, f"acme-{position}", state, priority))
    return plugins


wishes = st.one_of(st.none(), st.sampled_from([*NAMES, "omega"]))


def oracle(plugins, explicit, environment, allowed):
    """(result, the chosen or the blamed name, the imported devices, the number that were passed over)."""
    visible = [plugin for plugin in plugins if allowed is None or plugin.distribution in allowed]
    wanted = explicit if explicit is not None else environment or None
    if wanted is not None:
        row = [plugin for plugin in visible if plugin.name == wanted]
        if not row:
            return "DeviceNotFound", wanted, set(), 0
        if len(row) > 1:
            return "PluginError", wanted, set(), 0
        return try_in_order(row, named=True)
    row = []
    for priority in (10, 5, 0):
        for name in sorted(NAMES):
            row += [plugin for plugin in visible if plugin.name == name and plugin.priority == priority]
    for plugin in row:
        if len([other for other in visible if other.name == plugin.name]) > 1:
            return "PluginError", plugin.name, set(), 0
    if not row:
        return "DeviceNotFound", None, set(), 0
    return try_in_order(row, named=False)


def try_in_order(row, named):
    imported = set()
    for number, plugin in enumerate(row):
        _, _, loads, result = OUTCOMES[plugin.state]
        if loads:
            imported.add(plugin.distribution)
        if result != "Unavailable" or named:
            return result, plugin.name, imported, number
    return "Unavailable", None, imported, len(row)


@given(installations(), wishes, st.one_of(wishes, st.just("")), st.data())
@settings(
    max_examples=share.of(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_selection_equals_the_oracle(caplog, plugins, explicit, environment, data):
    names = [plugin.distribution for plugin in plugins]
    allowed = data.draw(
        st.one_of(st.none(), st.sets(st.sampled_from(names)) if names else st.just(set())), label="allowed"
    )
    busy = {plugin.distribution for plugin in plugins if plugin.state == "busy"}
    caplog.clear()

    def use(choice):
        if choice.entry.distribution in busy:
            raise Unavailable("the chip is busy", cure="wait")
        return choice.entry.name

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        site = Site(Path(folder)).activate(patch)
        site.core()
        for plugin in plugins:
            build, extra, _, _ = OUTCOMES[plugin.state]
            priority = None if plugin.priority < 0 else plugin.priority
            site.device(plugin.name, state=build, distribution=plugin.distribution, priority=priority, **extra)
        if environment is not None:
            patch.setenv("HAL_DEVICE", environment)
        if allowed is not None:
            patch.setenv("HAL_PLUGINS", ",".join(sorted(allowed)))
        try:
            got, blamed, cure = "chosen", first(use, explicit), "none needed"
        except HalError as error:
            got, blamed, cure = type(error).__name__, str(error), error.cure
        imported = site.imported()

    should, name, loaded, passed = oracle(plugins, explicit, environment, allowed)
    event(should)
    assert cure, f"no cure: {blamed}"
    assert got == should, f"got {got} ({blamed}), should be {should} ({name})"
    assert (blamed == name) if got == "chosen" else (name is None or name in blamed)
    assert imported == loaded
    assert len([record for record in caplog.records if record.name == "hal"]) == passed


@given(
    st.one_of(st.text(max_size=12), st.from_regex(r"[a-z]{1,4}:?[0-9-]{0,3}", fullmatch=True)),
    st.none() | st.integers(-2, 5),
)
def test_any_name_is_read_or_refused(text, index):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HAL_DEVICE", raising=False)
        try:
            request = requested(text, index)
        except InvalidValue:
            return
    name, colon, number = text.partition(":")
    assert request.name == name
    assert request.index == (int(number) if colon else index or 0)


versions = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))


@given(versions, st.integers(0, 3), st.integers(0, 3), st.integers(0, 4))
def test_the_range_holds_exactly_the_versions_between_its_bounds(core, major, minor, upper):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        Site(Path(folder)).activate(patch).core(".".join(map(str, core)))
        entry = Entry("alpha", "acme", "1.0", "m:P", requires=(f"paddle-hal-core>={major}.{minor},<{upper}",))
        inside = (major, minor) <= core[:2] and core[0] < upper
        assert (contract.verdict(entry).problem == "") == inside


def test_the_fixture_range_is_the_one_the_project_states():
    assert RANGE == "paddle-hal-core>=1.0,<2"
