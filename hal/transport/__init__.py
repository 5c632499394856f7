"""Transports: how a step's output gets from a worker to its engine (``hal.reading`` is the engine's side)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core import InvalidValue, Sink

from hal.timeouts import TIMEOUTS
from hal.transport.descriptors import SEARCH, check_descriptors
from hal.transport.options import SinkOptions
from hal.transport.urls import SCHEMES, private_ipc_url, release_ipc, scheme_of

if TYPE_CHECKING:
    from hal.transport.curve import CurveKeys

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
    """Open the sink that the url names; a reader may listen there already or come later.

    ``ipc:///folder/name`` and ``tcp://host:port`` send frames over ZeroMQ, with ``curve`` (tcp) encrypted.
    Any other scheme is a transport of the entry-point group ``hal.transports``, as ``sysv://FOLDER?layout=…`` of
    ``plugins/fastdeploy`` (``docs/output.md``). One whose readers cannot notice a loss is refused with
    ``require_loss_detection``.

    ``capacity`` frames and ``capacity_bytes`` bound what is queued and not acknowledged; a ``put`` beyond waits up to
    ``deadline`` seconds (0 to 1e9, default 10) and then raises ``SinkFull``. The reader hears of the sink every
    ``heartbeat`` seconds (0.001 to 3600, default 0.25).
    ``sender`` numbers the workers of one reader, which must differ. Raises ``InvalidValue`` for what cannot be.
    """
    url = _text(url)
    options = SinkOptions(capacity, capacity_bytes, deadline, heartbeat, sender, curve, require_loss_detection)
    if url.partition("://")[0] not in SCHEMES:
        check_descriptors(SEARCH, f"the search for the transport of {url!r}", argument="url")  # without, it finds none
        from hal.transport.loading import open_installed  # so that a worker without one loads no discovery

        return open_installed(url, options)
    scheme_of(url)
    from hal.transport.zmq_sink import ZmqSink  # so that listing devices does not load ZeroMQ

    return ZmqSink(
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
        raise InvalidValue(f"{url!r} is no url", cure=cure, argument="url")
    return url
