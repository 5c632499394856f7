"""Transports: how a step's output gets from a worker to its engine (``hal.reading`` is the engine's side)."""

from __future__ import annotations

import contextlib
import math
import operator
from typing import TYPE_CHECKING

from hal_core import CapabilityMissing, InvalidValue, Sink

from hal.transport.urls import private_ipc_url, release_ipc, scheme_of

if TYPE_CHECKING:
    from hal.transport.curve import CurveKeys

_MOST_FRAMES, _MOST_SENDER = (1 << 63) - 1, (1 << 32) - 1  #: what the fields of a frame can hold
_MOST_DEADLINE = 1e9  #: seconds; a wait for ever is none that Python's locks take (threading.TIMEOUT_MAX)
_LEAST_HEARTBEAT, _MOST_HEARTBEAT = 0.001, 3600.0  #: seconds; ZeroMQ's poll counts milliseconds

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
    cannot notice a loss, so ``require_loss_detection`` refuses it; of the options ``capacity``, ``deadline`` and
    ``sender`` count.

    ``capacity`` frames and ``capacity_bytes`` bound what is queued and not acknowledged; a ``put`` beyond waits up to
    ``deadline`` seconds (0 to 1e9) and then raises ``SinkFull``. The reader hears of the sink every ``heartbeat``
    seconds (0.001 to 3600).
    ``sender`` numbers the workers of one reader, which must differ; a System V queue has one sender, so it is added to
    the id of the queue. Raises ``InvalidValue`` for what cannot be.
    """
    scheme = scheme_of(_text(url))
    capacity = _whole("capacity", capacity, 1, _MOST_FRAMES)
    capacity_bytes = _whole("capacity_bytes", capacity_bytes, 1, _MOST_FRAMES)
    sender = _whole("sender", sender, 0, _MOST_SENDER)
    deadline = _seconds("deadline", deadline, 0.0, _MOST_DEADLINE)
    heartbeat = _seconds("heartbeat", heartbeat, _LEAST_HEARTBEAT, _MOST_HEARTBEAT)
    if scheme == "sysv":
        if require_loss_detection or curve is not None:
            raise CapabilityMissing(
                f"{url!r}: the legacy messages have neither sequence numbers, so no reader can notice a loss, nor keys",
                cure="use ipc or tcp",
                argument="url",
            )
        from hal.transport.sysv_sink import SysvSink

        return SysvSink(url, capacity=capacity, deadline=deadline, sender=sender)
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


def _text(url: object) -> str:
    if not isinstance(url, str):
        cure = "give a str: ipc:///folder/name or tcp://host:port"
        raise InvalidValue(f"{url!r} is no url", cure=cure, argument="url")
    return url


def _whole(name: str, value: object, low: int, high: int) -> int:
    """The value as an int: NumPy's count too, but True is a slip, and a float would fail in the sender's thread."""
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = low - 1
    if not low <= number <= high:
        cure = f"give a whole number from {low} to 2**{high.bit_length()} - 1"
        raise InvalidValue(f"{value!r} cannot be used", cure=cure, argument=name)
    return number


def _seconds(name: str, value: object, least: float, most: float) -> float:
    """The value as a float of seconds. Not a number is not within any bounds."""
    number = math.nan
    if not isinstance(value, bool | str | bytes | bytearray):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)  # type: ignore[arg-type]
    if not least <= number <= most:
        cure = f"give seconds, a number from {least:g} to {most:g}"
        raise InvalidValue(f"{value!r} cannot be used", cure=cure, argument=name)
    return number
