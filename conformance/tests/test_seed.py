"""A seed determines all draws: neither imported modules nor a package's kind of installation changes them."""

import importlib
import sys
from types import SimpleNamespace

import pytest
from hal_conformance.harness import properties
from hal_conformance.kit import Effort, examples
from hypothesis import strategies as st


def drawn(seed):
    """Return everything that a property draws under a seed."""
    found = []

    @examples()
    def test_numbers(kit, draw):
        found.append(
            (draw(st.integers(), "a number"), draw(st.floats(allow_nan=False), "a float"), draw(st.text(), "a text"))
        )

    test_numbers(
        SimpleNamespace(effort=Effort("default", examples=300, seed=seed), bound=SimpleNamespace(name="none:0"))
    )
    return found


@pytest.fixture
def literals(tmp_path, monkeypatch):
    """Import a module with many literals from outside site-packages, as an editable install's are."""
    monkeypatch.syspath_prepend(tmp_path)
    numbers = ", ".join(str(977 * number) for number in range(1000, 2000))
    (tmp_path / "editable_plugin.py").write_text(f"NUMBERS = [{numbers}]\n")

    def load():
        importlib.import_module("editable_plugin")

    yield load
    sys.modules.pop("editable_plugin", None)


def test_a_seed_draws_the_same_whatever_else_is_imported(literals):
    before = drawn(7)
    literals()
    assert drawn(7) == before
    assert drawn(8) != before


def test_the_literals_would_change_the_draws_without_it(literals, monkeypatch):
    """A control of the test above: plain Hypothesis takes the module's numbers."""
    monkeypatch.setattr(properties, "LITERALS", "no such pool")
    literals()
    numbers = {number for number, _, _ in drawn(7)}
    assert numbers & {977 * number for number in range(1000, 2000)}


def test_hypothesis_has_its_pool_again_afterwards():
    find = getattr(properties.providers, properties.LITERALS)
    drawn(7)
    assert getattr(properties.providers, properties.LITERALS) is find
