"""Transfers over real sockets, polled as a rank's loop polls them."""

import select
import time

import numpy as np
from hal_conformance.fixtures.host_cache import HostCache
from hal_core.handover import Handover, HandoverKey, Patience
from hal_engine.handover import open_transfer

FACTS = {"contract": "1.0", "dtype": "float32"}
SOON = Patience(silence=0.5, deadline=20.0)
"""For tests in which a peer is lost."""
PATIENCE = 30.0


def cache(seed, blocks=8, block_bytes=64, facts=FACTS):
    data = np.random.default_rng(seed).integers(0, 256, (blocks, block_bytes), np.uint8)
    return HostCache(data, facts)


def transfer(seed, url=None, curve=None, patience=None, **sizes):
    """A transfer with its cache as ``cache``, and a list of its reported events."""
    memory = cache(seed, **sizes)
    made = open_transfer(memory, url, curve, patience)
    made.cache, made.events = memory, []
    return made


def look(*transfers, until, patience=PATIENCE):
    """Poll all until ``until()``: only its outcome is asserted, not its time."""
    end = time.monotonic() + patience
    while not until():
        assert time.monotonic() < end, [one.events for one in transfers]
        poller = select.poll()
        for one in transfers:
            for socket in one.sockets:
                poller.register(socket, select.POLLIN)
        poller.poll(20)
        for one in transfers:
            one.events += one.receive()


def hand(p, d, blocks, key=None, promised=None):
    """Promise, send and seal; return the handover."""
    key = key or HandoverKey("r", 0)
    d.reserve(key, promised or blocks, p.describe())
    p.send(key, d.describe(), 0, blocks)
    handover = Handover(len(blocks), 16 * len(blocks), 7, (8,), b"state")
    p.seal(key, d.describe(), handover)
    return handover
