"""Fixtures of several folders: a folder of made-up distributions, and the checkpoint that hal ships."""

from __future__ import annotations

import pytest

from .fixtures_plugins.builder import Site


@pytest.fixture
def empty_site(tmp_path, monkeypatch):
    """A folder in the place of site-packages, without distributions."""
    return Site(tmp_path / "site").activate(monkeypatch)


@pytest.fixture
def site_with_cpu(empty_site):
    """The same with the core and its cpu device."""
    empty_site.core(device=True)
    return empty_site
