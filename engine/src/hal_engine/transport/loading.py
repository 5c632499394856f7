"""Transports by URL scheme, from the entry-point group ``hal.transports``: only the named one is imported.

``ipc`` and ``tcp`` are not looked up: they share one protocol with :mod:`hal_engine.reading`, and open without a
search.
"""

from __future__ import annotations

from hal_core import CapabilityMissing, InvalidValue, Sink, Unavailable

from hal.discovery import TRANSPORTS, installed_in, load_and_make, named
from hal_engine.transport.options import SinkOptions
from hal_engine.transport.urls import SCHEMES

#: Schemes whose distribution is in hal's checkout: its folder and its name.
_KNOWN = {"sysv": ("adapters/fastdeploy", "paddle-hal-fastdeploy")}


def open_installed(url: str, options: SinkOptions) -> Sink:
    """Open the sink of an installed transport.

    :raises InvalidValue: for a scheme that no transport has, or that two distributions claim.
    :raises Unavailable: for a scheme of hal's checkout whose distribution is not installed.
    :raises CapabilityMissing: if the URL asks for a loss detection that the transport does not have.
    :raises PluginError: naming the distribution, if its import fails or it creates no sink.
    """
    scheme, separator, _ = url.partition("://")
    there = installed_in(TRANSPORTS)
    names = {entry.name for entry in there} if separator else set()
    if separator and scheme in _KNOWN.keys() - names:
        folder, name = _KNOWN[scheme]
        cure = f"pip install ./{folder} in hal's checkout"
        raise Unavailable(f"{url!r} needs {name}, which is not installed", cure=cure, argument="url")
    if scheme not in names:
        known = ", ".join(dict.fromkeys([*SCHEMES, *(entry.name for entry in there)]))
        cure = "write ipc:///folder/name or tcp://host:port"
        raise InvalidValue(f"{url!r} has no scheme of {known}", cure=cure, argument="url")
    entry = named(scheme, there, kind="transport", argument="url", cure="use ipc or tcp")
    sink = load_and_make(entry, url, options)
    if not isinstance(sink, Sink):
        raise entry.error(f"{entry.target} made {type(sink).__name__}, which is no Sink")
    if options.require_loss_detection and not getattr(sink, "detects_loss", False):
        sink.close(0)
        what = f"{url!r}: readers of this transport cannot detect a loss"
        raise CapabilityMissing(what, cure="use ipc or tcp", argument="url")
    return sink
