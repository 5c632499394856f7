"""Transports: how a step's output gets from a worker to its engine (``hal.reading`` is the engine's side)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.errors import CapabilityMissing, InvalidValue
from hal_core.sinks import Sink

from hal.transport.urls import private_ipc_url, release_ipc, scheme_of

if TYPE_CHECKING:
    from hal.transport.curve import CurveKeys

__all__ = ["open_sink", "private_ipc_url", "release_ipc"]


def open_sink(
    url: str,
    *,
    capacity: int = 1024,
    capacity_bytes: int = 64 << 20,
    deadline: float = 10.0,
    heartbeat: float = 0.25,
    sender: int = 0,
    curve: CurveKeys | None = None,
    require_loss_detection: bool = False,
) -> Sink:
    """Open the sink that the url names; a reader may listen there already or come later.

    ``ipc:///folder/name`` and ``tcp://host:port`` send frames over ZeroMQ, with ``curve`` (tcp) encrypted.
    ``sysv://FOLDER?layout=…`` writes the System V messages of FastDeploy's own readers (``docs/output.md``); those
    cannot notice a loss, so ``require_loss_detection`` refuses it; of the options ``capacity`` and ``deadline`` count.

    ``capacity`` frames and ``capacity_bytes`` bound what is queued and not acknowledged; a ``put`` beyond waits up to
    ``deadline`` seconds and then raises ``SinkFull``. The reader hears of the sink every ``heartbeat`` seconds.
    ``sender`` numbers the workers of one reader, which must differ. Raises ``InvalidValue`` for what cannot be.
    """
    scheme = scheme_of(url)
    _check_options(capacity, capacity_bytes, deadline, heartbeat, sender)
    if scheme == "sysv":
        if require_loss_detection or curve is not None:
            raise CapabilityMissing(
                f"{url!r}: the legacy messages have neither sequence numbers, so no reader can notice a loss, nor keys",
                cure="use ipc or tcp",
                argument="url",
            )
        from hal.transport.sysv_sink import SysvSink

        return SysvSink(url, capacity=capacity, deadline=deadline)
    from hal.transport.zmq_sink import ZmqSink  # so that listing devices does not load ZeroMQ

    return ZmqSink(
        url,
        capacity=capacity,
        capacity_bytes=capacity_bytes,
        deadline=deadline,
        heartbeat=heartbeat,
        sender=sender,
        curve=curve,
    )


def _check_options(capacity: int, capacity_bytes: int, deadline: float, heartbeat: float, sender: int) -> None:
    for name, value in (("capacity", capacity), ("capacity_bytes", capacity_bytes), ("heartbeat", heartbeat)):
        if not value > 0:
            raise InvalidValue(f"{value!r} is not positive", argument=name)
    if not deadline >= 0:
        raise InvalidValue(f"{deadline!r} is negative", cure="give seconds", argument="deadline")
    if not 0 <= sender < 1 << 32:
        raise InvalidValue(f"{sender!r} is not a number of 0 to 2**32 - 1", argument="sender")
