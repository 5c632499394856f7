"""A prefill side and a decode side over an in-memory wire, with a clock that tests move."""

import numpy as np
from hal_conformance.fixtures.host_cache import HostCache
from hal_conformance.fixtures.memory_wire import MemoryNet
from hal_core.handover import BlockTransfer, Handover, HandoverKey, Patience
from hal_core.tickets import PromiseTicket

BLOCKS, BLOCK_BYTES = 8, 96
PATIENCE = Patience(silence=10.0, deadline=60.0)
FACTS = {"contract": "1.0", "dtype": "float32", "block size": "16", "tp shard": "0/1"}


class Clock:
    """A clock that only tests move."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Side:
    """A transfer, its cache and its reported events."""

    def __init__(self, net, name, clock, *, fill, facts=FACTS, patience=PATIENCE, cache=None):
        data = np.random.default_rng(fill).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)
        self.cache = cache or HostCache(data, facts)
        self.wire = net.wire(f"memory://{name}")
        self.transfer = BlockTransfer(self.cache, self.wire, patience, clock)
        self.events = []

    @property
    def description(self):
        return self.transfer.describe()

    def look(self):
        self.events += self.transfer.receive()
        return self.events


class Pair:
    """``p`` sends, ``d`` receives."""

    def __init__(self, *, p_facts=FACTS, d_facts=FACTS, d_cache=None):
        self.clock, self.net = Clock(), MemoryNet()
        self.p = Side(self.net, "p", self.clock, fill=1, facts=p_facts)
        self.d = Side(self.net, "d", self.clock, fill=2, facts=d_facts, cache=d_cache)

    def reserve(self, key, blocks):
        self.d.transfer.reserve(key, blocks, self.p.description)

    def send(self, key, first, blocks):
        self.p.transfer.send(key, self.d.description, first, blocks)

    def seal(self, key, blocks, **more):
        handover = Handover(blocks, 16 * blocks - 3, **more)
        self.p.transfer.seal(key, self.d.description, handover)
        return handover

    def look(self, rounds=4):
        for _ in range(rounds):
            self.p.look()
            self.d.look()

    def wait(self, seconds, step=1.0):
        """Advance the clock while both sides poll."""
        for _ in range(int(seconds / step)):
            self.clock.now += step
            self.look(1)
        self.look()


def key(number=0, attempt=0):
    return HandoverKey(f"r{number}", attempt)


class LateCache(HostCache):
    """Writes that end when the test lets them."""

    def __init__(self, data, facts):
        super().__init__(data, facts)
        self.tickets = []

    def write(self, blocks, data):
        super().write(blocks, data)
        self.tickets.append(PromiseTicket("async"))
        return self.tickets[-1]


def hand_over(pair, one=None, sent=(5, 2, 7), promised=(1, 3, 4)):
    one = one or key()
    pair.reserve(one, promised)
    pair.send(one, 0, sent[:2])
    pair.send(one, 2, sent[2:])
    return pair.seal(one, len(sent), first_token=7, drafts=(8, 9), state=b"s")
