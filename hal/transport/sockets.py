"""The two ZeroMQ sockets, with all their options in one place: a sender connects, the reader binds."""

from __future__ import annotations

from typing import Any

import zmq
from hal_core.errors import HalError, InvalidValue

from hal.transport.curve import CurveKeys, secure_reader, secure_sender
from hal.transport.urls import check_free, endpoint_of, scheme_of, socket_of

#: Messages that ZeroMQ itself may hold on either side; the rest waits in the sender's window, where it is counted.
HIGH_WATER_MARK = 64
#: ZeroMQ's own heartbeat, in ms: a host that is gone without a word is noticed, whatever our threads are busy with.
_PING, _PING_TIMEOUT = 1000, 5000


#: bytes; frames, and what they are made of, are smaller
_KEPT_BLOCK = 16 << 20


def _keep_freed_memory() -> None:
    """Have the C library keep freed blocks of up to 16 MiB, 32 MiB in all, for the next large frame.

    It gives back what is larger than the largest block that was freed so far, and the kernel then clears every page
    anew: that was four fifths of the time of encoding 500 KB. Freeing one block, untouched, is how glibc learns.
    """
    bytes(_KEPT_BLOCK)


def connected(url: str, session: int, curve: CurveKeys | None = None) -> zmq.Socket[bytes]:
    """Return a sender's socket, of a context of its own. Raises InvalidValue for an address that makes no sense."""
    _keep_freed_memory()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.routing_id = b"h" + session.to_bytes(8, "little")
    dealer.sndhwm = dealer.rcvhwm = HIGH_WATER_MARK
    dealer.immediate = True  # nothing is queued for a reader that is not there: it stays in the window
    dealer.reconnect_ivl, dealer.reconnect_ivl_max = 10, 200  # ms
    dealer.heartbeat_ivl, dealer.heartbeat_timeout = _PING, _PING_TIMEOUT
    try:
        if curve is not None:
            secure_sender(dealer, url, curve)
        dealer.connect(endpoint_of(url))
    except HalError:
        context.destroy(linger=0)
        raise
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise InvalidValue(f"cannot connect to {url!r}: {error}", cure="check host and port", argument="url") from error
    return dealer


def bound(url: str, curve: CurveKeys | None = None) -> tuple[zmq.Socket[bytes], Any]:
    """Return the reader's socket, of a context of its own, and with keys the gate that is to be stopped before it.

    Raises InvalidValue for an address that cannot be bound, or has a reader already.
    """
    if scheme_of(url) == "sysv":
        cure = "have the engine's own reader read it; OutputReader reads ipc, shm and tcp"
        raise InvalidValue(f"{url!r} carries no frames", cure=cure, argument="url")
    if socket_of(url) is not None:
        check_free(url)
    _keep_freed_memory()
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.sndhwm = router.rcvhwm = HIGH_WATER_MARK
    router.router_handover = True  # a sender that connects anew takes over its own name
    router.router_mandatory = True  # a word to a sender that is gone is an error, not a silence
    router.heartbeat_ivl, router.heartbeat_timeout = _PING, _PING_TIMEOUT
    gate: Any = None
    try:
        if curve is not None:
            gate = secure_reader(router, url, curve)
        router.bind(endpoint_of(url))
    except HalError:
        context.destroy(linger=0)
        raise
    except zmq.ZMQError as error:
        if gate is not None:
            gate.stop()
        context.destroy(linger=0)
        cure = "choose a free port or a folder that exists and can be written"
        raise InvalidValue(f"cannot bind {url!r}: {error}", cure=cure, argument="url") from error
    return router, gate
