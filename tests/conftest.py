"""Fixtures of several files: folders of made-up distributions."""

from __future__ import annotations

import pytest


@pytest.fixture
def empty_site(tmp_path, monkeypatch):
    """A folder in the place of site-packages, without distributions."""
    from tests.fixtures_plugins.builder import Site  # at the call: some tests run a file without this package

    return Site(tmp_path / "site").activate(monkeypatch)


@pytest.fixture
def site_with_cpu(empty_site):
    """The same with the core and its cpu device."""
    empty_site.core(device=True)
    return empty_site
