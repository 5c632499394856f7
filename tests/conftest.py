"""Fixtures of several files: commands in this process, folders of made-up distributions."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest


class Done(NamedTuple):
    """How a command has ended: its exit status, and what it has printed."""

    status: int
    out: str
    err: str

    @property
    def answers(self):
        """The objects of ``hal run --json``."""
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def command(capsys):
    """Run a command in this process: ``command("run", "--slots", 2)``."""
    from hal.cli import main  # at the call: some tests run a file without hal

    def call(*arguments):
        status = 0
        try:
            main([*map(str, arguments)])
        except SystemExit as end:
            status = end.code or 0
        return Done(status, *capsys.readouterr())

    return call


@pytest.fixture
def private_folders(tmp_path_factory, monkeypatch):
    """The folder of a run's ipc sockets; it must be empty afterwards. More devices than cpu may be installed."""
    folder = tmp_path_factory.mktemp("ipc")
    monkeypatch.setenv("HAL_DEVICE", "cpu")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    assert list(folder.iterdir()) == [], "the run left an ipc file"


@pytest.fixture(scope="session")
def simulator():
    """The simulated accelerator, built; without a compiler the root's ``conftest.py`` skips the test."""
    pytest.importorskip(
        "hal_sim.build", reason="paddle-hal-sim is not installed: pip install ./plugins/sim"
    ).core_library()


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Install distributions beside the real ones: ``parts(code, distribution, {group: {name: attribute}})``.

    The attributes are those of a module with that code, whose name is returned; ``automatic``: device to runner."""
    from tests.fixtures_plugins.builder import Site  # at the call: some tests run a file without this package

    site = Site(tmp_path / "site")
    monkeypatch.syspath_prepend(str(site.folder))

    def install(code, distribution, groups, requires=None, automatic=()):
        module = f"parts_{len([*site.folder.glob('*.py')])}_of_{tmp_path.name}"
        (site.folder / f"{module}.py").write_text(code)
        points = {group: {name: f"{module}:{what}" for name, what in named.items()} for group, named in groups.items()}
        points |= {"hal.automatic": automatic} if automatic else {}
        site.distribution(distribution, points=points, **({} if requires is None else {"requires": requires}))
        return module

    return install


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
