"""The range of contract versions that a plugin names decides, before it is imported."""

import pytest
from hal_core.errors import ContractMismatch, PluginError

from hal import contract
from hal.discovery import load

from .fixtures_plugins.builder import RANGE, only


@pytest.fixture
def site(empty_site):
    return empty_site


@pytest.mark.parametrize(
    ("core", "requires", "fine"),
    [
        ("1.0.0", [RANGE], True),
        ("1.0.7", [RANGE], True),
        ("1.1.0", [RANGE], True),  # additions: a plugin made for 1.0 still fits
        ("1.0.0", ["paddle-hal-core>=1.1,<2"], False),
        ("1.0.0.dev3", [RANGE], True),
        ("2.0rc1", [RANGE], False),
        ("1.2.0", ["paddle-hal-core~=1.0"], True),
        ("1.2.0", ["paddle-hal-core==1.0.*"], False),
        ("1.2.0", ["paddle-hal-core>=1.3,<2"], False),
        ("2.0.0", [RANGE], False),
        ("1.0.0", ["paddle-hal-core>=0.1,<1"], False),
        ("1.0.0", ["paddle-hal-core[conformance]>=1.0,<2"], True),
        ("1.0.0", ["Paddle_HAL.Core >= 1.0, < 2"], True),
        ("1.0.0", ["paddle-hal-core>=1.0", "paddle-hal-core<2"], True),
        (
            "1.0.0",
            ['paddle-hal-core>=1.0,<2; python_version >= "3"', 'paddle-hal-core>=9,<10; python_version < "3"'],
            True,
        ),
        ("1.0.0", [RANGE, 'paddle-hal-core[conformance]>=5,<6; extra == "test"'], True),
        ("1.0.0", ["this is no requirement", RANGE], True),
    ],
)
def test_the_range_decides_before_the_import(site, core, requires, fine):
    site.core(core)
    site.device("alpha", requires=requires)
    if fine:
        load(only("alpha"))
    else:
        with pytest.raises(ContractMismatch, match="made for contract") as caught:
            load(only("alpha"))
        assert "paddle-hal-alpha 1.0" in str(caught.value)
        assert "install a paddle-hal-alpha made for contract" in caught.value.cure
    assert site.imported() == ({"paddle-hal-alpha"} if fine else set())


@pytest.mark.parametrize(
    ("requires", "says"),
    [
        ([], "names no contract range"),
        (["numpy>=1"], "names no contract range"),
        (["paddle-hal-core"], "names no contract range"),
        (["paddle-hal-core-extras>=1.0,<2"], "names no contract range"),
        ([RANGE + '; extra == "test"'], "names no contract range"),
        (["paddle-hal-core @ https://example.invalid/core.whl"], "names no contract range"),
        (["paddle-hal-core>=1.0"], "no upper bound"),
        (["paddle-hal-core<1"], "no lower bound"),
        (["paddle-hal-core!=0.2"], "no lower bound"),
        (["paddle-hal-core>>1"], "cannot be parsed"),
    ],
)
def test_a_missing_or_open_range_is_an_error_with_the_line_to_write(site, requires, says):
    site.core()
    site.device("alpha", requires=requires)
    with pytest.raises(ContractMismatch, match=says) as caught:
        load(only("alpha"))
    assert "Requires-Dist: paddle-hal-core>=1.0,<2" in caught.value.cure
    assert site.imported() == set()


def test_the_cores_own_device_needs_no_range(site):
    site.core(device=True)
    assert load(only("cpu")).name == "cpu"


def test_a_core_without_usable_metadata_is_an_error(site):
    site.device("alpha")
    with pytest.raises(PluginError, match="paddle-hal-core is not installed"):
        load(only("alpha"))
    site.core("not.a.version")
    with pytest.raises(PluginError, match="no valid version"):
        contract.contract_version()


def test_the_contract_version_is_major_and_minor(site):
    site.core("3.14.159")
    assert contract.contract_version() == "3.14"
