"""Transports: they carry a step's output from a worker to its engine (``hal_engine.reading`` is the engine's side)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core import InvalidValue, Sink

from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.descriptors import SEARCH, check_descriptors
from hal_engine.transport.options import SinkOptions
from hal_engine.transport.urls import SCHEMES, private_ipc_url, release_ipc, scheme_of

if TYPE_CHECKING:
    from hal_engine.transport.curve import CurveKeys

__all__ = ["SinkOptions", "open_sink", "private_ipc_url", "release_ipc"]


def open_sink(
    url: str,
    *,
    capacity: int = 1024,
    capacity_bytes: int = 64 << 20,
    deadline: float = TIMEOUTS.deadline,
    heartbeat: float = TIMEOUTS.heartbeat,
    sender: int = 0,
    curve: CurveKeys | None = None,
    require_loss_detection: bool = False,
) -> Sink:
    """Open the sink that the URL names. A reader may already listen there or start later.

    ``ipc:///folder/name`` and ``tcp://host:port`` send frames over a channel of their own; ``curve`` encrypts tcp. Any
    other scheme is a transport of the entry-point group ``hal.transports``, such as ``sysv://FOLDER?layout=…`` of
    ``adapters/fastdeploy`` (``docs/output.md``). ``require_loss_detection`` refuses a transport whose readers cannot
    detect a loss.

    ``capacity`` frames and ``capacity_bytes`` limit the frames that are queued and not acknowledged. A ``put`` beyond
    these limits waits up to ``deadline`` seconds (0 to 1e9, default 10) and then raises ``SinkFull``. The sink sends
    the reader a heartbeat every ``heartbeat`` seconds (0.001 to 3600, default 0.25). ``sender`` is the worker's number;
    the workers of one reader need different numbers. Raises ``InvalidValue`` for an invalid argument.
    """
    url = _text(url)
    options = SinkOptions(capacity, capacity_bytes, deadline, heartbeat, sender, curve, require_loss_detection)
    if url.partition("://")[0] not in SCHEMES:
        check_descriptors(SEARCH, f"the search for the transport of {url!r}", argument="url")  # else it finds none
        from hal_engine.transport.loading import open_installed  # ipc and tcp load no discovery

        return open_installed(url, options)
    scheme_of(url)
    from hal_engine.transport.acknowledged_sink import AcknowledgedSink  # so that listing devices loads no sockets

    return AcknowledgedSink(
        url,
        capacity=options.capacity,
        capacity_bytes=options.capacity_bytes,
        deadline=options.deadline,
        heartbeat=options.heartbeat,
        sender=options.sender,
        curve=curve,
    )


def _text(url: object) -> str:
    if not isinstance(url, str):
        cure = "give a str: ipc:///folder/name or tcp://host:port"
        raise InvalidValue(f"{url!r} is not a URL", cure=cure, argument="url")
    return url
