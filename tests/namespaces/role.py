"""One side of handovers as a separate process, with JSON commands and answers, one a line.

    python -m tests.namespaces.role URL SEED SILENCE

It prints its description and then answers each line; between lines it polls its transfer.
"""

import hashlib
import json
import os
import select
import sys

import numpy as np
from hal_conformance.fixtures.host_cache import HostCache
from hal_core import HalError
from hal_core.handover import Description, Handover, HandoverKey, Patience, PeerLost
from hal_engine.handover import open_transfer
from hal_engine.transport.curve import CurveKeys

BLOCKS, BLOCK_BYTES = 64, 40 << 10
FACTS = {"contract": "1.0", "layout": "test"}


def ends(event):
    """An event as [kind, request, why or tokens]."""
    name = type(event).__name__
    if isinstance(event, PeerLost):
        return [[name, key.request_id, event.url] for key in event.keys]
    return [[name, event.key.request_id, getattr(event, "why", "")]]


class Role:
    """The transfer, and the handovers that have ended."""

    def __init__(self, url, seed, silence):
        data = np.random.default_rng(seed).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)
        self.cache = HostCache(data, FACTS)
        self.transfer = open_transfer(self.cache, url, CurveKeys.new(), Patience(silence=silence))
        self.ends = []

    def describe(self):
        found = self.transfer.describe()
        return [found.url, found.public_key, dict(found.facts), found.session]

    def reserve(self, name, blocks, source):
        self.transfer.reserve(HandoverKey(name, 0), blocks, Description(*source))

    def send(self, name, to, first, blocks):
        self.transfer.send(HandoverKey(name, 0), Description(*to), first, blocks)

    def seal(self, name, to, blocks):
        self.transfer.seal(HandoverKey(name, 0), Description(*to), Handover(blocks, blocks, 7))

    def ended(self, count):
        """Wait until so many have ended, and return their ends."""
        while len(self.ends) < count:
            self.look(0.05)
        return self.ends

    def digest(self, blocks):
        return hashlib.sha256(self.cache.data[blocks].tobytes()).hexdigest()

    def look(self, seconds):
        poller = select.poll()
        for one in (*self.transfer.sockets, 0):
            poller.register(one, select.POLLIN)
        poller.poll(1000 * seconds)
        for event in self.transfer.receive():
            self.ends += ends(event)


def main(url, seed, silence):
    role = Role(url, int(seed), float(silence))
    print(json.dumps(role.describe()), flush=True)
    pending = b""
    while True:
        role.look(0.1)
        if not select.select([0], [], [], 0)[0]:
            continue
        if not (part := os.read(0, 1 << 16)):
            return
        *lines, pending = (pending + part).split(b"\n")
        for line in lines:
            what, *arguments = json.loads(line)
            try:
                answer = getattr(role, what)(*arguments)
            except HalError as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
