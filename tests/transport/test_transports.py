"""Transports by entry point: the scheme of a url names the transport, and only that one is imported."""

import itertools
import sys
from importlib import metadata

import pytest
from hal_core import CapabilityMissing, InvalidValue, MemorySink, PluginError, Unavailable
from hal_engine.transport import SinkOptions, loading, open_sink

from tests.fixtures_plugins.builder import Site

CODE = """
from hal_core import InvalidValue, MemorySink

made = []

def opened(url, options):
    made.append((url, options))
    return MemorySink()

def refused(url, options):
    raise InvalidValue(f"{url!r} has no port", cure="give one", argument="url")

def fails(url, options):
    raise OSError("no card")

def mute(url, options):
    return object()

text = "no function"
"""
numbers = itertools.count()


@pytest.fixture
def transports(tmp_path, monkeypatch):
    """Installs a distribution with transports: ``transports(scheme=target, …)`` returns the name of its module."""
    site = Site(tmp_path / "site")
    monkeypatch.syspath_prepend(str(site.folder))

    def install(distribution="acme-pigeon", **points):
        module = f"transports_{next(numbers)}"
        (site.folder / f"{module}.py").write_text(CODE)
        site.distribution(distribution, points={"hal.transports": {k: f"{module}:{v}" for k, v in points.items()}})
        return module

    return install


def test_the_scheme_names_the_transport_which_gets_url_and_options(transports):
    module, other = transports(pigeon="opened"), transports("other-crow", crow="opened")
    assert isinstance(open_sink("pigeon://roof?n=1", capacity=7, sender=3), MemorySink)
    assert sys.modules[module].made == [("pigeon://roof?n=1", SinkOptions(7, 64 << 20, 10.0, 0.25, 3))]
    assert other not in sys.modules


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("refused", InvalidValue, "'pigeon://x' has no port .give one."),
        ("fails", PluginError, "acme-pigeon 1.0.* transport pigeon: .*fails was not made: OSError: no card"),
        ("mute", PluginError, "mute made object, which is no Sink .*or give a url of another scheme"),
        ("text", PluginError, "is no class and no function"),
        ("missing", PluginError, "failed: .*missing"),
    ],
)
def test_g26_one_that_cannot_be_opened_is_named(transports, target, error, message):
    transports(pigeon=target)
    with pytest.raises(error, match=message):
        open_sink("pigeon://x")


def test_g26_two_distributions_with_one_scheme_are_named(transports):
    transports(pigeon="opened")
    transports("other-crow", pigeon="opened")
    with pytest.raises(InvalidValue, match=r"'pigeon' is provided by acme-pigeon .* and other-crow"):
        open_sink("pigeon://x")


def test_g26_a_loss_that_nobody_can_detect_is_refused(transports):
    transports(pigeon="opened")
    with pytest.raises(CapabilityMissing, match=r"cannot detect a loss .use ipc or tcp"):
        open_sink("pigeon://x", require_loss_detection=True)


def test_g26_a_scheme_without_its_distribution_is_one_line_with_the_cure(monkeypatch):
    monkeypatch.setattr(loading, "installed_in", lambda group: ())
    with pytest.raises(Unavailable) as raised:
        open_sink("sysv://?layout=plain")
    assert str(raised.value) == (
        "url: 'sysv://?layout=plain' needs paddle-hal-fastdeploy, which is not installed "
        "(pip install ./adapters/fastdeploy in hal's checkout)"
    )


def test_g26_an_unknown_scheme_lists_those_that_there_are(transports):
    transports(pigeon="opened")
    with pytest.raises(InvalidValue, match=r"no scheme of ipc, tcp, .*pigeon"):
        open_sink("shm://x")


def test_ipc_and_tcp_are_opened_without_a_search(tmp_path, monkeypatch):
    monkeypatch.setattr(metadata, "distributions", lambda **_: pytest.fail("searched"))
    open_sink(f"ipc://{tmp_path}/socket").close(0)
