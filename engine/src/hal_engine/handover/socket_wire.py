"""The wire of a transfer: channels (:mod:`hal_engine.transport.channel`), within a host, or over tcp with keys.

Each transfer listens at its own address and connects to its receivers. The first frame of a connection names the
sessions of both sides, so that a transfer at a former address is not taken for another.
"""

from __future__ import annotations

import struct
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from hal_core import InvalidValue
from hal_core.frames import new_session
from hal_core.handover import BlockCache, BlockTransfer, Description, Patience

from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.beats import Beats
from hal_engine.transport.channel import CLOSED, Buffer, Channel, connect
from hal_engine.transport.curve import CurveKeys
from hal_engine.transport.hub import Hub

MOST_ADMITTED = 1024
"""Most admitted peers' keys; the oldest is dropped first."""
MOST_PENDING = 16 << 20
"""Bytes that wait in a connection before it takes no more blocks."""
_SESSIONS = struct.Struct("<QQ")


def open_transfer(
    cache: BlockCache, url: str | None = None, keys: CurveKeys | None = None, patience: Patience | None = None
) -> BlockTransfer:
    """Return the transfer of a cache, listening at ``url``, by default at a private ipc address.

    ``keys``: the own pair of keys, for tcp; the peers' keys are in their descriptions.

    :raises InvalidValue: for an invalid address, one that cannot be bound or is in use, or keys for ipc.
    :raises Unavailable: if there are no descriptors left, or no private folder.
    """
    patience = patience or Patience()
    return BlockTransfer(cache, SocketWire(url, keys, patience.silence), patience)


class SocketWire:
    """See :class:`hal_core.handover.Wire`. ``silence``: seconds without a sign of life after which a peer is lost."""

    def __init__(self, url: str | None = None, keys: CurveKeys | None = None, silence: float | None = None) -> None:
        self._keys, self._admitted = keys, OrderedDict[str, int]()  # public keys and their owners' sessions
        own = None if keys is None else CurveKeys(keys.public, keys.secret, admits=self._admitted.__contains__)
        self._hub = Hub("blocks", url, own)
        self.url, self.session = self._hub.url, new_session()
        self.public_key = "" if keys is None else keys.public
        self._silence = TIMEOUTS.silence if silence is None else silence
        self._to, self._from = dict[int, Channel](), dict[int, Channel]()
        self._sessions = dict[Channel, int]()  # of both
        self._lost = list[int]()
        self._beats = Beats(lambda: self._hub.channels, silence=self._silence)

    def admit(self, peer: Description) -> None:
        """See :class:`hal_core.handover.Wire`."""
        self._admitted[peer.public_key] = peer.session
        self._admitted.move_to_end(peer.public_key)
        if len(self._admitted) > MOST_ADMITTED:
            self._admitted.popitem(last=False)

    def connect(self, peer: Description) -> None:
        """See :class:`hal_core.handover.Wire`. Raises Unavailable for another user's ipc socket."""
        if bool(peer.public_key) is not (self._keys is not None):
            has = "a key" if peer.public_key else "no key"
            raise InvalidValue(
                f"{peer.url} has {has}, and this side has {'one' if self._keys is not None else 'none'}",
                cure="give both sides keys, or neither",
                argument="to",
            )
        try:
            keys = None if self._keys is None else self._keys.knowing(peer.public_key)
            channel = connect(peer.url, "blocks", keys)
        except OSError:  # nobody listens there
            self._lost.append(peer.session)
            return
        channel.send(_SESSIONS.pack(self.session, peer.session))
        self._to[peer.session] = self._hub.add(channel)
        self._sessions[channel] = peer.session

    def send(self, peer: int, *parts: Buffer) -> bool:
        """See :class:`hal_core.handover.Wire`."""
        channel = self._to.get(peer)
        return channel is not None and channel.pending < MOST_PENDING and channel.send(*parts)

    def reply(self, peer: int, *parts: Buffer) -> None:
        """See :class:`hal_core.handover.Wire`."""
        if (channel := self._from.get(peer)) is not None:
            channel.send(*parts)

    def receive(self) -> Iterable[tuple[int, Buffer]]:
        """See :class:`hal_core.handover.Wire`."""
        received = list[tuple[int, Buffer]]()
        for channel, frame in self._hub.receive():
            if frame is None:
                self._end(channel)
            elif (session := self._sessions.get(channel)) is not None:
                received.append((session, frame))
            elif channel.ended != CLOSED:  # over a frame before this one
                self._greet(channel, frame)
        return received

    def _greet(self, channel: Channel, frame: memoryview) -> None:
        """Take the first frame of a connection. Close it if it does not come from a transfer that means this one."""
        session, to = _SESSIONS.unpack(frame) if len(frame) == _SESSIONS.size else (0, 0)
        if to != self.session or (self._keys is not None and self._admitted.get(channel.key) != session):
            self._hub.drop(channel)
            return
        if (former := self._from.get(session)) is not None:
            self._hub.drop(former)
            del self._sessions[former]
        self._from[session], self._sessions[channel] = channel, session

    def _end(self, channel: Channel) -> None:
        if (session := self._sessions.pop(channel, None)) is not None:
            self._lost.append(session)
            for known in (self._to, self._from):
                if known.get(session) is channel:
                    del known[session]

    def lost(self) -> Iterable[int]:
        """See :class:`hal_core.handover.Wire`."""
        now = time.monotonic()
        for channel in self._hub.channels:
            if now - channel.heard > self._silence:
                self._hub.drop(channel)
                self._end(channel)
        lost, self._lost = self._lost, []
        return lost

    def has_come(self, peer: int) -> bool:
        """See :class:`hal_core.handover.Wire`."""
        return peer in self._from

    @property
    def sockets(self) -> Sequence[Any]:
        """See :class:`hal_core.handover.Wire`."""
        return () if self._hub.is_closed else (self._hub,)

    def close(self) -> None:
        """See :class:`hal_core.handover.Wire`. The last messages have a moment more."""
        if self._hub.is_closed:
            return
        self._beats.close()
        end = time.monotonic() + TIMEOUTS.parting
        for channel in self._hub.channels:
            channel.flush(max(0.0, end - time.monotonic()))
        self._hub.close()
