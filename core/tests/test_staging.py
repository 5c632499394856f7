"""The staging ring: memory under a fence is not handed out again, in whatever order fences pass."""

import numpy as np
import pytest
from hal_core.devices.ring_options import RingOptions
from hal_core.devices.staging import ALIGNMENT, CALM, StagingRing
from hal_core.errors import InvalidValue, OutOfMemory

KB = 1024


class Latch:
    """An event that passes when the test lets it; a wait passes it (the device catches up), unless it hangs."""

    def __init__(self, hangs=False):
        self.passed, self.hangs = False, hangs

    def done(self):
        return self.passed

    def wait(self, timeout=None):
        self.passed = self.passed or not self.hangs
        return self.passed


class Host:
    """Staging memory that counts its allocations, and has ``room`` for so many bytes."""

    def __init__(self):
        self.live, self.room = 0, 1 << 30

    def allocate(self, nbytes):
        if self.live + nbytes > self.room:
            raise OutOfMemory("no room")
        self.live += nbytes
        return HostBlock(self, nbytes)


class HostBlock:
    def __init__(self, host, nbytes):
        self.host, self.buffer, self.address, self.released = host, np.zeros(nbytes, np.uint8), id(self), False

    def release(self):
        if not self.released:
            self.released = True
            self.host.live -= len(self.buffer)


def test_g03_a_full_ring_waits_for_its_oldest_entry_alone():
    ring = StagingRing(Host().allocate, RingOptions(ring_start=4 * ALIGNMENT, ring_limit=4 * ALIGNMENT))
    latches = [Latch() for _ in range(3)]
    for latch in latches:
        ring.fence(ring.take(ALIGNMENT), latch)
    ring.fence(ring.take(ALIGNMENT), Latch())
    ring.take(ALIGNMENT)
    assert [latch.passed for latch in latches] == [True, False, False]
    assert ring.waits == 1


def test_more_than_the_limit_goes_in_pieces():
    ring = StagingRing(Host().allocate, RingOptions(ring_start=KB, ring_limit=4 * KB))
    with pytest.raises(InvalidValue, match="in pieces"):
        ring.take(4 * KB + 1)
    assert ring.take(4 * KB).nbytes == 4 * KB


def test_the_ring_gives_back_what_a_burst_made_it_take():
    host = Host()
    ring = StagingRing(host.allocate, RingOptions(ring_start=KB, ring_limit=64 * KB))
    for _ in range(8):
        ring.fence(ring.take(8 * KB), Latch())
    assert host.live > KB
    for _ in range(CALM + 2):
        latch = Latch()
        ring.fence(ring.take(100), latch)
        latch.passed = True
        for _, _, event in ring._segment.entries:
            event.passed = True
        for segment in ring._draining:
            for _, _, event in segment.entries:
                event.passed = True
    assert host.live == KB


def test_a_span_without_a_fence_is_an_error_of_the_device():
    ring = StagingRing(Host().allocate, RingOptions(ring_start=KB, ring_limit=KB))
    span = ring.take(10)
    with pytest.raises(InvalidValue, match="no fence"):
        ring.take(10)
    ring.drop(span)
    assert ring.take(10).begin == 0


def test_a_ring_whose_allocation_fails_hands_out_no_memory_that_it_gave_back():
    host = Host()
    ring = StagingRing(host.allocate, RingOptions(ring_start=KB, ring_limit=4 * KB))
    ring.fence(ring.take(KB), Latch())
    ring.fence(ring.take(2 * KB), Latch())  # beside the first segment, which leaves too little of the limit
    host.room = 3 * KB
    with pytest.raises(OutOfMemory):
        ring.take(4 * KB)
    span = ring.take(100)
    assert not span.segment.block.released
    ring.fence(span, Latch())
    ring.close()
    assert host.live == 0
