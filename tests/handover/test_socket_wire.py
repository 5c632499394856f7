"""Transfers over ipc and over tcp with keys: arrivals, refused peers, and peers that vanish."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from hal_core import InvalidValue
from hal_core.handover import Arrived, Cancelled, Description, HandoverKey, PeerLost
from hal_engine.handover import open_transfer
from hal_engine.handover.socket_wire import SocketWire
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.channel import connect
from hal_engine.transport.curve import CurveKeys

from tests.handover.ends import FACTS, PATIENCE, SOON, cache, hand, look, transfer

KEY = HandoverKey("r", 0)
LOCAL = "tcp://127.0.0.1:*"


def pair(scheme, **more):
    if scheme == "ipc":
        return transfer(1, **more), transfer(2, **more)
    return transfer(1, LOCAL, CurveKeys.new(), **more), transfer(2, LOCAL, CurveKeys.new(), **more)


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_blocks_of_megabytes_arrive(scheme):
    p, d = pair(scheme, blocks=24, block_bytes=1 << 20)
    with p, d:
        sent, promised = list(range(4, 24)), list(range(20))
        handover = hand(p, d, sent, promised=promised)
        look(p, d, until=lambda: p.events and d.events)
        assert p.events == d.events == [Arrived(KEY, handover)]
        assert np.array_equal(p.cache.data[sent], d.cache.data[promised])


def test_one_worker_sends_to_several_and_takes_from_several():
    both = [transfer(seed, blocks=4) for seed in range(3)]
    given = []
    for i, p in enumerate(both):
        for j, d in enumerate(both):
            if i != j:
                key = HandoverKey(f"{i} to {j}", 0)
                given.append((i, j, key, hand(p, d, [0], key, promised=[1 + (j - i) % 3])))
    look(*both, until=lambda: all(len(one.events) == 4 for one in both))
    for i, j, key, handover in given:
        assert Arrived(key, handover) in both[i].events
        assert Arrived(key, handover) in both[j].events
    for one in both:
        one.close()


def test_a_key_that_was_not_told_is_not_let_in_and_the_peer_is_lost():
    d = transfer(2, LOCAL, CurveKeys.new(), SOON)
    p = transfer(1, LOCAL, CurveKeys.new(), SOON)
    with p, d:
        events = p.describe()
        d.reserve(KEY, [1], Description(events.url, CurveKeys.new().public, events.facts, events.session))
        before = d.cache.data.copy()
        p.send(KEY, d.describe(), 0, [1])
        look(p, d, until=lambda: p.events and d.events)
        assert p.events == [PeerLost(d.describe().url, (KEY,))]
        assert d.events == [PeerLost(events.url, (KEY,))]
        assert np.array_equal(d.cache.data, before)


def test_a_peer_with_a_key_is_not_taken_for_another_peer():
    """It is let in, names the session of the sender for which blocks are reserved, and may not touch them."""
    thief_keys = CurveKeys.new()
    p, d = pair("tcp", patience=SOON)
    with p, d:
        events, own = p.describe(), d.describe()
        d.reserve(KEY, [1], events)
        d.reserve(HandoverKey("s", 0), [2], Description("tcp://127.0.0.1:9", thief_keys.public, events.facts, 5))
        with contextlib.closing(connect(own.url, "blocks", thief_keys.knowing(own.public_key))) as thief:
            thief.send(struct.pack("<QQ", events.session, own.session))
            while not thief.ended:
                thief.establish(0.01)
                thief.receive()
                d.receive()
                assert not d._wire.has_come(events.session)


@pytest.mark.parametrize("which", ["p", "d"])
def test_one_side_without_keys_is_refused_before_anything_is_sent(which):
    p = transfer(1, LOCAL, CurveKeys.new() if which == "d" else None)
    d = transfer(2, LOCAL, CurveKeys.new() if which == "p" else None)
    with p, d, pytest.raises(InvalidValue, match="give both sides keys"):
        p.send(KEY, d.describe(), 0, [1])


def test_a_peer_gets_several_signs_of_life_in_a_silence_shorter_than_a_beat(monkeypatch):
    monkeypatch.setattr(TIMEOUTS, "beat", 1000.0)
    with contextlib.closing(SocketWire(silence=0.4)) as wire, contextlib.closing(connect(wire.url, "blocks")) as peer:
        first, end = peer.heard, time.monotonic() + PATIENCE
        while peer.heard == first:
            assert time.monotonic() < end
            wire.receive()
            peer.receive()


def test_an_address_that_is_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidValue, match="cannot bind"):
        open_transfer(cache(1), f"tcp://127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:9", "ipc:///nowhere/at-all"])
def test_an_address_where_nobody_listens_is_a_lost_peer(url):
    with transfer(1, patience=SOON) as p:
        p.send(KEY, Description(url, "", FACTS, 77), 0, [1])
        look(p, until=lambda: p.events)
        assert p.events == [PeerLost(url, (KEY,))]


@pytest.mark.parametrize("url", ["", "http://x", "tcp://host", "sysv:///tmp"])
def test_an_address_that_makes_no_sense_is_refused(url):
    with pytest.raises(InvalidValue):
        open_transfer(cache(1), url)


PEER = """
import pickle, sys
from tests.handover.ends import transfer, look
from hal_core.handover import HandoverKey
d = transfer(2, blocks=64, block_bytes=1 << 20)
sys.stdout.buffer.write(pickle.dumps((lambda t: (t.url, t.public_key, dict(t.facts), t.session))(d.describe())))
sys.stdout.flush()
url, key, facts, session = pickle.load(sys.stdin.buffer)
from hal_core.handover import Description
d.reserve(HandoverKey("r", 0), list(range(64)), Description(url, key, facts, session))
print("reserved", flush=True)
look(d, until=lambda: False, patience=600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_hanging_process_is_a_lost_peer(how):
    import pickle

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    with (
        subprocess.Popen(
            [sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        ) as peer,
        transfer(1, patience=SOON, blocks=64, block_bytes=1 << 20) as p,
    ):
        try:
            d = Description(*pickle.load(peer.stdout))
            peer.stdin.write(pickle.dumps((p.describe().url, "", dict(p.describe().facts), p.describe().session)))
            peer.stdin.flush()
            assert peer.stdout.readline() == b"reserved\n"
            p.send(KEY, d, 0, range(8))
            os.kill(peer.pid, how)
            p.send(KEY, d, 8, range(8, 64))
            look(p, until=lambda: p.events)
            assert p.events == [PeerLost(d.url, (KEY,))]
            if how == signal.SIGSTOP:  # the next attempt reaches it again
                os.kill(peer.pid, signal.SIGCONT)
                p.events.clear()
                p.send(HandoverKey("r", 1), d, 0, [1])
                look(p, until=lambda: p.events)
                assert p.events[0].why == "no blocks are reserved for it"
        finally:
            peer.kill()


def test_cancel_reaches_the_other_side():
    with transfer(1) as p, transfer(2) as d:
        d.reserve(KEY, [1, 2], p.describe())
        p.send(KEY, d.describe(), 0, [1])
        look(p, d, until=lambda: not np.array_equal(d.cache.data[1], cache(2).data[1]))
        d.cancel(KEY)
        look(p, d, until=lambda: p.events and d.events)
        assert p.events == d.events == [Cancelled(KEY)]


def test_what_is_no_transfers_is_skipped():
    with transfer(1) as p, transfer(2) as d, contextlib.ExitStack() as strangers:
        for frame in (b"", b"junk", bytes(16), struct.pack("<QQ", 7, p.describe().session)):
            stranger = strangers.enter_context(contextlib.closing(connect(d.describe().url, "blocks")))
            stranger.send(frame)
            stranger.send(b"more")
        handover = hand(p, d, [1, 2])
        look(p, d, until=lambda: p.events and d.events)
        assert p.events == d.events == [Arrived(KEY, handover)]
